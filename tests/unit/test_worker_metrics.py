"""Metrics have the names and the meaning of vLLM's, with figures of the engine and the control client."""

import ssl
import urllib.request

import pytest
from prometheus_client import generate_latest

from speclen.process.credentials import ServerSecurity
from speclen.process.servers import serve_page
from speclen.worker.frontend.worker_metrics import RequestMetrics
from speclen.worker.requests.request import FinishReason, QueueFullError, SequenceOutput
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


# Requests.


@pytest.fixture
def requests():
    return RequestMetrics(worker_metrics())


def value(requests: RequestMetrics, name: str) -> float:
    page = generate_latest(requests.worker.registry).decode()
    return float(next(line for line in page.splitlines() if line.startswith(f"speclen_{name} ")).split()[1])


def output(
    made_at: float, num_tokens: int, new: int = 1, reason: FinishReason | None = None, index: int = 0
) -> SequenceOutput:
    return SequenceOutput(
        *("r", index, (7,) * new, ""),
        finish_reason=reason,
        num_prompt_tokens=5,
        num_completion_tokens=num_tokens,
        admitted_at=10.5,
        made_at=made_at,
    )


def test_the_times_of_a_request_add_up(requests):
    timeline = requests.timeline(1, arrived_at=10.0)
    timeline.saw(output(11.0, 1))
    assert value(requests, "time_to_first_token_seconds_sum") == 1.0, "it is known with the first token, not at the end"
    timeline.saw(output(11.5, 4, 3))
    timeline.saw(output(13.5, 6, 2, FinishReason.LENGTH))
    times = {"queue": 0.5, "prefill": 0.5, "decode": 2.5, "inference": 3.0}
    assert {name: value(requests, f"request_{name}_time_seconds_sum") for name in times} == times
    assert value(requests, "e2e_request_latency_seconds_sum") == 3.5
    assert value(requests, "request_time_per_output_token_seconds_sum") == 0.5
    assert value(requests, "prompt_tokens_total") == 5
    assert value(requests, 'request_success_total{finished_reason="length"}') == 1


def test_a_gap_is_observed_for_every_step_and_not_for_every_token(requests):
    """As vLLM does, and by when the tokens were made, however many steps the event loop hears of together."""
    timeline = requests.timeline(2, arrived_at=10.0)
    seen = [output(11.0, 1), output(11.0, 1, index=1), output(11.1, 4, 3), output(11.2, 6, 2), output(11.3, 7)]
    for one in [*seen, output(11.5, 9, 2, FinishReason.STOP)]:
        timeline.saw(one)
    assert value(requests, "inter_token_latency_seconds_count") == 4
    assert value(requests, "inter_token_latency_seconds_sum") == pytest.approx(0.5)
    assert value(requests, 'inter_token_latency_seconds_bucket{le="0.12"}') == 3
    timeline.saw(output(19.0, 3, 0, FinishReason.STOP, 1))
    assert value(requests, "inter_token_latency_seconds_count") == 4, "an end without tokens is not a step"
    assert value(requests, "e2e_request_latency_seconds_sum") == 9.0


def test_requests_that_were_never_admitted_have_no_times(requests):
    timeline = requests.timeline(1, arrived_at=10.0)
    timeline.abandon()
    requests.refuse(QueueFullError("full"))
    assert value(requests, "request_queue_time_seconds_count") == 0
    assert value(requests, 'request_success_total{finished_reason="abort"}') == 1
    assert value(requests, 'request_refused_total{reason="queue_full"}') == 1


def test_the_time_of_a_token_is_that_of_one_sequence_however_many_there_are(requests):
    """Three concurrent sequences were reported as three times as fast as one; a late one does not count as slower."""
    timeline = requests.timeline(4, arrived_at=10.0)
    for index in range(3):
        timeline.saw(output(11.0, 1, index=index))
        timeline.saw(output(13.0, 5, 1, FinishReason.LENGTH, index))
    timeline.saw(output(20.0, 1, 1, FinishReason.STOP, 3))
    assert value(requests, "request_time_per_output_token_seconds_sum") == 0.5
    assert value(requests, "request_time_per_output_token_seconds_count") == 1
