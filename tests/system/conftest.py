"""The plugin's scheduler, on a base with vLLM's interface (fake_vllm)."""

import importlib
import os

import pytest
import structlog

from tests.support import fake_vllm


@pytest.fixture
def integration(monkeypatch):
    """The package, with fake vLLM modules installed and no SPECLEN_ variables set."""
    fake_vllm.install(monkeypatch)
    for name in [name for name in os.environ if name.startswith("SPECLEN_")]:
        monkeypatch.delenv(name)
    structlog.reset_defaults()
    yield importlib.import_module("speclen.integrations.vllm")
    structlog.reset_defaults()


@pytest.fixture
def scheduler_for(integration, monkeypatch):
    """Makes a scheduler as vLLM does, with variables set; all are shut down at the end."""
    made = []

    def make(config=None, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        scheduler = integration.Scheduler(vllm_config=config or fake_vllm.config())
        made.append(scheduler)
        return scheduler

    yield make
    for scheduler in made:
        scheduler.shutdown()
