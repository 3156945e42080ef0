"""Invalid requests get an error in OpenAI's format with the right status, and leave nothing behind."""

import json
import ssl
import time

import httpx
import pytest
from pydantic import ValidationError

from speclen.process.credentials import ServerSecurity
from speclen.worker.http import guard
from speclen.worker.http.responses import to_json
from speclen.worker.http.schema import ChatRequest, CompletionRequest
from tests.support import tiny_models
from tests.support.certificates import make_certificates
from tests.support.http_worker import KEY, MODEL, connected, head, http_worker, post, until_idle


@pytest.fixture(scope="module")
def worker():
    with http_worker(max_batch_size=4, max_waiting=4) as worker:
        yield worker


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        (b"", 400, None, "required"),
        (b"{", 400, None, "not valid JSON"),
        (b"\xff\xfe", 400, None, "not valid JSON"),
        ([], 400, None, "the body: input should be an object"),
        ({}, 400, "prompt", "required"),
        ({"prompt": None}, 400, "prompt", "prompt"),
        ({"prompt": ""}, 400, "prompt", "at least one token"),
        ({"prompt": []}, 400, "prompt", "at least one token"),
        ({"prompt": [3, tiny_models.VOCAB_SIZE]}, 400, "prompt", str(tiny_models.VOCAB_SIZE)),
        ({"prompt": [-1]}, 400, "prompt", ""),
        ({"prompt": "half \ud800"}, 400, None, "not valid JSON"),
        ({"prompt": "a", "model": "gpt-9"}, 404, "model", "gpt-9"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"prompt": "a", "max_tokens": "9"}, 400, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": 300}, 400, "prompt", "maximum context length is 256"),
        ({"prompt": [5] * 300}, 400, "prompt", "maximum context length is 256"),
        ({"prompt": "x" * 1_000_000}, 400, "prompt", "This model's maximum context length is 256 tokens"),
        ({"prompt": "a", "top_k": 2**40}, 400, "top_k", ""),
        ({"prompt": "a", "stop": [""]}, 400, "stop", "characters"),
        ({"prompt": "a", "logit_bias": {"9999": 1}}, 400, "logit_bias", "9999"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "more than"),
        ({"prompt": "a", "speculation": 64}, 400, "speculation", "allowed are 0 to 8"),
        ({"prompt": "a", "echo": True}, 400, "echo", "not supported"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format", "json_object"),
        ({"prompt": "a", "best_of": 3}, 400, "best_of", "not supported by this server: use n"),
        ({"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options", ""),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options", ""),
    ],
)
def test_invalid_completions_name_the_parameter(worker, body, status, param, words):
    answer = post(worker, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert words in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"] == "context_length_exceeded") == ("maximum context" in words)
    assert len(error["message"]) < 400


HI, IMAGE = {"role": "user", "content": "a"}, {"type": "image_url", "image_url": {"url": "x"}}
IMAGES = [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [HI], "top_logprobs": 3}, "top_logprobs"),
        ({"messages": [HI], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [HI], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"messages": [HI | {"content": "a" * 2000}]}, "messages"),
    ],
)
def test_invalid_chats_name_the_parameter(worker, body, param):
    answer = post(worker, body, "/v1/chat/completions")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt", ["a"] * 65, ": list should have at most 64 items, not 65"),
        ("prompt", 7, ": input should be a valid string or a valid list"),
        ("prompt", ["a", 5], ".1: input should be a valid string"),
        ("prompt", [[5, "a"]], ".0.1: input should be a valid integer"),
        ("prompt", [1.5], ".0: input should be a valid integer or a valid string or a valid list"),
        ("speculation", "x", ": input should be a valid integer or 'auto' or 'off'"),
        ("messages", IMAGES, ".0.content.1.type: input should be 'text' or 'refusal'"),
        ("messages", [HI | {"content": [{"type": "text"}]}], ".0.content.0: text is missing"),
        ("logit_bias", {"x": 1}, ": key 'x' is not a token id"),
        ("structured_outputs", {"json": 5}, ".json: input should be an object or a valid string or a valid boolean"),
    ],
)
def test_errors_of_union_fields_describe_the_intended_type(worker, field, value, words):
    """Story: 65 prompts gave "prompt.str: input should be a valid string", as if lists were not taken at all."""
    path = "/v1/chat/completions" if field == "messages" else "/v1/completions"
    error = post(worker, {"prompt": "a", field: value}, path).json()["error"]
    assert (error["message"], error["param"]) == (field + words, field)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [["a"] * 1000] * 9}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(token): "x" for token in range(1025)}}),
        (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [5] * 1000}}),
        (ChatRequest, {"messages": [{"role": "user", "content": [5] * 1000}] * 1000}),
    ],
)
def test_errors_of_large_bodies_are_few(kind, body):
    """Story: an error for each of a million values in 4 MiB took gigabytes. Now there is one for each type of a field."""
    with pytest.raises(ValidationError) as told:
        kind.model_validate(body)
    assert told.value.error_count() <= 4


