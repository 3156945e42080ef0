"""Envoy in front of workers: one address for clients, each request to the worker with the fewest in flight.

Writes Envoy's configuration as YAML to standard output:

    python scripts/envoy_config.py --worker 10.0.0.1:7080 --worker 10.0.0.2:7080 > envoy.yaml
    envoy -c envoy.yaml

A worker given by name stands for all addresses of the name, so one headless service of Kubernetes is enough; that is what
deploy/envoy/envoy.yaml is for, which this wrote: --worker speclen-worker:7080 --http speclen-worker:8000 --listen
0.0.0.0:7090 --http-listen 0.0.0.0:8090 --worker-ca /tls/ca.crt --tls-cert /tls/tls.crt --tls-key /tls/tls.key
--no-checks. Tokens pass through as they come.
"""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Any

import typer
import yaml

from speclen.transport.address import split_address
from speclen.transport.credentials import read_tokens

HTTP_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
ROUTER = "envoy.extensions.filters.http.router.v3.Router"
OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
UPSTREAM_TLS = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
DOWNSTREAM_TLS = "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
# A retry that drew the same dead worker again would be none.
PREVIOUS = "envoy.retry_host_predicates.previous_hosts"
PREVIOUS_TYPE = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
# A dead worker has the fewest in flight, so it wins every draw of two that it is in: of three workers, in more than half.
MOST_DRAWS = 20
# What is tried at another worker: what did not reach one, or was refused by one that drains. A full queue is told to the
# client instead: the worker was chosen for having few requests, so the others' queues are hardly shorter.
GRPC_RETRIES: dict[str, Any] = {"retry_on": "connect-failure,refused-stream,reset,unavailable"}
HTTP_RETRIES: dict[str, Any] = {
    "retry_on": "connect-failure,reset,retriable-status-codes",
    "retriable_status_codes": [503],
}
# Requests that the proxy lets wait at all workers together; a worker's own bounded queue refuses before.
MOST_REQUESTS = 100_000
HEADER = "# Written by scripts/envoy_config.py, whose docstring says how.\n"


def typed(name: str, **fields: Any) -> dict[str, Any]:
    """A message with its type."""
    return {"@type": f"type.googleapis.com/{name}", **fields}


def socket_address(flag: str, address: str) -> dict[str, Any]:
    host, port = split_address(flag, address)
    return {"socket_address": {"address": host, "port_value": port}}


def subject(host: str) -> dict[str, Any]:
    """The name that a certificate must have, so that it is this host's."""
    try:
        return {"san_type": "IP_ADDRESS", "matcher": {"exact": str(ip_address(host))}}
    except ValueError:
        return {"san_type": "DNS", "matcher": {"exact": host}}


def cluster(
    name: str, flag: str, workers: list[str], health: dict[str, Any], http2: bool, ca: Path | None
) -> dict[str, Any]:
    """Workers among which the one with the fewest requests in flight is chosen, of two drawn at random.

    health: how their health is checked; empty where somebody else does, and names no worker that is not ready.
    """
    endpoints = [{"endpoint": {"address": socket_address(flag, worker)}} for worker in workers]
    protocol = {"http2_protocol_options": {}} if http2 else {"http_protocol_options": {}}
    made: dict[str, Any] = {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": "2s",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "typed_extension_protocol_options": {OPTIONS: typed(OPTIONS, explicit_http_config=protocol)},
        # Retries, too: Envoy would otherwise let three at a time try another worker, and fail the rest.
        "circuit_breakers": {
            "thresholds": [dict.fromkeys(("max_requests", "max_pending_requests", "max_retries"), MOST_REQUESTS)]
        },
        "outlier_detection": {
            "consecutive_gateway_failure": 3,
            "enforcing_consecutive_gateway_failure": 100,  # percent; Envoy only counts by default
            "base_ejection_time": "5s",
            "max_ejection_percent": 50,
        },
    }
    if health:
        often = {"timeout": "2s", "interval": "5s", "unhealthy_threshold": 2, "healthy_threshold": 1}
        made["health_checks"] = [{**often, **health}]
    if ca is not None:
        hosts = list(dict.fromkeys(split_address(flag, worker)[0] for worker in workers))
        trusted = {
            "trusted_ca": {"filename": str(ca)},
            # Or anybody with a certificate of that authority could stand in for a worker, and be given tokens and prompts.
            "match_typed_subject_alt_names": [subject(host) for host in hosts],
        }
        context = typed(UPSTREAM_TLS, sni=hosts[0], common_tls_context={"validation_context": trusted})
        made["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": context}
    return made


