"""A fleet on Ray: the controller as a named actor, workers as replicas of Ray Serve, one address for all of them.

    speclen up --ray --workers 4
    serve run speclen.integrations.ray:app workers=4 target=MODEL draft=MODEL

Only `application`, `actor` and `cluster` import Ray; everything else can be tested without.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from speclen.integrations.ray.application import app

    return app
