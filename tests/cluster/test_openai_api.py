"""The OpenAI dialect over real HTTP, with the real client, a real engine process, no model."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from configs.engine import EngineConfig, SchedulerConfig
from tests.cluster.conftest import MODEL_ALIAS, MODEL_NAME, Served, serve_ingress, simulated

_HELLO: Any = [{"role": "user", "content": "Hello"}]


def _ask(served: Served, **fields: Any) -> ChatCompletion:
    with served.client() as client:
        answer: ChatCompletion = client.chat.completions.create(
            **{"model": MODEL_NAME, "messages": _HELLO, **fields}
        )
        return answer


def _post(served: Served, **fields: Any) -> httpx.Response:
    body = {"model": MODEL_NAME, "messages": _HELLO, **fields}
    return httpx.post(f"{served.url}/v1/chat/completions", json=body)


def _stream(served: Served, **fields: Any) -> list[Any]:
    body = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    lines = [line for line in _post(served, **body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _joined(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)


def _error(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ------------------------------------------------------------------ answers


def test_models(served: Served) -> None:
    with served.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL_NAME, MODEL_ALIAS]
        assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
        with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
            client.models.retrieve("other")


def test_whole_answer(served: Served) -> None:
    answer = _ask(served, max_tokens=7, seed=1)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    assert answer.model == MODEL_NAME


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 40},
        {"max_tokens": 40, "n": 3},
        {"max_completion_tokens": 300},
        {"max_tokens": 60, "stop": ["e", "a "], "min_tokens": 5},
    ],
)
def test_streamed_and_whole_answers_are_equal(served: Served, fields: dict[str, Any]) -> None:
    whole = _ask(
        served,
        seed=3,
        extra_body={k: v for k, v in fields.items() if k == "min_tokens"},
        **{k: v for k, v in fields.items() if k != "min_tokens"},
    )
    chunks = _stream(served, seed=3, **fields)
    for choice in whole.choices:
        assert _joined(chunks, choice.index) == choice.message.content
        ends = [
            c["finish_reason"]
            for chunk in chunks
            for c in chunk["choices"]
            if c["index"] == choice.index and c["finish_reason"]
        ]
        assert ends == [choice.finish_reason]
    assert whole.usage is not None
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens
    assert len(whole.choices) == fields.get("n", 1)


def test_shape_of_a_stream(served: Served) -> None:
    chunks = _stream(served, max_tokens=3)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["choices"][0]["finish_reason"] is None
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    bare = _post(served, stream=True, max_tokens=3)
    assert bare.headers["content-type"].startswith("text/event-stream")
    assert "usage" not in bare.text


def test_the_openai_client_streams(served: Served) -> None:
    with served.client() as client:
        stream = client.chat.completions.create(
            model=MODEL_NAME, messages=_HELLO, max_tokens=9, stream=True, seed=1
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == _ask(served, max_tokens=9, seed=1).choices[0].message.content


def test_same_seed_same_text_and_choices_differ(served: Served) -> None:
    first, second = (_ask(served, max_tokens=9, seed=5, n=2) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert texts[0] != texts[1]
    unseeded = {_ask(served, max_tokens=9).choices[0].message.content for _ in range(2)}
    assert len(unseeded) == 2


def test_cached_tokens_are_reported(served: Served) -> None:
    long: Any = [{"role": "user", "content": "one two three four five " * 40}]
    _ask(served, messages=long, max_tokens=1)
    usage = _ask(served, messages=long, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert usage.prompt_tokens - 16 <= cached < usage.prompt_tokens


def test_a_salt_keeps_prefixes_apart(served: Served) -> None:
    long: Any = [{"role": "user", "content": "six seven eight nine ten " * 40}]

    def cached(salt: str) -> int:
        usage = _ask(served, messages=long, max_tokens=1, extra_body={"cache_salt": salt}).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(salt) for salt in ("one", "other")] == [0, 0]
    assert min(cached(salt) for salt in ("one", "other")) > 100


def test_an_answer_can_be_sent_back_as_history(served: Served) -> None:
    message = _ask(served, max_tokens=3).choices[0].message
    _ask(served, max_tokens=3, messages=[*_HELLO, message, *_HELLO])
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    _ask(served, max_tokens=3, messages=parts)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 3.5}, "temperature", ["less than or equal to 2", "3.5"]),
        ({"temperature": "hot"}, "temperature", ["number", "'hot'"]),
        ({"top_p": 0}, "top_p", ["greater than 0", "got 0"]),
        ({"n": 9}, "n", ["less than or equal to 8", "got 9"]),
        ({"max_tokens": 0}, "max_tokens", ["greater than or equal to 1", "got 0"]),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", ["20", "21"]),
        ({"top_logprobs": 2}, None, ["top_logprobs needs logprobs"]),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None, ["(1)", "(2)", "differ"]),
        ({"stop": ["x"] * 17}, "stop", ["at most 16", "17"]),
        ({"stop": ""}, "stop", ["1 to 256 characters", "has 0"]),
        ({"logit_bias": {"191222": -100}}, "logit_bias", ["49152", "191222"]),
        ({"logit_bias": {"5": -101}}, "logit_bias.5", ["-100", "-101"]),
        ({"messages": []}, "messages", ["at least 1"]),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", ["'robot'"]),
        ({"tools": [{"type": "function"}]}, "tools", ["at most 0"]),
        ({"response_format": {"type": "json_object"}}, "response_format.type", ["json_object"]),
        ({"frobnicate": 1}, "frobnicate", ["unknown or not supported"]),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", ["(5)", "got 6"]),
        ({"max_tokens": 9000}, "messages", ["8192", "9000"]),
        ({"seed": 1 << 64}, "seed", ["less than", str(1 << 64)]),
    ],
)
def test_a_bad_value_is_a_400_that_names_it(
    served: Served, fields: dict[str, Any], param: str | None, words: list[str]
) -> None:
    reply = _post(served, **fields)
    assert reply.status_code == 400
    error = _error(reply)
    assert param is None or error["param"].startswith(param)
    assert all(word in error["message"] for word in words), error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"model": "simulated", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
        b'{"\\ud800": 1, "model": "simulated", "messages": []}',
        b'{"model": "simulated", "messages": [{"role":"user","content":"x"}], "temperature": NaN}',
        b'{"model": "simulated", "messages": [{"role":"user","content":"x"}], "seed": 1e400}',
        b'{"model": "simulated", "messages": [{"role":"user","content":"x"}], "seed": '
        + b"9" * 5000
        + b"}",
        b'{"model": "simulated", "messages": 5}',
    ],
)
def test_a_malformed_body_is_a_400(served: Served, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{served.url}/v1/chat/completions", content=body, headers=headers)
    assert reply.status_code == 400, reply.text
    assert len(_error(reply)["message"]) < 400


def test_unknown_model_and_route(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as info:
        _ask(served, model="other")
    assert info.value.code == "model_not_found"
    assert httpx.get(f"{served.url}/v1/other").status_code == 404
    assert "message" in httpx.get(f"{served.url}/v1/other").json()["error"]


def test_context_overflow_has_its_own_code(served: Served) -> None:
    reply = _post(served, messages=[{"role": "user", "content": "word " * 9000}])
    assert (reply.status_code, _error(reply)["code"]) == (400, "context_length_exceeded")
    assert "8192" in _error(reply)["message"]


def test_a_body_beyond_the_limit_is_a_413(served: Served) -> None:
    url = f"{served.url}/v1/chat/completions"
    headers = {"content-type": "application/json"}
    reply = httpx.post(url, content=b"x" * (9 << 20), headers=headers)
    assert reply.status_code == 413
    assert str(8 << 20) in _error(reply)["message"]

    def unannounced() -> Iterator[bytes]:
        for _ in range(9):
            yield b" " * (1 << 20)

    with contextlib.suppress(httpx.WriteError):
        assert httpx.post(url, content=unannounced(), headers=headers).status_code == 413


# ------------------------------------------------------------------ ends and failures


def test_a_client_that_leaves_has_its_stream_aborted(slow: Served) -> None:
    body = {"model": MODEL_NAME, "messages": _HELLO, "stream": True, "n": 2}
    with httpx.stream("POST", f"{slow.url}/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        slow.wait_running(2)
    slow.wait_idle(1.0)


def test_a_hundred_streams_opened_and_closed_leave_nothing(slow: Served) -> None:
    body = {"model": MODEL_NAME, "messages": _HELLO, "stream": True}

    async def one(client: httpx.AsyncClient, index: int) -> None:
        url = f"{slow.url}/v1/chat/completions"
        async with client.stream("POST", url, json=body) as reply:
            if index % 3:
                await anext(reply.aiter_lines())
            await asyncio.sleep(index % 7 / 50)

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=30) as client:
            await asyncio.gather(*(one(client, index) for index in range(100)))

    asyncio.run(all_of_them())
    slow.wait_idle(3.0)


def test_a_stop_string_ends_the_request_in_the_engine(slow: Served) -> None:
    began_s = time.monotonic()
    answer = _ask(slow, stop=["e", "a", "i", "o", " "], max_tokens=5000, seed=2)
    assert answer.choices[0].finish_reason == "stop"
    assert not set(answer.choices[0].message.content or "") & set("eaio ")
    assert time.monotonic() - began_s < 5
    slow.wait_idle(1.0)


def test_who_waits_too_long_for_a_place_is_told_so_by_code(model_folder: Path) -> None:
    config = simulated(step_s=0.02)
    scheduler = SchedulerConfig(max_num_seqs=1, queue_timeout_s=0.3)
    config = EngineConfig.model_validate(config.model_dump() | {"scheduler": scheduler})
    with serve_ingress(config, model_folder) as served:
        url = f"{served.url}/v1/chat/completions"
        body = {"model": MODEL_NAME, "messages": _HELLO, "stream": True}
        with httpx.stream("POST", url, json=body):
            served.wait_running(1)
            with httpx.stream("POST", url, json=body) as reply:
                (line,) = [line for line in reply.iter_lines() if line.startswith("data:")]
            error = json.loads(line.removeprefix("data:"))["error"]
            assert error["code"] == "queue_timeout"
            assert "0.3 s" in error["message"]
            whole = httpx.post(url, json=body | {"stream": False})
            assert whole.status_code == 503
            assert whole.json()["error"]["code"] == "queue_timeout"
            assert served.load()["running"] == 1, "the other one goes on"


def test_a_full_queue_is_a_503_with_retry_after(model_folder: Path) -> None:
    config = simulated(step_s=0.02)
    config = EngineConfig.model_validate(
        config.model_dump() | {"scheduler": SchedulerConfig(max_num_seqs=1, max_waiting=1)}
    )
    with serve_ingress(config, model_folder) as served:
        url = f"{served.url}/v1/chat/completions"
        body = {"model": MODEL_NAME, "messages": _HELLO, "stream": True}
        with httpx.stream("POST", url, json=body), httpx.stream("POST", url, json=body):
            served.wait_running(1)
            reply = _post(served, n=2)
            assert reply.status_code == 503
            assert reply.headers["retry-after"] == "1"
            assert _error(reply)["code"] == "overloaded"
        served.wait_idle()


def test_a_lost_engine_is_an_error_event_and_then_503s(model_folder: Path) -> None:
    with serve_ingress(simulated(step_s=0.02), model_folder) as served:
        url = f"{served.url}/v1/chat/completions"
        body = {"model": MODEL_NAME, "messages": _HELLO, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(served.engine.pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert "[DONE]" not in rest[-1]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        began_s = time.monotonic()
        after = _post(served)
        assert after.status_code == 503
        assert "retry-after" in after.headers
        assert time.monotonic() - began_s < 1
        assert httpx.get(f"{served.url}/ready").status_code == 503


def test_a_slow_reader_does_not_hold_up_others(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL_NAME, "messages": _HELLO, "stream": True, "n": 8})
    with socket.create_connection((host, int(port))) as stuck:
        stuck.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        began_s = time.monotonic()
        _ask(served, max_tokens=5)
        assert time.monotonic() - began_s < 3
    served.wait_idle()


def test_what_an_engine_gave_up_is_told_by_its_reason() -> None:
    from cluster.errors import failure_of
    from cluster.generation import GenerationFailed
    from engine.wire import Finish, FinishReason

    aborted = failure_of(GenerationFailed(Finish(FinishReason.ABORT)))
    failed = failure_of(GenerationFailed(Finish(FinishReason.ERROR, "bad grammar")))
    unknown = failure_of(ValueError("/secret/path"))
    assert (aborted.status, failed.status, unknown.status) == (503, 500, 500)
    assert failed.message == "bad grammar"
    assert "secret" not in unknown.message