def health_check(kind: str, headers: str, token: str, **fields: Any) -> dict[str, Any]:
    """A check of that kind. headers: the field for those that it sends; the token is one, "" for none."""
    if token:
        fields[headers] = [{"header": {"key": "authorization", "value": f"Bearer {token}"}}]
    return {kind: fields}


def listener(
    name: str, flag: str, address: str, retries: dict[str, Any], tls: tuple[Path, Path] | None
) -> dict[str, Any]:
    """Everything that comes to an address goes to the cluster of that name, however long its answer streams."""
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": name,
            "timeout": "0s",
            # Only what no worker has begun to answer is tried at another one: Envoy passes headers on, or retries.
            "retry_policy": {
                **retries,
                "num_retries": 2,
                "retry_host_predicate": [{"name": PREVIOUS, "typed_config": typed(PREVIOUS_TYPE)}],
                "host_selection_retry_max_attempts": MOST_DRAWS,
            },
        },
    }
    manager = typed(
        HTTP_MANAGER,
        stat_prefix=name,
        codec_type="AUTO",
        stream_idle_timeout="600s",
        route_config={"virtual_hosts": [{"name": name, "domains": ["*"], "routes": [route]}]},
        http_filters=[{"name": "envoy.filters.http.router", "typed_config": typed(ROUTER)}],
    )
    chain: dict[str, Any] = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    }
    if tls is not None:
        pair = {"certificate_chain": {"filename": str(tls[0])}, "private_key": {"filename": str(tls[1])}}
        context = typed(
            DOWNSTREAM_TLS, common_tls_context={"tls_certificates": [pair], "alpn_protocols": ["h2", "http/1.1"]}
        )
        chain["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": context}
    return {"name": name, "address": socket_address(flag, address), "filter_chains": [chain]}


def config(
    workers: list[str],
    listen: str,
    http_workers: list[str],
    http_listen: str,
    admin: str,
    token: str,
    api_key: str,
    checks: bool,
    ca: Path | None,
    tls: tuple[Path, Path] | None,
) -> dict[str, Any]:
    """Envoy's bootstrap. token, api_key: that health checks over gRPC and over HTTP carry; "" for none."""
    grpc_health = health_check("grpc_health_check", "initial_metadata", token) if checks else {}
    http_health = health_check("http_health_check", "request_headers_to_add", api_key, path="/health") if checks else {}
    listeners = [listener("grpc", "--listen", listen, GRPC_RETRIES, tls)]
    clusters = [cluster("grpc", "--worker", workers, grpc_health, True, ca)]
    if http_workers:
        listeners.append(listener("http", "--http-listen", http_listen, HTTP_RETRIES, tls))
        clusters.append(cluster("http", "--http", http_workers, http_health, False, ca))
    return {
        "admin": {"address": socket_address("--admin-listen", admin)},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }


def main(
    worker: list[str] = typer.Option(help="HOST:PORT of a worker's gRPC; may be given several times."),
    listen: str = typer.Option("127.0.0.1:7090", help="Where clients find gRPC."),
    http: list[str] = typer.Option([], help="HOST:PORT of a worker's HTTP; may be given several times."),
    http_listen: str = typer.Option("127.0.0.1:8090", help="Where clients find HTTP."),
    admin_listen: str = typer.Option("127.0.0.1:9901", help="Envoy's own page."),
    token_file: Path | None = typer.Option(None, help="Tokens of the workers; their health is asked with the first."),
    api_key_file: Path | None = typer.Option(None, help="Keys of workers over HTTP, likewise; default: --token-file."),
    checks: bool = typer.Option(
        True, help="Check the workers' health; not where their name stands for ready ones alone."
    ),
    worker_ca: Path | None = typer.Option(None, help="Authority of the workers' certificates: speak TLS with them."),
    tls_cert: Path | None = typer.Option(None, help="Certificate to show to clients, with --tls-key."),
    tls_key: Path | None = typer.Option(None, help="Key of that certificate."),
) -> None:
    """Write a configuration for Envoy."""
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together: give both or none")
    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    try:
        token = "" if token_file is None else read_tokens("--token-file", token_file)[0]
        api_key = token if api_key_file is None else read_tokens("--api-key-file", api_key_file)[0]
        made = config(worker, listen, http, http_listen, admin_listen, token, api_key, checks, worker_ca, tls)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(HEADER + yaml.safe_dump(made, sort_keys=False), nl=False)


if __name__ == "__main__":
    typer.run(main)
