"""Settings of vLLM as a worker: a worker's own, by their names in the environment, since vLLM has the flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from speclen.transport.address import split_address
from speclen.transport.credentials import ClientSecurity
from speclen.transport.settings import flag
from speclen.worker.config import parse_policy

CONTROLLER = "SPECLEN_CONTROLLER"
WORKER = "SPECLEN_WORKER_"
SETTINGS = ("policy", "target", "draft", "worker_id", "run_id")
FILES = ("ca", "cert", "key", "token_file")  # behind CONTROLLER_
SECURITY = ClientSecurity(prefix="--controller-")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings that `speclen worker` takes as flags.

    policy: adaptive; profile for the lengths that vLLM was configured with; none or fixed:K. All of them report.
    target, draft: names of the models for the controller; empty for vLLM's own.
    """

    controller: str
    policy: str = "adaptive"
    target: str = ""
    draft: str = ""
    worker_id: str = ""
    run_id: str = ""
    security: ClientSecurity = SECURITY

    def __post_init__(self) -> None:
        split_address(CONTROLLER, self.controller)
        arm = parse_policy(self.policy)
        if arm is not None and arm.ngram:
            raise ValueError(
                f"--policy {self.policy} is not known here: vLLM's drafts come from what --speculative-config names"
            )


def settings_from(environment: Mapping[str, str]) -> VllmSettings:
    """Raises ValueError, naming variable and value, for what cannot work."""
    controller = environment.get(CONTROLLER) or environment.get(f"{WORKER}CONTROLLER")
    if not controller:
        raise ValueError(f"{CONTROLLER} is not set: give the address of the controller, for example 127.0.0.1:7070")
    given = {name: value for name in SETTINGS if (value := environment.get(WORKER + name.upper()))}
    files = {name: Path(value) for name in FILES if (value := environment.get(f"{WORKER}CONTROLLER_{name.upper()}"))}
    security = ClientSecurity(**files, prefix="--controller-")
    return VllmSettings(controller, security=security, **given)


def as_variables(sentence: str) -> str:
    """A worker's sentence with variables in place of its flags: here are none. vLLM's own flags stay."""
    names = {name: WORKER + name.upper() for name in (*SETTINGS, *(f"controller_{name}" for name in FILES))}
    for name, variable in (names | {"controller": CONTROLLER}).items():
        sentence = re.sub(rf"{flag(name)}(?![\w-])", variable, sentence)
    return sentence
