"""Workers: the output is the target's own under every arm, and serving needs no controller."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speclen.v1 import generation_pb2 as gen
from tests.contract import protocol, servers
from tests.contract.protocol import choices_of, generate, server_info
from tests.contract.servers import BUNDLED_TARGET, as_json
from tests.support.waiting import until

PROMPTS = (
    "def add(a, b):\n    return",
    "for name in names:\n    print(name)\n" * 4,
    "if x == 1:\n    y = 1\nelif x == 2:\n    y = 2\nelif x == 3:\n    y =",
)
# The worker's table, plain decoding, and fixed lengths up to the limit.
SPECULATION = (None, 0, 1, 8)
MAX_TOKENS = 40
# Sums in float32 depend on the batch's shape: logits closer than this are a tie, which either token may win.
TIE = 1e-3


def check_greedy(target: torch.nn.Module, prompt_ids: list[int], ids: list[int]) -> None:
    """Every token is the target's most likely one after those before it."""
    with torch.inference_mode():
        logits = target(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
    behind = logits.max(dim=-1).values - logits[torch.arange(len(ids)), torch.tensor(ids)]
    assert float(behind.max()) < TIE, f"token {int(behind.argmax())} is {float(behind.max())} behind the target's"


def test_greedy_output_equals_the_targets_under_every_arm(fleet):
    """Requests of all arms share their batches."""
    channel = fleet.channel
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_TARGET)
    target = AutoModelForCausalLM.from_pretrained(BUNDLED_TARGET, dtype=torch.float32)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    cases = [(prompt, speculation) for prompt in prompts for speculation in SPECULATION]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda case: generate(channel, case[0], MAX_TOKENS, case[1]), cases))
    for (prompt_ids, speculation), output in zip(cases, outputs, strict=True):
        assert len(output.output_ids) == MAX_TOKENS
        check_greedy(target, prompt_ids, list(output.output_ids))
        check_counts(output, speculation)
    assert sum(output.speculation.num_accepted_tokens for output in outputs) > MAX_TOKENS, (
        "drafts must be worth something"
    )


def check_counts(output: gen.GenerateComplete, speculation: int | None) -> None:
    """Plain decoding drafts nothing, a fixed length does."""
    counts = output.speculation
    assert counts.num_accepted_tokens <= counts.num_draft_tokens
    if speculation is not None:
        assert (counts.num_draft_tokens > 0) == (speculation > 0)


def test_reports_of_real_decoding_fill_the_learned_table(fleet):
    generate(fleet.channel, PROMPTS[0], MAX_TOKENS)
    learned = "SELECT count(*) FROM learned_table WHERE num_steps > 0 AND source IN ('online', 'both')"
    assert until(lambda: protocol.rows(fleet.database, learned)[0][0])
    assert set(choices_of(server_info(fleet.channel).table)) == set(range(1, 9))


def test_the_verb_generate_prints_the_output_of_the_call(fleet):
    printed = as_json("generate", PROMPTS[0], "--worker", fleet.address, "--max-tokens", "8", "--json")
    assert generate(fleet.channel, PROMPTS[0], 8).text.split()[0] in str(printed)


def test_a_worker_keeps_serving_without_a_controller_and_loses_no_report(tmp_path):
    """Serve before there is a controller, while it is suspended, and after a kill; every step is on disk once in the end."""
    controller = servers.controller(tmp_path)
    worker = servers.worker(tmp_path, controller.address).start()
    try:
        with grpc.insecure_channel(worker.serving().address) as channel:
            plain = generate(channel, PROMPTS[0], MAX_TOKENS)
            controller.start().serving()
            until(lambda: server_info(channel).num_reports_buffered == 0)
            controller.process.send_signal(signal.SIGSTOP)
            while_it_stands = generate(channel, PROMPTS[0], MAX_TOKENS)
            controller.kill()
            while_it_is_gone = generate(channel, PROMPTS[0], MAX_TOKENS)
            assert plain.output_ids == while_it_stands.output_ids == while_it_is_gone.output_ids
            controller.start().serving()
            until(lambda: server_info(channel).num_reports_buffered == 0)
            check_disk(tmp_path / "speclen.db", server_info(channel))
    finally:
        worker.end()
        controller.end()


def check_disk(database: Path, info: gen.GetServerInfoResponse) -> None:
    """Every step of the worker is on disk, once."""
    assert info.num_reports_dropped == 0
    seqs = protocol.rows(database, "SELECT seq FROM step_reports ORDER BY seq")
    assert seqs == [(seq,) for seq in range(1, info.num_steps + 1)]
    assert protocol.rows(database, "SELECT num_reports, num_missing FROM worker_health") == [(info.num_steps, 0)]
