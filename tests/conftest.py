"""Settings for all tests: no network, few threads, since test processes share the cores."""

import asyncio
import inspect
import os
import tempfile

import pytest
from hypothesis import settings

from speclen.process.servers import prepare_aio
from speclen.store.database import Store
from tests.support.waiting import PATIENCE_S

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
STATE = tempfile.TemporaryDirectory(prefix="speclen-state-")  # what tests learn stays out of the user's
os.environ["XDG_STATE_HOME"] = STATE.name
if os.environ.get("SPECLEN_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports it: kernels run without a GPU, slowly


# A case may take long because other processes compute.
settings.register_profile("patient", deadline=None, max_examples=40)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    # Before any test makes a channel: the first use decides how gRPC's poller is made, for the whole process.
    prepare_aio()


@pytest.fixture
def store(tmp_path):
    """A new one, open in s.db."""
    store = Store.open(tmp_path / "s.db")
    yield store
    store.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of a tiny Llama and of a draft that often agrees with it."""
    from tests.support import tiny_models  # with torch, which few tests need

    return tiny_models.save_pair("llama", tmp_path_factory.mktemp("pair"), noise=0.05)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), 2 * PATIENCE_S))
    return True
