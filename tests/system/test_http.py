"""The official openai client works with a worker as elsewhere, and gets the same tokens as over gRPC."""

import httpx
import openai
import pytest

from tests.support import tiny_models
from tests.support.http_worker import MODEL, http_worker, over_grpc

PROMPT = "The target verifies what the draft"
GREEDY = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


@pytest.fixture(scope="module")
def worker():
    with http_worker(max_batch_size=8) as worker:
        yield worker


@pytest.fixture(scope="module")
def client(worker):
    return worker.client()


def test_the_model_is_listed_and_can_be_retrieved(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).max_model_len == tiny_models.MAX_POSITIONS


def test_a_chat_without_max_tokens_uses_the_kv_memory_there_is():
    """Story: room for n-gram tokens was not counted, and such a request was refused."""
    with http_worker(ngram=True, max_kv_tokens=120) as small:
        one = small.client()
        most = one.models.retrieve(MODEL).max_model_len
        answer = one.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], extra_body={"ignore_eos": True}
        )
        assert answer.usage.total_tokens == most < 120
        with pytest.raises(openai.BadRequestError, match=f"{most}"):
            one.completions.create(model=MODEL, prompt=PROMPT, max_tokens=most)


@pytest.mark.parametrize("speculation", ["auto", "off", 0, 1, 3])
def test_the_same_request_gives_the_same_tokens_as_over_grpc(worker, client, speculation):
    (expected,) = over_grpc(worker, PROMPT, max_tokens=24, ignore_eos=True, temperature=0)
    body = GREEDY | {"extra_body": GREEDY["extra_body"] | {"speculation": speculation}}
    completion = client.completions.create(prompt=PROMPT, **body)
    (choice,) = completion.choices
    assert choice.token_ids == list(expected.output_ids)
    assert choice.text == expected.text
    assert choice.finish_reason == "length"
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        expected.usage.prompt_tokens,
        24,
        expected.usage.prompt_tokens + 24,
    )


def test_sampling_fields_mean_the_same_over_http_and_grpc(worker, client):
    sampling = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 20, "presence_penalty": 0.5}
    further = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True, "min_tokens": 5}
    expected = over_grpc(worker, PROMPT, n=3, logit_bias={65: 2.0}, **sampling, **further)
    extra = {"extra_body": further | {"return_token_ids": True}}
    got = client.completions.create(model=MODEL, prompt=PROMPT, n=3, logit_bias={"65": 2.0}, **sampling, **extra)
    by_index = {one.index: list(one.output_ids) for one in expected}
    assert {choice.index: choice.token_ids for choice in got.choices} == by_index
    assert len({tuple(ids) for ids in by_index.values()}) > 1


