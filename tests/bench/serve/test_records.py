"""What a stream becomes: first token, chunks, usage, the kind of its failure."""

from typing import Any

import pytest

from bench.serve.records import AnswerStream, Record, reason_of
from tests.bench.serve.scripted import DONE, content, event, usage


def _record() -> Record:
    return Record(scheduled_s=1.0, asked_input_tokens=10, asked_output_tokens=3)


def _read(*reads: tuple[float, bytes], keep_text: bool = False) -> Record:
    record = _record()
    stream = AnswerStream(record, keep_text)
    for now_s, data in reads:
        stream.feed(data, now_s)
    stream.close()
    return record


def test_a_timeline() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    record = _read(
        (1.2, role),
        (1.5, content("Hel")),
        (1.7, content("lo") + content(" you")),
        (1.8, event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])),
        (1.9, usage(12, 5, 8)),
        (2.0, DONE),
        keep_text=True,
    )
    assert record.failure is None
    assert list(record.chunk_times_s) == [1.5, 1.7, 1.7]
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx(0.2 / 4)
    assert record.e2e_s == pytest.approx(1.0)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (12, 5, 8)
    assert (record.text, record.finish_reason) == ("Hello you", "length")


def test_without_usage_chunks_are_counted() -> None:
    record = _read((2.0, content("a") + content("b")), (3.0, content("c") + DONE))
    assert record.usage_output_tokens is None
    assert record.output_tokens == 3
    assert record.tpot_s == pytest.approx(0.5)
    assert record.text == ""


def test_completions_and_reasoning_are_output_too() -> None:
    text = event(choices=[{"index": 0, "text": "a", "finish_reason": None}])
    reasoning = event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])
    call = event(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}])
    record = _read((2.0, text), (3.0, reasoning), (4.0, call + DONE), keep_text=True)
    assert list(record.chunk_times_s) == [2.0, 3.0, 4.0]
    assert record.text == "a"


def test_a_token_without_text_counts_by_its_finish_reason() -> None:
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
    record = _read((2.0, end + usage(5, 1)), (2.5, DONE))
    assert record.ttft_s == 1.0
    assert record.tpot_s is None
    assert record.e2e_s == 1.5


@pytest.mark.parametrize(
    ("stream", "failure", "reason"),
    [
        (content("a"), "incomplete", "without [DONE]"),
        (b"", "incomplete", "without [DONE]"),
        (usage(5, 0) + DONE, "empty", "no output"),
        (b"data: {not json}\n\n" + DONE, "malformed", "JSON"),
        (b'data: {"choices": 5}\n\n' + DONE, "malformed", "array"),
        (content("a") + event(error={"message": "engine lost"}), "stream_error", "engine lost"),
    ],
)
def test_failures(stream: bytes, failure: str, reason: str) -> None:
    record = _read((2.0, stream))
    assert record.failure == failure
    assert reason in record.reason
    assert record.end_s is None
    assert record.e2e_s is None


def test_what_comes_after_the_end_changes_nothing() -> None:
    record = _read((2.0, content("a") + DONE), (3.0, content("b") + b"data: {\n\n"))
    record.fail("connection", "reset")
    assert (record.failure, record.end_s, len(record.chunk_times_s)) == (None, 2.0, 1)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"error": {"message": "no", "code": 3}}, "no"),
        ({"message": "no"}, "no"),
        ({"detail": [{"loc": ["x"]}]}, '[{"loc":["x"]}]'),
        ({"code": 3}, '{"code":3}'),
        ("no", "no"),
    ],
)
def test_reasons(error: Any, words: str) -> None:
    assert reason_of(error) == words
