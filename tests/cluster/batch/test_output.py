"""The output: cut anywhere, a resumed run has every row exactly once."""

import asyncio
import contextlib
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.batch import output as outputs
from cluster.batch.capacity import ReadyReport
from cluster.batch.index import RowIndex, key_of_custom_id
from cluster.batch.intake import pending
from cluster.batch.output import OutputError, OutputFile
from cluster.batch.records import Answer, NoAnswer, Outcome, line_of, may_be_cut, read
from cluster.batch.report import Tally
from cluster.batch.retry import RetryPolicy
from cluster.batch.rows import Row
from cluster.batch.runner import Limits, Runner
from tests.cluster.batch.conftest import ids_of, lines_of, row

_KINDS = {
    "good": lambda number: row(f"good-{number}"),
    "refused": lambda number: row(f"refused-{number}"),
    "unanswered": lambda number: row(f"unanswered-{number}"),
    "garbage": lambda number: f"garbage {number}\n",
    "same garbage": lambda number: "{\n",
    "nameless": lambda number: row(None, "x"),
    "wrong url": lambda number: row(f"wrong-{number}", url="/"),
    "duplicate": lambda number: row("duplicate"),
    "blank": lambda number: "\n",
    "é": lambda number: row(f"é\n{number}"),
}


class _FakeServer:
    """In memory; remembers which rows it was asked."""

    url = "memory"

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def ready(self) -> ReadyReport | None:
        return None

    async def send(self, row: Row) -> Outcome:
        self.asked[row.custom_id] += 1
        if row.custom_id.startswith("unanswered"):
            return NoAnswer("timeout", "no answer in time")
        status = 400 if row.custom_id.startswith("refused") else 200
        return Answer(status, "r", json.dumps({"text": row.custom_id}).encode())


def _run(source: Path, target: Path, retry_failed: bool = False) -> tuple[Tally, _FakeServer]:
    tally, index, server = Tally(), RowIndex(), _FakeServer()

    async def run(output: OutputFile) -> None:
        limits = Limits(4, 1.0, RetryPolicy(num_retries=0))
        with open(source, "rb") as file:
            await Runner(server, output, tally, limits).run(pending(file, index, tally, None))

    with contextlib.closing(OutputFile.open(target, index, retry_failed)) as output:
        asyncio.run(run(output))
    return tally, server


def _identities(path: Path) -> Counter[str]:
    return Counter(line["id"] for line in lines_of(path))


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(_KINDS)), min_size=1, max_size=12),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    zeros=st.integers(0, 9),
)
def test_cut_anywhere_a_resumed_run_has_every_row_once(
    kinds: list[str], cuts: list[float], zeros: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in"), Path(folder, "out")
        lines = [_KINDS[kind](number) for number, kind in enumerate(kinds)]
        source.write_text("".join(lines))
        num_rows = sum(line != "\n" for line in lines)
        first, _ = _run(source, target)
        expected = _identities(target)
        assert set(expected.values()) <= {1}
        assert (first.rows, expected.total()) == (num_rows, num_rows)
        for cut in cuts:
            data = target.read_bytes()
            kept = data[: round(cut * len(data))]
            target.write_bytes(kept + bytes(zeros))
            tally, server = _run(source, target)
            assert _identities(target) == expected
            assert tally.skipped == kept.count(b"\n")
            # What was whole is as it was, and was not asked again.
            whole = kept[: kept.rfind(b"\n") + 1]
            assert target.read_bytes().startswith(whole)
            recorded = {json.loads(line)["custom_id"] for line in whole.splitlines()}
            assert not recorded & server.asked.keys()
            assert set(server.asked.values()) <= {1}
        assert (tally.failed + tally.failed_before) == first.failed


def test_errors_are_run_again_when_asked(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(row("good-1") + row("unanswered-1") + "garbage\n" + row("refused-1"))
    tally, _ = _run(source, target)
    assert (tally.succeeded, tally.failed) == (1, 3)
    tally, server = _run(source, target)
    assert (tally.skipped, tally.failed_before, server.asked.total()) == (4, 3, 0)
    target.chmod(0o640)
    source.write_text(row("good-1") + row("unanswered-1") + row("mended") + row("refused-1"))
    tally, server = _run(source, target, retry_failed=True)
    assert server.asked == {"unanswered-1": 1, "mended": 1, "refused-1": 1}
    assert (tally.skipped, tally.succeeded, tally.failed) == (1, 1, 2)
    assert ids_of(target) == {"good-1": 1, "unanswered-1": 1, "mended": 1, "refused-1": 1}
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_killed_while_errors_are_taken_out_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(row("good-1") + row("unanswered-1"))
    _run(source, target)
    before = target.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outputs.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            OutputFile.open(target, RowIndex(), retry_failed=True)
    assert target.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3
    _run(source, target)
    assert len(list(tmp_path.iterdir())) == 2


def test_one_run_at_a_time_also_while_errors_are_taken_out(tmp_path: Path) -> None:
    target = tmp_path / "out"
    bad = Row(1, key_of_custom_id("a"), "a", "/", None, b"{}")
    target.write_bytes(line_of(bad, NoAnswer("timeout", "")))
    (tmp_path / "link").symlink_to(target)
    with contextlib.closing(OutputFile.open(target, RowIndex(), retry_failed=True)):
        assert target.read_bytes() == b""
        for name in ("out", "link"):
            with pytest.raises(OutputError, match="being written by another"):
                OutputFile.open(tmp_path / name, RowIndex())
    OutputFile.open(target, RowIndex()).close()


@pytest.mark.parametrize(
    "text", ["precious", "precious\n", '{"a": 1}\n', '{"id":"batch_req_1"}\nmore\n']
)
def test_a_file_that_is_no_output_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    target = tmp_path / "out"
    target.write_text(text)
    with pytest.raises(OutputError, match=r"no output of shoal batch \(line 1\)"):
        OutputFile.open(target, RowIndex())
    assert target.read_text() == text


def test_what_cannot_be_an_output(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="Is a directory"):
        OutputFile.open(tmp_path, RowIndex())
    with pytest.raises(OutputError, match="No such file or directory"):
        OutputFile.open(tmp_path / "none" / "out", RowIndex())
    with pytest.raises(OutputError, match="must be a file"):
        OutputFile.open(Path("/dev/null"), RowIndex())


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    whole_write = os.write

    def half(descriptor: int, data: bytes) -> int:
        return whole_write(descriptor, data[: len(data) // 2])

    with contextlib.closing(OutputFile.open(target, RowIndex())) as output:
        output.append(b"first\n")
        with monkeypatch.context() as patch:
            patch.setattr(outputs.os, "write", half)
            with pytest.raises(OutputError, match="no space left"):
                output.append(b"second\n")
        assert target.read_bytes() == b"first\n"


def test_openai_output_lines() -> None:
    key = key_of_custom_id("a")
    good = Row(3, key, "a", "/", None, b"{}")
    written = line_of(good, Answer(404, "r1", b'{"error":{"code":1.50}}'))
    assert json.loads(written) == {
        "id": f"batch_req_{key.hex()}",
        "custom_id": "a",
        "response": {"status_code": 404, "request_id": "r1", "body": {"error": {"code": 1.5}}},
        "error": None,
    }
    assert b"1.50" in written
    record = read(written)
    assert record is not None
    assert (record.key, record.failed) == (key, True)
    assert json.loads(line_of(good, NoAnswer("timeout", "late")))["error"] == {
        "code": "timeout",
        "message": "late",
    }
    assert all(may_be_cut(written[:end]) for end in range(len(written)))
    assert not any(read(written[:end]) for end in range(len(written)))