def test_a_stream_has_the_same_text_and_its_usage_at_the_end(client):
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    chunks = list(
        client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    *pieces, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None for chunk in pieces)
    assert len(pieces) > 2
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
    assert [t for chunk in pieces for t in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    assert [c.choices[0].finish_reason for c in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {last.id}
    prompt_ids = tiny_models.tokenizer()(PROMPT)["input_ids"]
    told = [c.choices[0].model_extra.get("prompt_token_ids") for c in pieces]
    assert told == [prompt_ids] + [None] * (len(pieces) - 1)
    assert whole.choices[0].prompt_token_ids == prompt_ids


def test_several_prompts_and_sequences_are_choices_in_order(client):
    prompts = [PROMPT, "def step(self, batch):", [5, 6, 7]]
    got = client.completions.create(prompt=prompts[:2], n=2, **GREEDY)
    assert [c.index for c in got.choices] == [0, 1, 2, 3]
    alone = [client.completions.create(prompt=p, **GREEDY).choices[0].token_ids for p in prompts]
    assert [c.token_ids for c in got.choices] == [alone[0], alone[0], alone[1], alone[1]]
    ids = client.completions.create(prompt=[[5, 6, 7], [5, 6, 7]], **GREEDY)
    assert [c.token_ids for c in ids.choices] == [alone[2]] * 2
    streamed = {}
    for chunk in client.completions.create(prompt=prompts[:2], n=2, stream=True, **GREEDY):
        streamed.setdefault(chunk.choices[0].index, []).extend(chunk.choices[0].token_ids)
    assert [streamed[i] for i in range(4)] == [c.token_ids for c in got.choices]


def test_the_output_ends_at_stop_strings_and_stop_tokens(client):
    whole = client.completions.create(prompt=PROMPT, **GREEDY).choices[0]
    stop = whole.text[6:9]
    cut = client.completions.create(prompt=PROMPT, stop=stop, **GREEDY).choices[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = GREEDY["extra_body"] | {"include_stop_str_in_output": True}
    shown = client.completions.create(prompt=PROMPT, stop=[stop, "\0"], **(GREEDY | {"extra_body": kept})).choices[0]
    assert shown.text == cut.text + stop
    token = whole.token_ids[3]
    by_token = GREEDY["extra_body"] | {"stop_token_ids": [token]}
    ended = client.completions.create(prompt=PROMPT, **(GREEDY | {"extra_body": by_token})).choices[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


def test_logprobs_of_completions_equal_those_over_grpc(worker, client):
    (expected,) = over_grpc(worker, PROMPT, max_tokens=24, ignore_eos=True, logprobs=3)
    got = client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY).choices[0]
    assert got.logprobs.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs])
    assert len(got.logprobs.tokens) == len(got.logprobs.text_offset) == 24
    assert got.logprobs.text_offset[0] == 0
    for token, logprob, top in zip(
        got.logprobs.tokens, got.logprobs.token_logprobs, got.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == pytest.approx(logprob)
        assert max(top.values()) == pytest.approx(logprob)  # greedy
    named = GREEDY | {"extra_body": GREEDY["extra_body"] | {"return_tokens_as_token_ids": True}}
    by_id = client.completions.create(prompt=PROMPT, logprobs=3, **named).choices[0]
    assert by_id.logprobs.tokens == [f"token_id:{token}" for token in got.token_ids]
    assert by_id.logprobs.token_logprobs == got.logprobs.token_logprobs
    streamed = list(client.completions.create(prompt=PROMPT, logprobs=3, stream=True, **GREEDY))
    offsets = [at for chunk in streamed if chunk.choices[0].logprobs for at in chunk.choices[0].logprobs.text_offset]
    assert offsets == got.logprobs.text_offset


def test_a_chat_gives_the_same_tokens_as_its_prompt_over_grpc(worker, client):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **GREEDY)
    (expected,) = over_grpc(worker, "<system>Be brief.<user>Hi<assistant>", max_tokens=24, ignore_eos=True)
    (choice,) = chat.choices
    assert choice.token_ids == list(expected.output_ids)
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert chat.object == "chat.completion"
    assert chat.prompt_token_ids == tiny_models.tokenizer()("<system>Be brief.<user>Hi<assistant>")["input_ids"]
    first = choice.logprobs.content[0]
    assert bytes(first.bytes).decode("utf-8", "replace") == first.token
    assert first.top_logprobs[0].logprob == pytest.approx(first.logprob)
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    told = [chunk.model_extra.get("prompt_token_ids") for chunk in chunks]
    assert told == [chat.prompt_token_ids] + [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_with_logprobs_is_limited_by_the_size_of_its_answer(client, monkeypatch):
    """Story: with a long context such a chat was refused unless it set max_tokens."""
    for module in ("http.translate", "requests.request"):
        monkeypatch.setattr(f"speclen.worker.{module}.MAX_ANSWER_LOGPROBS", 100)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 5}
    chat = client.chat.completions.create(n=2, extra_body={"ignore_eos": True}, **asked)
    assert [len(choice.logprobs.content) for choice in chat.choices] == [10, 10]
    with pytest.raises(openai.BadRequestError, match="use stream") as told:
        client.chat.completions.create(n=2, max_tokens=11, **asked)
    assert told.value.param == "logprobs"
    assert list(client.chat.completions.create(n=2, max_tokens=11, stream=True, **asked))


def test_a_refusing_or_missing_chat_template_is_a_client_error(client):
    with pytest.raises(openai.BadRequestError, match="nobody may not speak"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "nobody", "content": "Hi"}])
    with (
        http_worker(chat_template=None) as bare,
        pytest.raises(openai.BadRequestError, match="no chat template") as told,
    ):
        bare.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    assert (told.value.param, told.value.code) == ("messages", "no_chat_template")


def test_speculation_statistics_are_returned_on_request(client):
    asked = GREEDY | {"extra_body": GREEDY["extra_body"] | {"include_metrics": True}}
    got = client.completions.create(prompt=PROMPT, n=2, **asked)
    found = got.metrics["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == found["num_spec_steps"] > 0
    assert sum(j * steps for j, steps in enumerate(histogram)) == found["num_accepted_draft_tokens"] > 0
    assert found["num_draft_tokens"] >= found["num_accepted_draft_tokens"]
    assert found["mean_acceptance_length"] == pytest.approx(
        1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    )
    *_, last = client.completions.create(prompt=PROMPT, n=2, stream=True, **asked)
    assert last.metrics["speculative_decoding"] == found
    plain = GREEDY | {"extra_body": asked["extra_body"] | {"speculation": "off"}}
    none = client.completions.create(prompt=PROMPT, **plain).metrics["speculative_decoding"]
    assert (none["num_spec_steps"], none["mean_acceptance_length"], none["draft_acceptance_rate"]) == (0, 1.0, 0.0)
    assert not hasattr(client.completions.create(prompt=PROMPT, **GREEDY), "metrics")


def test_text_and_tokens_convert_both_ways(worker):
    text = "def f(x): ä 😀"
    url = worker.url
    got = httpx.post(f"{url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert got["tokens"] == tiny_models.tokenizer()(text)["input_ids"]
    assert got["count"] == len(got["tokens"]) == len(got["token_strs"])
    assert httpx.post(f"{url}/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": text}
    for fields, prompt in (
        ({}, "<user>Hi<assistant>"),
        ({"add_generation_prompt": False}, "<user>Hi"),
        ({"chat_template_kwargs": {"mood": "(kind)"}}, "<user>Hi<assistant>(kind)"),
    ):
        body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
        counted = httpx.post(f"{url}/tokenize", json=body).json()
        assert counted["tokens"] == tiny_models.tokenizer()(prompt)["input_ids"]
        chat = httpx.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 1}).json()
        assert chat["usage"]["prompt_tokens"] == counted["count"]
    refused = httpx.post(f"{url}/detokenize", json={"tokens": [tiny_models.VOCAB_SIZE]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
