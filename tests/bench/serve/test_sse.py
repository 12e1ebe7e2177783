"""Events come out whole, however the bytes were cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.serve import sse
from bench.serve.sse import EventTooLarge, SseParser


def _parse(stream: bytes, cuts: list[int] | None = None) -> list[bytes]:
    parser = SseParser()
    edges = [0, *sorted(cuts or []), len(stream)]
    return [
        payload
        for begin, end in itertools.pairwise(edges)
        for payload in parser.feed(stream[begin:end])
    ]


@pytest.mark.parametrize(
    ("stream", "payloads"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b": keep-alive\n\ndata: a\n\n", [b"a"]),
        (b"event: message\nid: 7\ndata: a\nretry: 3\n\n", [b"a"]),
        (b"\n\n\ndata: a\n\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data\n\n", [b""]),
        (b"data: \n\n", [b""]),
        (b"datax: a\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: a\n\ndata: cut off", [b"a"]),
        (b"data: a\n\ndata: cut off\n", [b"a"]),
        (b"data: a: b\n\n", [b"a: b"]),
    ],
)
def test_events(stream: bytes, payloads: list[bytes]) -> None:
    assert _parse(stream) == payloads
    assert _parse(stream, list(range(len(stream)))) == payloads


_LINES = st.sampled_from(
    [b"data: x", b"data:y", b": note", b"id: 1", b"data", b"", b"data: \xc3\xa9\xf0\x9f\x98\x80"]
)
_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(_LINES, _ENDS), max_size=20), st.data())
def test_cuts_change_nothing(lines: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    stream = b"".join(line + end for line, end in lines)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert _parse(stream, cuts) == _parse(stream)


@given(st.lists(st.text(), max_size=10), _ENDS, st.data())
def test_json_payloads_survive(texts: list[str], end: bytes, data: st.DataObject) -> None:
    stream = b"".join(b"data: " + json.dumps(text).encode() + end + end for text in texts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert [json.loads(payload) for payload in _parse(stream, cuts)] == texts


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_MAX_EVENT_BYTES", 100)
    parser = SseParser()
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(EventTooLarge, match="106 bytes"):
        parser.feed(b"x" * 10)
