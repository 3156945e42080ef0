"""A real chat model, SmolLM2-135M-Instruct from PyPI, served to the official client and decoded with speculation."""

import json
import subprocess
from pathlib import Path

import openai
import pytest

from speclen.bench.serving.prompts import ChatPrompts
from speclen.bench.serving.traffic import CHAT_KINDS
from speclen.cli.support.processes import Child
from speclen.records import PLAIN, parse_arm
from speclen.worker.arms import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import load_pair
from speclen.worker.requests.request import GenerationRequest, SamplingParams
from tests.support.addresses import free_address

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "build" / "smollm2" / "target"
CANNOT = 2  # exit code of scripts/real_model where the index is out of reach, or there is no room
NAME = "smollm2"
ORDER = "Order from Rosa Alvarez, Lisbon: 12 lamps and 3 tents, to be delivered on 5 May. Payment by invoice."
SCHEMA = {
    "type": "object",
    "properties": {"person": {"type": "string", "maxLength": 40}, "lamps": {"type": "integer", "maximum": 999}},
    "required": ["person", "lamps"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def target():
    if not (TARGET / "model.safetensors").exists():
        done = subprocess.run([ROOT / "scripts" / "real_model"], capture_output=True, text=True)
        if done.returncode == CANNOT:
            pytest.skip(done.stderr.strip().splitlines()[-1])
        assert done.returncode == 0, done.stderr
    return TARGET


@pytest.fixture(scope="module")
def client(target, tmp_path_factory):
    """A client of a worker in float32, where ties are too rare to matter; it proposes n-grams at every step."""
    address, http = free_address(), free_address()
    arguments = ["worker", "--listen", address, "--http-listen", http, "--controller", "", "--device", "cpu"]
    arguments += ["--target", str(target), "--dtype", "float32", "--served-model-name", NAME]
    child = Child("worker", arguments, address, tmp_path_factory.mktemp("worker") / "log", takes_settings=False)
    child.start()
    try:
        child.wait_until_serving(120.0)
        yield openai.OpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=0, timeout=200.0)
    finally:
        child.stop(timeout_s=20.0)


def ask(client, messages, **options):
    """A greedy answer, unless the options say otherwise."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return client.chat.completions.create(model=NAME, messages=messages, **{"temperature": 0, **options})


def test_an_answer_follows_its_schema(client):
    schema = {"name": "order", "schema": SCHEMA, "strict": True}
    answer = ask(
        client,
        f"Extract the person and the number of lamps as JSON: {ORDER}",
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    found = json.loads(answer.choices[0].message.content)
    assert (set(found), type(found["lamps"])) == ({"person", "lamps"}, int)
    assert "Rosa" in found["person"]


def outputs(pair, prompts, arm):
    """Token ids of every answer; every second one is sampled."""
    engine = Engine(pair, EngineConfig(32, 0, ngram=arm != PLAIN, max_context_length=1024), FixedArm(arm))
    found = {}
    ended = []

    def take(output):
        found.setdefault(int(output.request_id), []).extend(output.token_ids)
        ended.extend([output] if output.finish_reason else [])

    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=32, temperature=0.8 * (number % 2), seed=number)
        engine.submit(GenerationRequest(str(number), prompt, sampling), take)
    while len(ended) < len(prompts):
        engine.step()
    return found, sum(output.num_accepted_tokens for output in ended)


@pytest.mark.timeout(900)
def test_speculation_changes_no_answer(target):
    pair = load_pair(str(target), None, "cpu", "float32")
    drawer = ChatPrompts(pair.tokenizer)
    prompts = [drawer.draw(CHAT_KINDS[number % len(CHAT_KINDS)], number) for number in range(200)]
    expected, _ = outputs(pair, prompts, PLAIN)
    found, num_accepted = outputs(pair, prompts, parse_arm("n-gram"))
    assert [number for number in expected if expected[number] != found[number]] == []
    assert num_accepted > 500, "n-grams were proposed and accepted"
