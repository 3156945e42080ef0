"""Light programs load nothing heavy. Which folder may import which: [tool.importlinter] in pyproject.toml."""

import subprocess
import sys
from collections.abc import Iterable

from speclen.cli.app import VERBS


def loaded_by(*modules: str, missing: Iterable[str] = ()) -> set[str]:
    """Modules loaded by a process that imports these modules of speclen, with some packages missing."""
    names = ", ".join(f"speclen.{name}" for name in modules)
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(missing)})); import {names}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


# Packages that only the extras install.
NAMES = """torch transformers tokenizers huggingface_hub safetensors fastapi starlette uvicorn httptools jinja2 openvino
    llguidance matplotlib datasette grpc_health grpc_reflection ray"""
EXTRAS = {*NAMES.split()}


def test_the_base_package_runs_without_its_extras():
    verbs = [module.removeprefix("speclen.") for module, *_ in VERBS.values()]
    assert loaded_by("controller.service.controller_server", "store.backup", "worker.config", *verbs, missing=EXTRAS)


def test_the_estimator_alone_loads_no_server_and_no_models():
    loaded = {name.partition(".")[0] for name in loaded_by("estimator")}
    assert not loaded & {"grpc", "structlog", "torch", "sqlite3", "typer"}


def test_vllms_process_loads_neither_our_torch_nor_our_engine():
    ours = {"speclen.worker.engine.engine", "speclen.worker.backends", "speclen.controller"}
    heavy = {"torch", "transformers", "fastapi", "typer", "sqlite_utils"}
    assert not loaded_by("integrations.vllm.steering") & (ours | heavy)


def test_vllms_other_processes_load_next_to_nothing_of_the_plugin():
    """vLLM calls `register` in all of them, and each worker of a V2 draft model loads what follows lengths."""
    package = {"speclen", "speclen.integrations", "speclen.integrations.vllm"}
    for module, own in (
        ("integrations.vllm", set()),
        ("integrations.vllm.startup", {"speclen.integrations.vllm.startup"}),
    ):
        loaded = loaded_by(module)
        assert {name for name in loaded if name.startswith("speclen")} == package | own
        assert not loaded & {"grpc", "google.protobuf", "structlog", "numpy", "torch"}
