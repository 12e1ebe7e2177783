"""What of an input is a row that can be sent, and what is said of the others."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.batch.index import RowIndex, Standing, key_of_custom_id, key_of_line
from cluster.batch.rows import BadRow, Line, Row, met, parse, read_lines
from tests.cluster.batch.conftest import row


def _parse(text: str | bytes, number: int = 7, model: str | None = None) -> Row | BadRow:
    return parse(Line(number, text.encode() if isinstance(text, str) else text), model)


def test_a_body_is_passed_on_byte_for_byte() -> None:
    body = '{"model": "m", "prompt": "é", "seed": 12345678901234567890123, "top_p": 1.0}'
    head = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "extra": 1, "body": '
    text = f"{head}{body}}}"
    assert _parse(text, model="other") == Row(
        7, key_of_custom_id("a"), "a", "/v1/completions", "m", body.encode()
    )


@pytest.mark.parametrize("given_model", [{}, {"model": None}])
def test_a_model_is_for_rows_that_name_none(given_model: dict[str, None]) -> None:
    parsed = _parse(row("a", body={**given_model, "prompt": "x"}), model="m2")
    assert isinstance(parsed, Row)
    assert parsed.model == "m2"
    assert json.loads(parsed.body) == {"model": "m2", "prompt": "x"}


@pytest.mark.parametrize(
    ("text", "code", "custom_id"),
    [
        ("{", "invalid_json", None),
        ("[]", "invalid_json", None),
        (b'{"custom_id": "\xff"}', "invalid_json", None),
        ("[" * 100_000, "invalid_json", None),
        (row(None), "missing_custom_id", None),
        (row(17), "invalid_custom_id", None),
        (row(10**40), "invalid_custom_id", None),
        (row(""), "invalid_custom_id", None),
        (row("a", method="GET"), "invalid_method", "a"),
        (row("a", method=None), "invalid_method", "a"),
        (row("a", url="/v1/embeddings"), "invalid_url", "a"),
        (row("a", url=["x"]), "invalid_url", "a"),
        (row("a", body=None), "invalid_body", "a"),
        (row("a", body=[1]), "invalid_body", "a"),
        (row("a", body={"stream": True}), "invalid_stream", "a"),
    ],
)
def test_a_bad_row_says_why_and_where(text: str | bytes, code: str, custom_id: str | None) -> None:
    parsed = _parse(text)
    assert isinstance(parsed, BadRow)
    assert (parsed.code, parsed.custom_id) == (code, custom_id)
    assert parsed.message.startswith("line 7: ")
    assert len(parsed.message) < 400
    assert parsed.key == (key_of_line(7) if custom_id is None else key_of_custom_id(custom_id))


def test_a_second_row_of_an_id_is_known_by_its_line() -> None:
    index = RowIndex()
    first, standing = met(_parse(row("a"), 1), index)
    assert (first.custom_id, standing) == ("a", Standing.NEW)
    second, standing = met(_parse(row("a"), 2), index)
    assert isinstance(second, BadRow)
    assert (second.code, second.custom_id, standing) == (
        "duplicate_custom_id",
        None,
        Standing.NEW,
    )
    assert second.key == key_of_line(2)
    assert "'a'" in second.message


def test_lines_are_bounded_and_blank_ones_are_none() -> None:
    text = b"\xef\xbb\xbfone\r\n\n  \nabcdefgh\nabcdefghi\n" + b"x" * 3_000_000 + b"\nlast"
    lines = list(read_lines(io.BytesIO(text), max_bytes=8))
    assert lines == [
        Line(1, b"one\r"),
        Line(4, b"abcdefgh"),
        Line(5, None),
        Line(6, None),
        Line(7, b"last"),
    ]
    parsed = parse(lines[2])
    assert isinstance(parsed, BadRow)
    assert parsed.code == "line_too_long"


@given(st.lists(st.integers(0, 60), max_size=200), st.sets(st.integers(0, 60)))
def test_the_index_is_a_set_of_keys(numbers: list[int], recorded: set[int]) -> None:
    index = RowIndex()
    # Keys of one table, so that they meet in its slots.
    keys = [b"\0" + key_of_line(number)[1:] for number in range(61)]
    for number in recorded:
        index.record(keys[number], failed=number % 2 == 0)
    assert index.num_recorded == len(recorded)
    seen: set[int] = set()
    for number in numbers:
        expected = Standing.NEW
        if number in seen:
            expected = Standing.DUPLICATE
        elif number in recorded:
            expected = Standing.FAILED if number % 2 == 0 else Standing.SUCCEEDED
        assert index.meet(keys[number]) is expected
        seen.add(number)
