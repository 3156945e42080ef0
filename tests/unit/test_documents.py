"""Commands, flags, links and settings in documents exist, and the estimator's page works as a library."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import typer

from speclen.cli.app import VERBS, app, checked_client_keys, checked_keys, load_verb, settings_of_verb
from speclen.cli.support.flags import check_environment
from tests.support.world import World

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"(?:^|\s|`)speclen ((?:[a-z]+)(?: [^`#\n|&]*)?)")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """(document, command line without `speclen`) for every command in code of any document."""
    found = set()
    for document in DOCUMENTS:
        text = document.read_text()
        code = "\n".join(blocks(text, r"\w*")) + "\n" + "\n".join(re.findall(r"`(speclen [^`\n]+)`", text))
        found |= {(document.name, match.strip()) for match in COMMAND.findall(code.replace("\\\n", " "))}
    return sorted(found)


@pytest.mark.parametrize(("document", "line"), commands())
def test_commands_and_flags_exist(document, line):
    words = line.split()
    assert words[0] in VERBS, f"{document} names `speclen {line}`"
    command = load_verb(words[0], *VERBS[words[0]][:2])
    context = typer.Context(typer.main.get_command(app))
    for word in words[1:]:
        if hasattr(command, "commands") and word in command.commands:
            command = command.get_command(None, word)
    flags = {flag for parameter in command.get_params(context) for flag in [*parameter.opts, *parameter.secondary_opts]}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in flags, f"{document}: `speclen {line}` has no flag {word}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_in_examples_are_settings(document):
    for block in blocks(document.read_text(), "toml"):
        for verb, values in tomllib.loads(block).items():
            if verb == "client":
                checked_client_keys(values, document.name)
            else:
                checked_keys(values, load_verb(verb, *VERBS[verb][:2]), document.name)


def test_deployments_name_settings_and_flags_that_exist():
    files = [
        *(ROOT / "deploy").rglob("*.yaml"),
        *(ROOT / "deploy").rglob("*.service"),
        ROOT / "docs" / "guides" / "runbook.md",
    ]
    text = "".join(path.read_text() for path in files)
    variables = set(re.findall(r"SPECLEN_[A-Z_]+[A-Z]", text))
    assert len(variables) > 6
    check_environment(variables - {"SPECLEN_CONTROLLER", "SPECLEN_WORKER"}, [*VERBS, "client"], settings_of_verb)
    for verb, arguments in re.findall(r"command: \[(controller|worker), (.*)\]", text):
        flags = {flag for each in load_verb(verb, *VERBS[verb][:2]).params for flag in each.opts}
        assert set(re.findall(r"--[a-z-]+", arguments)) <= flags, verb


def test_the_pages_loop_learns_a_good_length(monkeypatch):
    page = ROOT / "docs" / "guides" / "library.md"
    [code] = blocks(page.read_text(), "python")
    world, rng, now = World(), np.random.default_rng(0), [0.0]

    def decode(batch: list, length: int) -> list[int]:
        seconds, histogram = world.draw(len(batch), length, rng)
        now[0] += seconds
        return [run for run, number in enumerate(histogram) for _ in range(number)]

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    names = {"decode": decode}
    exec(compile(code, str(page), "exec"), names)  # noqa: S102
    for _ in range(600):
        names["step"]([None] * 8)
    assert world.shortfall(8, names["estimator"].arm_for(8).speculation_length) < 0.03
