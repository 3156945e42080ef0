"""The versions of vLLM that this was tested with: the one place where they are named."""

from __future__ import annotations

import re

# Its scheduler is no public interface: another version may call it otherwise, and nobody would notice but in the figures.
TESTED = ("0.32.0",)
ANY_VERSION = "SPECLEN_VLLM_ANY_VERSION"


def check_version(version: str, any_version: bool) -> None:
    """Raises ValueError for a version that was not tested, unless that is wanted. Builds ("+cpu") are not told apart."""
    match = re.match(r"\d+\.\d+\.\d+", version)
    if (match is None or match[0] not in TESTED) and not any_version:
        raise ValueError(
            f"vLLM {version} was not tested with speclen, only {', '.join(TESTED)}: install that, "
            f"or try it all the same with {ANY_VERSION}=1"
        )
