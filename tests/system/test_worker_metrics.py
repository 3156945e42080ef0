"""The metrics page uses the names of dashboards for other engines, with figures of the engine and the control client."""

import ssl
import urllib.request

import pytest
from prometheus_client import generate_latest

from speclen.process.credentials import ServerSecurity
from speclen.process.servers import serve_page
from tests.support.addresses import free_address
from tests.support.certificates import make_certificates
from tests.support.control_parts import worker_metrics
from tests.support.engines import generate, make_engine, request
from tests.support.waiting import PATIENCE_S


def test_the_page_has_the_names_and_figures_that_dashboards_use():
    lines = generate_latest(worker_metrics().registry).decode().splitlines()
    for line in (
        "speclen_num_requests_running 2.0",
        "speclen_num_requests_waiting 1.0",
        "speclen_kv_cache_usage_perc 0.25",
        "speclen_prefix_cache_queries_total 128.0",
        "speclen_prefix_cache_hits_total 96.0",
        "speclen_spec_decode_num_drafts_total 3.0",
        "speclen_spec_decode_num_draft_tokens_total 6.0",
        "speclen_spec_decode_num_ngram_tokens_total 2.0",
        "speclen_spec_decode_num_accepted_tokens_total 4.0",
        'speclen_spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2.0',
        'speclen_spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2.0',
        'speclen_speculation_length{batch_max="4",batch_min="1"} 2.0',
        'speclen_ngram{batch_max="4",batch_min="1"} 1.0',
        "speclen_decode_steps_total 7.0",
        "speclen_decode_step_seconds_total 0.02",
        "speclen_cpu_threads 3.0",
        "speclen_controller_connected 0.0",
        "speclen_reports_buffered 2.0",
    ):
        assert line in lines


def test_sequences_without_drafts_do_not_count_as_drafts():
    """Story: next to a request without speculation, half of the drafts counted as entirely rejected."""
    drafts = request("drafts", [3, 4, 5], max_tokens=20, ignore_eos=True)
    counted = []
    for others in ([], [request("off", [5, 4, 3], max_tokens=40, ignore_eos=True, fixed_length=0)]):
        engine = make_engine(chooser=3, max_batch_size=2)
        generate(engine, drafts, *others)
        load = engine.load()
        counted.append((load.num_drafts, load.num_accepted_by_position))
    assert counted[0] == counted[1]
    assert counted[0][0] > 3


def test_the_metrics_page_beyond_loopback_needs_a_client_certificate(tmp_path):
    """Story: it was refused with advice (--tls-cert, --token-file) that did not help."""
    made, address = make_certificates(tmp_path), free_address()
    security = ServerSecurity(made.server.cert, made.server.key, made.authority.cert)
    with pytest.raises(ValueError, match="--tls-client-ca, use"):
        ServerSecurity(made.server.cert, made.server.key).check_exposure(
            "--metrics-listen", "0.0.0.0:9090", tokens=False
        )
    security.check_exposure("--metrics-listen", "0.0.0.0:9090", tokens=False)
    serve_page(address, worker_metrics().registry, security)
    context = ssl.create_default_context(cafile=made.authority.cert)
    with pytest.raises(OSError, match=r"(?i)certificate|closed|reset|EOF|EOF"):
        urllib.request.urlopen(f"https://{address}/metrics", context=context, timeout=PATIENCE_S).read()
    context.load_cert_chain(made.client.cert, made.client.key)
    page = urllib.request.urlopen(f"https://{address}/metrics", context=context, timeout=PATIENCE_S).read().decode()
    assert "speclen_cpu_threads 3.0" in page
