"""The store on the SQLite that Python brings, as on systems without pysqlite3: its own tests, in another process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.modules["pysqlite3"] = sys.modules["pysqlite3.dbapi2"] = None  # an import raises ImportError
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
"""


def test_the_tests_of_the_store_pass_with_pythons_own_sqlite(tmp_path):
    paths = [f"tests/unit/test_store_{name}.py" for name in ("database", "rows", "views")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    arguments = [sys.executable, "-c", PROGRAM, f"--basetemp={tmp_path / 'inner'}", *paths]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
