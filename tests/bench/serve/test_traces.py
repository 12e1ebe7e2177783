"""Both published formats, small samples inline and the real files where they are."""

import gzip
import itertools
from pathlib import Path

import pytest

from bench.serve.prompts import WordRenderer
from bench.serve.traces import TraceEntry, TraceError, capped, parse_trace, read_trace
from bench.serve.workloads import from_trace

_MOONCAKE = """\
{"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 2]}
{"timestamp": 27, "input_length": 1030, "output_length": 0, "hash_ids": [0, 1, 7]}
"""
_AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
_TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces"


def test_mooncake() -> None:
    assert parse_trace(_MOONCAKE.splitlines()) == [
        TraceEntry(0.027, 1030, 1, (0, 1, 7)),
        TraceEntry(3.0, 600, 4, (0, 2)),
    ]


def test_azure() -> None:
    first, second = parse_trace(_AZURE.splitlines())
    assert (first.input_tokens, first.output_tokens, first.hash_ids) == (4808, 10, ())
    assert second.timestamp_s - first.timestamp_s == pytest.approx(0.052, abs=1e-6)


@pytest.mark.parametrize("text", [_MOONCAKE, _AZURE])
def test_gzipped_or_not(tmp_path: Path, text: str) -> None:
    plain, zipped = tmp_path / "plain", tmp_path / "zipped"
    plain.write_text(text)
    zipped.write_bytes(gzip.compress(text.encode()))
    assert read_trace(plain) == read_trace(zipped) == parse_trace(text.splitlines())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("a,b,c\n1,2,3\n", "neither"),
        (_MOONCAKE + "{", "line 3"),
        (_MOONCAKE + '{"timestamp": 1, "input_length": "x"}', "line 3.*input_length"),
        (_AZURE + "2023-11-16,5\n", "line 4"),
        (_AZURE + "yesterday,5,5\n", "line 4"),
        (_AZURE + "2023-11-16 18:17:04,-5,5\n", "line 4.*negative"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(_AZURE.encode())[:-9])
    with pytest.raises(TraceError, match=r"trace\.gz"):
        read_trace(path)


def test_caps_keep_the_beginning() -> None:
    (entry,) = capped([TraceEntry(0, 1030, 50, (3, 4, 5))], 700, 8)
    assert (entry.input_tokens, entry.output_tokens) == (700, 8)
    (whole,) = from_trace([TraceEntry(0, 1030, 50, (3, 4, 5))], 1)
    (cut,) = from_trace([entry], 1)
    render = WordRenderer("1").render
    assert render(whole.turns[0].pieces).split()[:700] == render(cut.turns[0].pieces).split()
    entries = [TraceEntry(0, 1030, 50, (3, 4, 5))]
    assert capped(entries, None, None) == entries


needs_traces = pytest.mark.skipif(
    not _TRACES.is_dir(), reason="the published traces are not beside the project"
)


@needs_traces
@pytest.mark.parametrize(
    ("name", "num_entries", "last_s"),
    [
        ("mooncake_conversation.jsonl.gz", 12031, 3536.999),
        ("mooncake_synthetic.jsonl.gz", 3993, 1022.025),
        ("azure2023_code.csv.gz", 8819, 3435.948056),
        ("azure2023_conv.csv.gz", 19366, 3501.721937),
    ],
)
def test_published_traces(name: str, num_entries: int, last_s: float) -> None:
    entries = read_trace(_TRACES / name)
    assert len(entries) == num_entries
    *_, last = from_trace(entries, 1.0)
    assert last.offset_s == pytest.approx(last_s)


@needs_traces
def test_published_blocks_repeat_as_their_ids_do() -> None:
    entries = read_trace(_TRACES / "mooncake_conversation.jsonl.gz")[:120]
    render = WordRenderer("1").render
    content_of: dict[int, list[str]] = {}
    repeats = 0
    for entry, conversation in zip(entries, from_trace(entries, 1.0), strict=True):
        words = render(conversation.turns[0].pieces).split()
        assert len(words) == entry.input_tokens
        blocks = [words[begin : begin + 512] for begin in range(0, len(words), 512)]
        for hash_id, block in zip(entry.hash_ids, blocks, strict=True):
            known = content_of.setdefault(hash_id, block)
            shorter = min(len(known), len(block))
            assert known[:shorter] == block[:shorter]
            repeats += known is not block
    assert repeats == sum(len(entry.hash_ids) for entry in entries) - len(content_of)
    assert repeats > 100
    distinct = {tuple(block) for block in content_of.values() if len(block) == 512}
    assert len(distinct) == sum(len(block) == 512 for block in content_of.values())
    assert all(a != b for a, b in itertools.pairwise(distinct))
