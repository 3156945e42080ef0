"""A result names the commit that made it, and never somebody else's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from speclen.cli.support.machine import checkout_of, provenance


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    checkout_of.cache_clear()
    yield
    checkout_of.cache_clear()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A file in a repository that has another in docs/."""
    for name in ("program.py", "docs/page.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("as committed\n")
    identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "m"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return tmp_path / "program.py"


def test_the_commit_is_named_and_changes_outside_docs_are_told(checkout: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout.parent, check=True, capture_output=True, text=True)
    assert checkout_of(checkout) == (head.stdout[:12], False)
    (checkout.parent / "docs" / "page.md").write_text("results of the first experiment\n")
    checkout_of.cache_clear()
    assert checkout_of(checkout) == (head.stdout[:12], False)
    checkout.write_text("changed\n")
    assert checkout_of(checkout) == (head.stdout[:12], False), "what runs was loaded before the change"
    checkout_of.cache_clear()
    assert checkout_of(checkout) == (head.stdout[:12], True)


def test_a_program_installed_inside_a_repository_does_not_take_that_for_its_own(checkout: Path) -> None:
    """An environment often lies in the checkout of another project."""
    installed = checkout.parent / ".venv" / "machine.py"
    installed.parent.mkdir()
    installed.touch()
    assert checkout_of(installed) == (None, None)


def test_without_git_a_result_is_written_all_the_same(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout.parent))
    assert checkout_of(checkout) == (None, None)


def test_the_command_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/speclen", "bench", "serve", "--out", "my file.json"])
    assert provenance()["command"] == "speclen bench serve --out 'my file.json'"
    assert provenance("python scripts/paper_experiments.py")["command"].startswith("python scripts/paper_exp")


def test_who_asks_for_the_commit_does_not_wait_for_torch() -> None:
    code = "import sys, speclen.cli.support.machine as m; m.provenance(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
