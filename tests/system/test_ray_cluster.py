"""Resources of a fleet on a Ray cluster, made, found and ended, with Ray played.

With Ray itself: scripts/fleet_check.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speclen.integrations.ray.hosting import RefusedError
from speclen.integrations.ray.settings import FleetConfig

NODE, CONTROLLER = "10.0.0.5", "speclen-controller"
ANY = "127.0.0.1:0"


class RayError(Exception):
    """An exception of Ray's own."""


class RayTaskError(RayError):
    """An error of an actor's, on its way to who asked."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"a traceback\n{cause}")
        self.cause = cause


class Answer:
    """The result of calling an actor's method: to be awaited, or taken by `ray.get`."""

    def __init__(self, made: Callable[[], Any]) -> None:
        self.made = made

    def __await__(self) -> Any:
        return self._when_made().__await__()

    async def _when_made(self) -> Any:
        return self.made()


class Handle:
    """Of an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *given: Answer(lambda: getattr(self.actor, method)(*given)))


@dataclass
class PlayedRay:
    """A cluster. machines: of its nodes, all alive. applications, proxies: of the Serve that runs. done: what was asked.

    broken: why a controller that is made from now on cannot start; "": it can.
    """

    machines: list[str] = field(default_factory=lambda: ["this"])
    applications: dict[str, Any] = field(default_factory=dict)
    proxies: dict[str, Any] = field(default_factory=dict)
    actors: dict[str, Handle] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    broken: str = ""

    def modules(self) -> dict[str, Any]:
        """As `integrations/ray` imports them."""
        config = SimpleNamespace(
            HTTPOptions=SimpleNamespace, gRPCOptions=SimpleNamespace, ProxyLocation=SimpleNamespace(HeadOnly="HeadOnly")
        )
        serve = SimpleNamespace(
            config=config,
            status=lambda: SimpleNamespace(proxies=self.proxies, applications=self.applications),
            start=lambda **options: self.done.append("start"),
            shutdown=lambda: self.done.append("shutdown"),
        )
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
        here = SimpleNamespace(was_current_actor_reconstructed=False, get_node_id=lambda: "here")
        ray = SimpleNamespace(
            serve=serve,
            util=SimpleNamespace(scheduling_strategies=strategies, get_node_ip_address=lambda: NODE),
            exceptions=SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError),
            nodes=lambda: [
                {"Alive": True, "NodeManagerHostname": machine, "Resources": {"CPU": 4}} for machine in self.machines
            ],
            get_runtime_context=lambda: here,
            remote=self.remote,
            get_actor=self.get_actor,
            get=self.get,
            kill=self.kill,
        )
        return {
            "ray": ray,
            "ray.util": ray.util,
            "ray.util.scheduling_strategies": strategies,
            "ray.serve": serve,
            "ray.serve.config": config,
        }

    def remote(self, kind: type) -> Any:
        def options(*, name: str, **_: Any) -> Any:
            def get_or_make(*given: Any) -> Handle:
                if name not in self.actors:
                    self.actors[name] = Handle(kind(*given))
                return self.actors[name]

            return SimpleNamespace(remote=get_or_make)

        return SimpleNamespace(options=options)

    def get_actor(self, name: str, namespace: str) -> Handle:
        if name not in self.actors:
            raise ValueError(f"there is no actor {name}")
        return self.actors[name]

    def get(self, answer: Answer, timeout: float | None = None) -> Any:
        try:
            return answer.made()
        except ValueError as error:
            raise RayTaskError(error) from error

    def kill(self, handle: Handle) -> None:
        self.actors = {name: each for name, each in self.actors.items() if each is not handle}

    def host(self, config: Any, *_: Any) -> Any:
        """In place of HostedController: it serves at once, or has ended already."""
        error = self.broken

        def address(timeout_s: float) -> str:
            if error:
                raise RefusedError(error)
            return str(config.listen)

        return SimpleNamespace(start=lambda: None, address=address, stop=lambda: self.done.append("stop"))


@pytest.fixture
def ray(monkeypatch) -> Iterator[PlayedRay]:
    played = PlayedRay()
    ours = ("speclen.integrations.ray.actor", "speclen.integrations.ray.cluster")
    with monkeypatch.context() as patch:
        for name, module in played.modules().items():
            patch.setitem(sys.modules, name, module)
        for name in ours:
            patch.delitem(sys.modules, name, raising=False)
        actor, cluster = map(importlib.import_module, ours)
        patch.setattr(actor, "HostedController", played.host)
        patch.setattr(actor, "set_up_logs", lambda: None)
        patch.setattr(actor, "REPLACE_S", 0.0)
        patch.setattr(cluster, "deploy", lambda config, say: played.done.append("deploy"))
        yield played
        for name in ours:
            del sys.modules[name]


def find(config: FleetConfig) -> str:
    from speclen.integrations.ray.actor import find_controller

    return asyncio.run(find_controller(config))


def run(config: FleetConfig, http_listen: str = ANY, inside: Callable[[], None] = lambda: None) -> list[str]:
    """A fleet that is asked to end as soon as it serves; what it said. Raises what it raises."""
    from speclen.integrations.ray.cluster import fleet

    said: list[str] = []
    with fleet(config, ANY, http_listen, said.append):
        inside()
    return said


# The controller.


def test_a_controller_that_could_not_start_is_replaced(ray):
    """Story: its actor lived on and refused everybody, and an application with the right settings was given it, too."""
    ray.broken = "cannot listen on 127.0.0.1:7070"
    with pytest.raises(RefusedError, match="cannot listen"):
        find(FleetConfig())
    ray.broken = ""
    assert find(FleetConfig(controller_port=7071)) == "127.0.0.1:7071"
    assert find(FleetConfig()) == "127.0.0.1:7071"  # one that serves stays


def test_a_controller_that_others_may_reach_is_there_for_machines_that_join_later(ray, monkeypatch, tmp_path):
    """Story: made on the first machine of several, it stayed on loopback for good."""
    assert find(FleetConfig(insecure=True)) == f"{NODE}:7070"
    ray.actors.clear()
    monkeypatch.setenv("SPECLEN_WORKER_CONTROLLER_TOKEN_FILE", str(tmp_path / "token"))
    assert find(FleetConfig(controller_cert=tmp_path / "cert", controller_key=tmp_path / "key")) == f"{NODE}:7070"
    ray.actors.clear()
    assert find(FleetConfig(insecure=True, controller_host="127.0.0.1")) == "127.0.0.1:7070"


def test_a_controller_that_nothing_protects_is_for_one_machine(ray):
    assert find(FleetConfig()) == "127.0.0.1:7070"
    ray.actors.clear()
    ray.machines = ["this", "that"]
    with pytest.raises(RefusedError, match="open to other machines"):
        find(FleetConfig())


# `up --ray`.


def test_a_fleet_ends_what_it_began(ray, tmp_path):
    said = run(FleetConfig(data_dir=tmp_path), inside=lambda: ray.done.append("serves"))
    assert said == ["the controller serves on 127.0.0.1:7070"]
    assert ray.done == ["start", "deploy", "serves", "shutdown", "stop"]
    assert not ray.actors


def test_a_controller_that_cannot_start_is_told_and_nothing_stays(ray, tmp_path):
    ray.broken = "the database is in use"
    with pytest.raises(ValueError, match=r"^the database is in use$"):
        run(FleetConfig(data_dir=tmp_path))
    assert ray.done == ["start", "shutdown", "stop"]
    assert not ray.actors


@pytest.mark.parametrize(
    ("applications", "proxies", "words"),
    [
        (["speclen"], ["head"], "applications: speclen"),
        (["speclen", "other"], ["head"], "applications: other, speclen"),
        (["other"], [], "applications: other"),
        ([], ["head"], "applications: none"),
    ],
)
def test_a_cluster_that_serves_already_is_left_as_it_is(ray, tmp_path, applications, proxies, words):
    """Story: it took over what was deployed there, with ports that were not those it told, and ended it with Ctrl-C."""
    ray.applications, ray.proxies = dict.fromkeys(applications), dict.fromkeys(proxies)
    find(FleetConfig(data_dir=tmp_path))
    with pytest.raises(ValueError, match=words):
        run(FleetConfig(data_dir=tmp_path))
    assert not ray.done
    assert CONTROLLER in ray.actors


def test_the_controller_of_somebody_else_is_left_as_it_is(ray, tmp_path):
    find(FleetConfig(data_dir=tmp_path))
    with pytest.raises(ValueError, match=f"the actor {CONTROLLER}: end it with `python -c"):
        run(FleetConfig(data_dir=tmp_path))
    assert not ray.done
    assert CONTROLLER in ray.actors


def test_plain_http_beyond_this_machine_is_refused(ray, tmp_path):
    token = {"token_file": Path("/etc/speclen/token")}
    with pytest.raises(ValueError, match=r"--http-listen 0\.0\.0\.0:0 is open to other machines"):
        run(FleetConfig(data_dir=tmp_path, worker=token), "0.0.0.0:0")
    assert not ray.done
    run(FleetConfig(data_dir=tmp_path, worker=token, insecure=True), "0.0.0.0:0")
    assert "deploy" in ray.done
