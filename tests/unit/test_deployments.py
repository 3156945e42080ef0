"""The compose file and the systemd units: each program is given the secrets that it reads, and nobody another's."""

from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())


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


def services() -> str:
    """The units of docs/guides/install.md."""
    return (
        (DEPLOY.parent / "docs" / "guides" / "install.md")
        .read_text()
        .partition("\n## Services\n")[2]
        .partition("\n## ")[0]
    )
