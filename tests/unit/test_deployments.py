"""The compose file and the systemd units: each program is given the secrets that it reads, and nobody another's."""

import re
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def test_a_container_is_given_the_secrets_that_it_reads_and_no_others():
    for name, service in COMPOSE["services"].items():
        read = {
            value.removeprefix("/run/secrets/")
            for value in service["environment"].values()
            if value.startswith("/run/secrets/")
        }
        assert read == set(service["secrets"]) <= set(COMPOSE["secrets"]), name


def test_clients_of_the_compose_file_have_another_token_than_the_controller():
    controller, worker = (COMPOSE["services"][name]["environment"] for name in ("controller", "worker"))
    assert worker["SPECLEN_WORKER_CONTROLLER_TOKEN_FILE"] == controller["SPECLEN_CONTROLLER_TOKEN_FILE"]
    assert worker["SPECLEN_WORKER_TOKEN_FILE"] != controller["SPECLEN_CONTROLLER_TOKEN_FILE"]
    files = {f"deploy/docker/{Path(secret['file']).name}" for secret in COMPOSE["secrets"].values()}
    for name in (".gitignore", ".dockerignore"):
        assert files <= set((DEPLOY.parent / name).read_text().split()), name


def test_a_probe_of_a_container_asks_where_its_program_answers_probes():
    for name, service in COMPOSE["services"].items():
        asked = service["healthcheck"]["test"][-2:]
        assert asked == [name, service["environment"][f"SPECLEN_{name.upper()}_PROBE_LISTEN"]]


@pytest.mark.parametrize("unit", UNITS, ids=[unit.stem for unit in UNITS])
def test_a_service_reads_what_systemd_hands_to_it(unit):
    """Its own user may read none of the files."""
    text = unit.read_text()
    handed = dict(re.findall(r"^LoadCredential=([^:]+):(.+)$", text, re.MULTILINE))
    read = re.findall(r"^Environment=SPECLEN_\w+=%d/(.+)$", text, re.MULTILINE)
    assert sorted(read) == sorted(handed)
    assert handed == {name: f"/etc/speclen/{name}" for name in handed}
    for name in handed:
        assert f"`{name}`" in services(), f"docs/guides/install.md does not say that {unit.name} needs {name}"


def services() -> str:
    """The units of docs/guides/install.md."""
    return (
        (DEPLOY.parent / "docs" / "guides" / "install.md")
        .read_text()
        .partition("\n## Services\n")[2]
        .partition("\n## ")[0]
    )


def test_a_service_that_cannot_work_is_not_started_again_and_again():
    for unit in UNITS:
        assert "\nRestartPreventExitStatus=2\n" in unit.read_text()