def test_unknown_fields_are_ignored(worker):
    assert post(worker, {"prompt": "a", "max_tokens": 1, "user": "me", "best_of": 1, "tools": None}).status_code == 200


def test_unknown_paths_and_methods_are_refused(worker):
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)):
        answer = httpx.request(method, f"{worker.url}{path}")
        assert answer.status_code == status
        assert answer.json()["error"]["message"].startswith(f"{method} {path}: ")
    assert httpx.get(f"{worker.url}/v1/completions").headers["allow"] == "POST"


def test_a_body_too_large_is_refused_before_it_is_read(worker):
    headers = {"Content-Type": "application/json", "Content-Length": str(guard.MAX_BODY_BYTES + 1)}
    with connected(worker) as one:
        one.sendall(head("POST /v1/completions", headers))
        assert b" 413 " in one.recv(4096)

    def chunks():
        for _ in range(guard.MAX_BODY_BYTES // 65_536 + 1):
            yield b" " * 65_536

    answer = httpx.post(f"{worker.url}/v1/completions", content=chunks(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


def test_arriving_bodies_are_bounded_in_total(worker, monkeypatch):
    """Story: each was bounded, but four thousand clients could hold back the last byte of theirs."""
    monkeypatch.setattr(guard, "MAX_ARRIVING_BYTES", 150_000)
    headers = {"Content-Type": "application/json", "Content-Length": "100001"}
    with connected(worker) as one, connected(worker) as other:
        one.sendall(head("POST /v1/completions", headers) + b" " * 100_000)
        time.sleep(0.2)
        assert post(worker, {"prompt": "a", "max_tokens": 1}).status_code == 200, "one that is here takes no room"
        other.sendall(head("POST /v1/completions", headers) + b" " * 100_000)
        answer = b"".join(iter(lambda: other.recv(4096), b""))
        assert b" 503 " in answer
        assert b"too many bodies are being sent at once: try again later" in answer
    until_idle(worker.engine)
    with connected(worker) as one:
        one.sendall(head("POST /v1/completions", headers) + b" " * 100_000)
        one.sendall(b"x")
        assert b" 400 " in one.recv(4096)


def test_a_failure_while_streaming_is_sent_as_a_data_line(worker, monkeypatch):
    def fail(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr("speclen.worker.http.answers.Answer.chunks", fail)
    answer = post(worker, {"prompt": "a", "stream": True})
    error, done, _ = answer.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
    assert done == "data: [DONE]"
    assert "secret" not in answer.text
    until_idle(worker.engine)


def test_json_lines_contain_no_line_separator():
    content = {"text": "a\x85b\u2028c\u2029d"}
    line = to_json(content)
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == content


def test_tls_and_the_key_protect_http(tmp_path):
    made = make_certificates(tmp_path)
    cert, key, authority = made.server.cert, made.server.key, made.authority.cert
    token = tmp_path / "token"
    token.write_text(KEY)
    with http_worker(security=ServerSecurity(tls_cert=cert, tls_key=key, token_file=token)) as worker:
        context = ssl.create_default_context(cafile=str(authority))
        url, headers = f"https://{worker.http}/v1/models", {"Authorization": f"Bearer {KEY}"}
        assert httpx.get(url, verify=context, headers=headers).json()["data"][0]["id"] == MODEL
        assert httpx.get(url, verify=context).status_code == 401
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, headers=headers)
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"), headers=headers)
    with http_worker(security=ServerSecurity(tls_cert=cert, tls_key=key, tls_client_ca=authority)) as worker:
        url = f"https://{worker.http}/health"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url, verify=context)
        context.load_cert_chain(made.client.cert, made.client.key)
        assert httpx.get(url, verify=context).status_code == 200
