"""`speclen up --ray`: the same fleet on a Ray cluster, behind one address."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from speclen.cli.support.errors import UserError, say
from speclen.cli.support.processes import end_as_by_ctrl_c
from speclen.integrations.ray.settings import FleetConfig

# Of `up`'s own defaults: a setting that is nothing special is left to each node's environment.
UNTOLD = ("", None)


def up_on_ray(address: str, fleet: dict[str, Any], worker: dict[str, Any], listen: str, http_listen: str) -> None:
    """Run controller and workers on the cluster until Ctrl-C. Raises UserError for what cannot work."""
    end_as_by_ctrl_c()
    try:
        config = FleetConfig(**fleet, worker={name: value for name, value in worker.items() if value not in UNTOLD})
        from speclen.integrations.ray.cluster import fleet as running  # here: Ray takes seconds to import
        from speclen.integrations.ray.cluster import join

        say(f"joining the Ray cluster {'of this machine' if address == 'auto' else f'at {address}'}")
        join(address)
        with running(config, listen, http_listen, say) as served:
            print_address(served, listen, http_listen)
            while True:
                time.sleep(1.0)
    except KeyboardInterrupt:
        say("\nstopped")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("Ray is not installed: pip install 'speclen[ray]'") from error
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def print_address(config: FleetConfig, listen: str, http_listen: str) -> None:
    token: Path | None = config.worker.get("token_file")
    port = listen.rpartition(":")[2]
    print(
        f"""
workers     {config.workers} behind  127.0.0.1:{port}    http  {http_listen}
database    {config.data_dir / "speclen.db"}    Ctrl-C ends all

In another terminal:
  speclen generate "def read_file(path):" --worker 127.0.0.1:{port}{f" --token-file {token}" if token else ""}
  speclen tables --db {shlex.quote(str(config.data_dir / "speclen.db"))}
""",
        flush=True,
    )
