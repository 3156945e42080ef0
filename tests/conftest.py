"""Settings for all tests: no network, few threads, since test processes share the cores."""

import os

import pytest

from speclen.transport.aio import prepare_aio

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if os.environ.get("SPECLEN_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports it: kernels run without a GPU, slowly


def pytest_configure(config: pytest.Config) -> None:
    # Before any test makes a channel: the first use decides how gRPC's poller is made, for the whole process.
    prepare_aio()
