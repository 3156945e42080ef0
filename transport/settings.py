"""Settings of a program: each is written once, as a field of its configuration class, with help and bounds.

The command line makes a flag of every field (`speclen.cli.support.flags`), so flag, environment variable, key of the
configuration file, default and help cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any


def setting(default: Any, help: str, *, least: float | None = None, most: float | None = None) -> Any:
    """A field of a configuration class. help: one sentence for --help. least, most: bounds, both allowed."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


def settings_of(config: type) -> Mapping[str, Field[Any]]:
    """The settings of a configuration class by name, its own before its base's; its other fields are not among them."""
    own = config.__annotations__
    return {each.name: each for each in sorted(fields(config), key=lambda each: each.name not in own) if each.metadata}


def flag(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


def check_bounds(config: Any) -> None:
    """Raise ValueError, naming flag and value, for a setting outside its bounds. NaN is outside of all."""
    for each in settings_of(type(config)).values():
        value, least, most = getattr(config, each.name), each.metadata["least"], each.metadata["most"]
        if least is not None and not value >= least:
            raise ValueError(f"{flag(each.name)} is {value}; it must be at least {least}")
        if most is not None and not value <= most:
            raise ValueError(f"{flag(each.name)} is {value}; it must be at most {most}")
