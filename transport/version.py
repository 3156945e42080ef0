"""Version of the running program."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Version of the package; "unknown" where the source is run without having been installed."""
    try:
        return version("speclen")
    except PackageNotFoundError:
        return "unknown"
