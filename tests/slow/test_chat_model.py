"""A real chat model, SmolLM2-135M-Instruct from PyPI, served to the official client and decoded with speculation."""

import json
import subprocess
from pathlib import Path

import openai
import pytest

from speclen.bench.serving.chat import KINDS, ChatPrompts
from speclen.cli.support.processes import Child
from speclen.records import PLAIN, parse_arm
from speclen.worker.drafting.arm_chooser import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import load_pair, load_tokenizer
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
def target() -> Path:
    if not (TARGET / "model.safetensors").exists():
        done = subprocess.run([ROOT / "scripts" / "real_model"], capture_output=True, text=True)
        if done.returncode == CANNOT:
            pytest.skip(done.stderr.strip().splitlines()[-1])
        assert done.returncode == 0, done.stderr
    return TARGET


@pytest.fixture(scope="module")
def client(target, tmp_path_factory):
    """Of a worker in float32, where ties are too rare to matter; it proposes n-grams at every step."""
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


def test_a_conversation_goes_on_with_what_was_said(client, target):
    tokenizer = load_tokenizer(str(target))
    messages = [{"role": "system", "content": "You answer in one sentence."}]
    questions = ("My name is Leila and I live in Oslo.", "Name a dish for tonight.", "And something sweet?")
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = ask(client, messages, max_tokens=60)
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert answer.usage.prompt_tokens == len(prompt)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert ask(client, questions[-1], max_tokens=60).choices[0].message.content != messages[-1]["content"]
    assert "<|im_end|>" not in "".join(message["content"] for message in messages)


def test_an_answer_ends_by_itself_and_streams_as_it_is(client):
    question = "Repeat this list and add one fruit: apple, pear, plum, cherry."
    whole = ask(client, question, max_tokens=200)
    chunks = list(ask(client, question, max_tokens=200, stream=True))
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len(chunks) > 3


def test_an_answer_keeps_to_its_schema(client):
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


def test_an_answer_ends_before_a_stop_word(client):
    question = "Write a numbered list of five animals."
    whole = ask(client, question, max_tokens=80).choices[0].message.content
    assert "3." in whole
    cut = ask(client, question, max_tokens=80, stop=["3."]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole.partition("3.")[0], "stop")


def test_two_answers_differ_and_a_seed_repeats_them(client):
    answers = [
        [
            choice.message.content
            for choice in ask(client, "Tell a story.", n=2, temperature=1.0, seed=5, max_tokens=40).choices
        ]
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_long_prompts_are_answered_and_too_long_ones_are_refused(client):
    text = " ".join(f"On day {number} the ship sailed north." for number in range(400))
    answer = ask(client, f"{text}\n\nWhere did the ship sail?", max_tokens=20)
    assert answer.usage.prompt_tokens > 3000
    assert "north" in answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="8192"):
        ask(client, text * 3, max_tokens=20)


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
    prompts = [drawer.draw(KINDS[number % len(KINDS)], number) for number in range(200)]
    expected, _ = outputs(pair, prompts, PLAIN)
    found, num_accepted = outputs(pair, prompts, parse_arm("n-gram"))
    assert [number for number in expected if expected[number] != found[number]] == []
    assert num_accepted > 500, "n-grams were proposed and accepted"
