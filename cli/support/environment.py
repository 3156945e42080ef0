"""Environment variables that look like settings: ours, misspelt ones, and those that others put there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

from speclen.cli.support.errors import UserError

OTHERS = ("SPECLEN_CONFIG", "SPECLEN_CONTROLLER", "SPECLEN_DATA_DIR", "SPECLEN_TEST_DEVICE")  # of no single verb

# What Kubernetes puts into every pod for a service whose name begins with speclen: SPECLEN_SERVICE_HOST,
# SPECLEN_WORKER_PORT_7080_TCP_ADDR, SPECLEN_PORT and so on.
FROM_KUBERNETES = re.compile(
    r"SPECLEN(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
CLOSE = 0.75  # how alike two names are when one is a misspelling of the other


def check_environment(names: Iterable[str], verbs: Iterable[str], settings: Callable[[str], Iterable[str]]) -> None:
    """Raises UserError for a variable that is not a setting but means to be one, and says which it is near to.

    verbs: what may follow SPECLEN_. settings: names of the settings of a verb, asked for only where a variable needs it.
    Variables far from all of speclen's names belong to other programs, and are ignored.
    """
    prefixes = {f"SPECLEN_{verb.upper()}_": verb for verb in verbs}
    for name in names:
        if not name.startswith("SPECLEN_") or FROM_KUBERNETES.fullmatch(name):
            continue
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            known = {setting.replace("-", "_").upper() for setting in settings(prefixes[prefix])}
            if name.removeprefix(prefix) not in known:
                close = difflib.get_close_matches(name.removeprefix(prefix), known, n=1, cutoff=CLOSE)
                some = f"it may be one of {prefix}{{{', '.join(sorted(known)[:8])}, …}}"
                way_out = f"; did you mean {prefix}{close[0]}?" if close else f": {some}"
                raise UserError(f"the environment variable {name} is not a setting{way_out}")
        elif name not in OTHERS and (meant := nearest_name(name, prefixes)):
            raise UserError(f"the environment variable {name} is not a setting; did you mean {meant}?")


def nearest_name(name: str, prefixes: Iterable[str]) -> str:
    """The variable that was meant where its verb, or all of it, is misspelt; "" for another program's."""
    verb = "_".join(name.split("_", 2)[:2]) + "_"
    for close in difflib.get_close_matches(verb, prefixes, n=1, cutoff=CLOSE + 0.05):
        if len(name) > len(verb):
            return close + name.removeprefix(verb)
    return "".join(difflib.get_close_matches(name, OTHERS, n=1, cutoff=CLOSE))
