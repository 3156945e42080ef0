"""Addresses of a controller and its workers on this machine, chosen before they are started."""

from __future__ import annotations

from dataclasses import dataclass

from speclen.cli.support.client import Client
from speclen.cli.support.errors import UserError, say, user_errors
from speclen.cli.support.whose import check_available
from speclen.transport.address import bind, split_address


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses of the controller, the workers and their HTTP fronts."""

    controller: str
    workers: list[str]
    fronts: list[str]  # of the workers over HTTP; none, or as many

    @classmethod
    def choose(
        cls, controller: str, listen: str, num_workers: int, client: Client, any_port: bool, http_listen: str = ""
    ) -> Places:
        """Addresses that are free now. any_port: where one is taken, another will do; else UserError says by whom."""

        def free(flag: str, address: str) -> str:
            if not address.endswith(":0"):
                try:
                    check_available(flag, address, client)
                    return address
                except UserError as error:
                    if not any_port:
                        raise
                    say(f"{error}; using a free port this once")
            return free_port(address)

        def row(flag: str, first: str) -> list[str]:
            return [next_address(flag, first, index) for index in range(num_workers)]

        # All are addresses before any is asked for.
        workers, fronts = row("--listen", listen), row("--http-listen", http_listen) if http_listen else []
        return cls(
            free("--controller", controller),
            [free("--listen", address) for address in workers],
            [free("--http-listen", address) for address in fronts],
        )


def free_port(address: str) -> str:
    """The address with a port that is free now."""
    host = address.rpartition(":")[0]
    with user_errors((ValueError, OSError)), bind("--listen", f"{host}:0") as probe:
        return f"{host}:{probe.getsockname()[1]}"


def next_address(flag: str, address: str, offset: int) -> str:
    with user_errors():
        _, port = split_address(flag, address)
    return f"{address.rpartition(':')[0]}:{port + offset if port else 0}"
