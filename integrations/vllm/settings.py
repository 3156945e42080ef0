"""Settings of vLLM as a worker, from environment variables, since the flags are vLLM's; and logging to vLLM's log."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from speclen.process.credentials import ClientSecurity
from speclen.process.embedded import EMBEDDED, OFF
from speclen.process.settings import flag, split_address
from speclen.worker.config import parse_policy

CONTROLLER = "SPECLEN_CONTROLLER"
WORKER = "SPECLEN_WORKER_"
SETTINGS = ("policy", "baseline", "target", "draft", "worker_id", "run_id")
FILES = ("ca", "cert", "key", "token_file")  # after the prefix CONTROLLER_
SECURITY = ClientSecurity(prefix="--controller-")
CONFIGURED = "configured"
LOGGER = "vllm.speclen"  # a child of vLLM's logger, so that its handler and level apply


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings that `speclen worker` takes as flags.

    controller: HOST:PORT, or embedded.
    policy: adaptive; profile: the lengths configured in vLLM; shadow: these, with trials of the learned ones; none or
    fixed:K. All of them report. baseline: configured, to compare learned lengths with the configured ones, or off.
    target, draft: names of the models for the controller; empty: vLLM's own names.
    """

    controller: str
    policy: str = "adaptive"
    baseline: str = CONFIGURED
    target: str = ""
    draft: str = ""
    worker_id: str = ""
    run_id: str = ""
    security: ClientSecurity = SECURITY

    @property
    def follows_table(self) -> bool:
        """True if the controller's table is used."""
        return self.policy in ("adaptive", "shadow")

    def __post_init__(self) -> None:
        if self.controller == OFF:
            raise ValueError(f"{CONTROLLER} is {OFF}")
        if self.controller != EMBEDDED:
            split_address(CONTROLLER, self.controller)
        if self.baseline not in (OFF, CONFIGURED):
            raise ValueError(f"--baseline {self.baseline} is unknown here: use {CONFIGURED}, for vLLM's own, or {OFF}")
        if self.policy == "shadow" and self.baseline == OFF:
            raise ValueError(f"--policy shadow serves with the baseline, which is off: give --baseline {CONFIGURED}")
        arm = parse_policy(self.policy)
        if arm is not None and arm.ngram:
            raise ValueError(
                f"--policy {self.policy} is not known here: vLLM's drafts come from what --speculative-config names"
            )


def settings_from(environment: Mapping[str, str]) -> VllmSettings:
    """The settings in the environment. Raises ValueError naming an invalid variable and its value."""
    controller = environment.get(CONTROLLER) or environment.get(f"{WORKER}CONTROLLER") or EMBEDDED
    given = {name: value for name in SETTINGS if (value := environment.get(WORKER + name.upper()))}
    files = {name: Path(value) for name in FILES if (value := environment.get(f"{WORKER}CONTROLLER_{name.upper()}"))}
    security = ClientSecurity(**files, prefix="--controller-")
    return VllmSettings(controller, security=security, **given)


def as_variables(sentence: str) -> str:
    """Replace a worker's flags in an error sentence by variables, since those flags do not exist here. vLLM's flags stay."""
    names = {name: WORKER + name.upper() for name in (*SETTINGS, *(f"controller_{name}" for name in FILES))}
    for name, variable in (names | {"controller": CONTROLLER}).items():
        sentence = re.sub(rf"{flag(name)}(?![\w-])", variable, sentence)
    return sentence


def set_up_logs() -> None:
    """Send our events to vLLM's log, unless this process has configured structlog already."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[structlog.processors.format_exc_info, as_line],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=lambda *_: logging.getLogger(LOGGER),
    )


def as_line(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    """A line such as "speclen: arms changed (version=3, arms={…})", with a traceback if there is one."""
    sentence, trace = event.pop("event"), event.pop("exception", "")
    values = ", ".join(f"{key}={value}" for key, value in event.items())
    line = as_variables(f"speclen: {sentence}{f' ({values})' if values else ''}")
    return f"{line}\n{trace}" if trace else line
