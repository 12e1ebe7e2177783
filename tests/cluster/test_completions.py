"""`/v1/completions` over real HTTP, with the real client, a real engine process, no model."""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.answer import EventStream
from cluster.chat import ChatCompletion, ChatDialect
from cluster.completions import Completion, CompletionDialect
from cluster.generation import Usage
from cluster.openai import AnswerHead, OpenAIDialect
from cluster.postprocess import OutputDelta, OutputEnd, OutputToken
from cluster.tokenizer import Tokenizer
from configs.engine import EngineConfig, SchedulerConfig
from engine.errors import EngineLost
from engine.wire import TokenLogprobs
from tests.cluster.conftest import MODEL_NAME, Served, serve_ingress, simulated

_LONG = "one two three four five " * 40


def _post(served: Served, **fields: Any) -> httpx.Response:
    body = {"model": MODEL_NAME, "prompt": "Hello", **fields}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=30)


def _ask(served: Served, **fields: Any) -> dict[str, Any]:
    reply = _post(served, **fields)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def _chunks(reply: httpx.Response) -> list[Any]:
    events = [event.removeprefix("data: ") for event in reply.text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def _texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


# ------------------------------------------------------------------ answers


def test_the_openai_client_completes(served: Served) -> None:
    with served.client() as client:
        answer = client.completions.create(
            model=MODEL_NAME, prompt="Hello", seed=1, n=2, logprobs=2, extra_body={"min_tokens": 1}
        )
        stream = client.completions.create(
            model=MODEL_NAME, prompt="Hello", seed=1, n=2, stream=True, logprobs=2
        )
        streamed = {0: "", 1: ""}
        for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert answer.object == "text_completion"
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert [choice.text for choice in answer.choices] == [streamed[0], streamed[1]]
    assert streamed[0] != streamed[1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 16  # OpenAI's default length
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert token in top
        assert len(top) in (2, 3)


def test_prompts_and_choices_are_numbered_through(served: Served, tokenizer: Tokenizer) -> None:
    prompts = ["Hello", "Good evening", "🐟"]
    answers = [_ask(served, prompt=prompt, n=2, seed=4) for prompt in prompts]
    apart = [_texts(answer) for answer in answers]
    together = _ask(served, prompt=prompts, n=2, seed=4)
    assert _texts(together) == [text for texts in apart for text in texts]
    ids = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
    as_ids = _ask(served, prompt=ids, n=2, seed=4)
    assert _texts(as_ids) == _texts(together)
    assert _texts(_ask(served, prompt=ids[1], n=2, seed=4)) == apart[1]
    for usage in (together["usage"], as_ids["usage"]):
        assert usage["prompt_tokens"] == sum(map(len, ids))
        counts = [answer["usage"]["completion_tokens"] for answer in answers]
        assert usage["completion_tokens"] == sum(counts)


def test_cached_tokens_are_those_of_all_prompts(served: Served) -> None:
    prompts = [f"{number} {_LONG}" for number in range(3)]
    _ask(served, prompt=prompts, max_tokens=1)
    usage = _ask(served, prompt=prompts, max_tokens=1, n=2)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] - 3 * 16 <= cached < usage["prompt_tokens"]


def test_echo_puts_the_prompt_before_every_choice(served: Served) -> None:
    fields: dict[str, Any] = {"prompt": ["Hello\n", "日本"], "n": 2, "seed": 8}
    plain, echoed = _ask(served, **fields), _ask(served, echo=True, **fields)
    starts = ["Hello\n"] * 2 + ["日本"] * 2
    assert _texts(echoed) == [a + b for a, b in zip(starts, _texts(plain), strict=True)]
    assert echoed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    # A stop string in the prompt stops nothing.
    stopped = _texts(_ask(served, prompt="Hello", echo=True, stop="llo", max_tokens=3))
    assert stopped[0].startswith("Hello")


def test_a_prompt_that_ends_inside_a_character_does_not_leak(
    served: Served, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("fish 🐟", add_special_tokens=True)
    while not tokenizer.decode(ids).endswith("\ufffd"):
        ids.pop()
    answer = _ask(served, prompt=ids, seed=3, logprobs=0, max_tokens=12)
    (choice,) = answer["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]).removesuffix("<|endoftext|>")
    assert answer["usage"]["prompt_tokens"] == len(ids)
    streamed = _chunks(_post(served, prompt=ids, seed=3, max_tokens=12, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]
    (echoed,) = _texts(_ask(served, prompt=ids, seed=3, max_tokens=12, echo=True))
    assert echoed == tokenizer.decode(ids) + choice["text"]


def test_shape_of_a_stream(served: Served) -> None:
    fields = {"prompt": ["a", "b"], "max_tokens": 3, "stream": True}
    chunks = _chunks(_post(served, stream_options={"include_usage": True}, **fields))
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1]
    assert "usage" not in _post(served, **fields).text


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", ["no tokens"]),
        ({"prompt": []}, "prompt", ["must not be empty"]),
        ({"prompt": [[]]}, "prompt", ["integers, one at least"]),
        ({"prompt": ["a", ""]}, "prompt.1", ["no tokens"]),
        ({"prompt": ["a", [1]]}, "prompt", ["all strings, or all lists"]),
        ({"prompt": [1, "a"]}, "prompt", ["integers"]),
        ({"prompt": [1, True]}, "prompt", ["integers"]),
        ({"prompt": [1.5]}, "prompt", ["all strings, or all lists"]),
        ({"prompt": [-1]}, "prompt", ["0 to 2147483647"]),
        ({"prompt": [1 << 70]}, "prompt", ["0 to 2147483647"]),
        ({"prompt": [5, 191222]}, "prompt", ["49152", "191222"]),
        ({"prompt": [[1], [191222]]}, "prompt.1", ["49152", "191222"]),
        ({"prompt": ["a"] * 129}, "prompt", ["at most 128", "129"]),
        ({"prompt": ["a"] * 100, "n": 3}, None, ["256", "100", "300"]),
        ({"prompt": "word " * 9000}, "prompt", ["8192", "9001", "9017"]),
        ({"prompt": ["a", "word " * 9000]}, "prompt.1", ["8192"]),
        ({"prompt": [7] * 8190}, "prompt", ["8192", "8190", "16"]),
        ({"max_tokens": 9000}, "prompt", ["8192", "9000"]),
        ({"max_tokens": 0}, "max_tokens", ["greater than or equal to 1"]),
        ({"suffix": "x"}, "suffix", ["not supported"]),
        ({"best_of": 2}, None, ["best_of (2)", "n (1)"]),
        ({"logprobs": 6}, "logprobs", ["less than or equal to 5", "got 6"]),
        ({"logprobs": True}, "logprobs", ["integer"]),
        ({"logprobs": 1, "echo": True}, None, ["echo with logprobs", "not supported"]),
        ({"stream_options": {}}, None, ["stream_options needs stream"]),
        ({"messages": []}, "messages", ["unknown or not supported"]),
        ({"logit_bias": {"191222": -100}}, "logit_bias", ["49152", "191222"]),
        ({"min_tokens": 17}, "min_tokens", ["(16)", "17"]),
    ],
)
def test_a_bad_value_is_a_400_that_names_it(
    served: Served, fields: dict[str, Any], param: str | None, words: list[str]
) -> None:
    reply = _post(served, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]
    assert len(error["message"]) < 400


def test_an_overflow_has_its_own_code_and_an_unknown_model_too(served: Served) -> None:
    assert _post(served, max_tokens=9000).json()["error"]["code"] == "context_length_exceeded"
    with served.client() as client, pytest.raises(openai.NotFoundError) as info:
        client.completions.create(model="other", prompt="Hello")
    assert info.value.code == "model_not_found"


def test_null_and_equal_values_are_the_defaults(served: Served) -> None:
    names = ("n", "best_of", "echo", "suffix", "logprobs", "stop", "max_tokens", "logit_bias")
    nulls = _ask(served, seed=2, **dict.fromkeys(names))
    assert _texts(nulls) == _texts(_ask(served, seed=2, n=1, best_of=1, echo=False))


def test_one_prompt_that_fails_leaves_nothing_of_the_others(served: Served) -> None:
    for _ in range(5):
        prompts = [*(f"{number} {_LONG}" for number in range(20)), "word " * 9000]
        assert _post(served, prompt=prompts, max_tokens=2000).status_code == 400
    served.wait_idle(2.0)


# ------------------------------------------------------------------ ends and failures


def test_a_client_that_leaves_has_every_prompt_aborted(slow: Served) -> None:
    for stream in (True, False):
        fields = {"prompt": ["a", "b"], "n": 2, "max_tokens": 5000, "stream": stream}
        connection = slow.begin("/v1/completions", **fields)
        slow.wait_running(4)
        connection.close()
        slow.wait_idle(1.0)


@pytest.fixture(scope="module")
def narrow(model_folder: Path) -> Iterator[Served]:
    """An engine with room for three requests."""
    config = simulated(step_s=0.02)
    scheduler = SchedulerConfig(max_num_seqs=1, max_waiting=2)
    config = EngineConfig.model_validate(config.model_dump() | {"scheduler": scheduler})
    with serve_ingress(config, model_folder) as served:
        yield served


def test_all_prompts_are_accepted_or_none(narrow: Served) -> None:
    reply = _post(narrow, prompt=["a", "b", "c", "d", "e"], max_tokens=5000)
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "overloaded"
    narrow.wait_idle(1.0)
    assert len(_ask(narrow, prompt=["a", "b"], max_tokens=2)["choices"]) == 2


# ------------------------------------------------------------------ how an answer is written

_HEAD = AnswerHead("id-1", 1700000000, 'a "model"', "fp_1")


class _Letters:
    """A tokenizer whose ids are code points."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


def _dialects(include_usage: bool = True) -> list[OpenAIDialect]:
    letters: Any = _Letters()
    return [
        ChatDialect(_HEAD, letters, include_usage),
        CompletionDialect(_HEAD, letters, include_usage, [""] * 3),
    ]


@pytest.mark.parametrize("text", ["x", '"\\\n\t\0', "é🐟日", "\ufffd", "\u2028</script>", "text"])
@pytest.mark.parametrize("include_usage", [True, False])
def test_a_spliced_chunk_equals_the_typed_one(text: str, include_usage: bool) -> None:
    for dialect in _dialects(include_usage):
        for index in (2, 0, 2):
            typed = dialect.event(dialect.text_choice(index, text))
            assert dialect.text_event(index, text) == typed
            assert dialect.delta(index, OutputDelta(text, ())) == typed
            kind: Any = ChatCompletion if isinstance(dialect, ChatDialect) else Completion
            fields = set(json.loads(typed.removeprefix(b"data: ")))
            assert fields == set(kind.__struct_fields__) - (set() if include_usage else {"usage"})


def test_chunks_are_what_the_client_s_own_types_say() -> None:
    from openai.types import Completion as OpenAICompletion
    from openai.types.chat import ChatCompletionChunk

    token = OutputToken(97, TokenLogprobs(-0.5, ((97, -0.5), (98, -math.inf))))
    deltas = [OutputDelta("a", ()), OutputDelta("a", (token,), OutputEnd.STOP)]
    kinds: list[Any] = [ChatCompletionChunk, OpenAICompletion]
    for dialect, kind in zip(_dialects(), kinds, strict=True):
        events = [dialect.begin(0), *(dialect.delta(0, delta) for delta in deltas)]
        events.append(dialect.end(Usage(3, 2, 1)).removesuffix(b"data: [DONE]\n\n"))
        for event in b"".join(events).split(b"\n\n")[:-1]:
            chunk = json.loads(event.removeprefix(b"data: "))
            for choice in chunk["choices"]:
                if kind is OpenAICompletion and choice["finish_reason"] is None:
                    choice["finish_reason"] = "stop"  # null in chunks, which have no type there
            assert kind.model_validate(chunk, strict=True).model_dump(exclude_unset=True) == chunk
        assert b"-9999.0" in b"".join(events)  # JSON has no infinity


class _Scripted:
    """An output that follows a script of deltas, pauses and failures."""

    usage = Usage(1, 1, 0)

    def __init__(self, *script: OutputDelta | float | Exception) -> None:
        self._script = list(script)
        self.closed = False

    async def next_delta(self) -> tuple[int, OutputDelta] | None:
        while self._script:
            match self._script.pop(0):
                case OutputDelta() as delta:
                    return 0, delta
                case Exception() as error:
                    raise error
                case pause_s:
                    await asyncio.sleep(pause_s)
        return None

    def close(self) -> None:
        self.closed = True


def _written(output: _Scripted, dialect: OpenAIDialect, gone_after_s: float = 60) -> bytes:
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(gone_after_s)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(EventStream(output, dialect, 0.02)({"type": "http"}, receive, send))
    assert output.closed
    assert sent[0]["type"] == "http.response.start"
    return b"".join(message.get("body", b"") for message in sent)


def test_silence_is_filled_with_comments() -> None:
    for dialect in _dialects():
        delta = OutputDelta("a", (), OutputEnd.STOP)
        body = _written(_Scripted(0.15, delta), dialect)
        assert 3 <= body.count(b": keep-alive\n\n") <= 7
        assert body.endswith(b"data: [DONE]\n\n")
        busy = _Scripted(*[0.002, OutputDelta("a", ())] * 50, delta)
        assert b"keep-alive" not in _written(busy, dialect)


def test_a_failure_on_the_way_is_an_error_event_and_no_done() -> None:
    for dialect in _dialects():
        output = _Scripted(OutputDelta("a", ()), EngineLost("at 10.0.0.1"), OutputDelta("b", ()))
        *_, last = _written(output, dialect).strip().split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
        assert b"10.0.0.1" not in last


def test_a_client_that_leaves_in_silence_closes_the_output() -> None:
    for dialect in _dialects():
        assert b"DONE" not in _written(_Scripted(60.0), dialect, gone_after_s=0.05)
