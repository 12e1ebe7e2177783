"""The rows of a batch input: OpenAI's batch lines, read one at a time.

Invariant: every line that is not blank is one row, good or bad, and a bad one says why and where;
nothing in the input stops a run. No more than one line is held, and no more of a line than
`MAX_LINE_BYTES`. A body is passed on byte for byte, unless it is given a model.
"""

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from cluster.batch.index import RowIndex, Standing, key_of_custom_id, key_of_line

MAX_LINE_BYTES = 8 << 20
URLS = ("/v1/chat/completions", "/v1/completions")
_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20
_MAX_SHOWN_CHARS = 80

_Fields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, without its end."""

    number: int
    """From 1."""
    data: bytes | None
    """None: longer than the limit."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request that can be sent."""

    line: int
    key: bytes
    custom_id: str
    url: str
    model: str | None
    body: bytes


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be sent, whose outcome is its error."""

    line: int
    key: bytes
    custom_id: str | None
    """None: known by its line."""
    code: str
    message: str


class _Unusable(Exception):
    """What is wrong with a row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_lines(file: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Every line that is not blank. A byte order mark before the first is left out."""
    number = 0
    while data := file.readline(max_bytes + 2):
        number += 1
        is_whole = data.endswith(b"\n")
        if number == 1:
            data = data.removeprefix(_BOM)
        data = data.removesuffix(b"\n")
        if len(data) > max_bytes:
            while not is_whole and (rest := file.readline(_SKIP_BYTES)):
                is_whole = rest.endswith(b"\n")
            yield Line(number, None)
        elif not data.isspace() and data:
            yield Line(number, data)


def parse(line: Line, default_model: str | None = None) -> Row | BadRow:
    """`default_model` is for a body that names none."""
    key, custom_id = key_of_line(line.number), None
    try:
        fields = _object(line)
        custom_id = _custom_id(fields)
        key = key_of_custom_id(custom_id)
        url = _url(fields)
        model, body = _body(fields, default_model)
    except _Unusable as error:
        return BadRow(line.number, key, custom_id, error.code, f"line {line.number}: {error}")
    return Row(line.number, key, custom_id, url, model, body)


def met(row: Row | BadRow, index: RowIndex) -> tuple[Row | BadRow, Standing]:
    """The row and what is known of it; a second row of a `custom_id` is a bad row."""
    standing = index.meet(row.key)
    if standing is not Standing.DUPLICATE:
        return row, standing
    message = f"line {row.line}: an earlier row has the custom_id {_shown(row.custom_id)}"
    row = BadRow(row.line, key_of_line(row.line), None, "duplicate_custom_id", message)
    return row, index.meet(row.key)


def _object(line: Line) -> _Fields:
    if line.data is None:
        raise _Unusable("line_too_long", f"at most {MAX_LINE_BYTES:,} bytes, and this one has more")
    try:
        line.data.decode()
        return msgspec.json.decode(line.data, type=_Fields)
    except msgspec.ValidationError as error:
        raise _Unusable("invalid_json", f"not a JSON object: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Unusable("invalid_json", f"not JSON: {error}") from None


def _custom_id(fields: _Fields) -> str:
    custom_id = _value(fields, "custom_id")
    if custom_id is None:
        raise _Unusable("missing_custom_id", "custom_id: this field is required")
    if not isinstance(custom_id, str) or not custom_id:
        got = _shown(custom_id)
        raise _Unusable("invalid_custom_id", f"custom_id: a string that is not empty, got {got}")
    return custom_id


def _url(fields: _Fields) -> str:
    method, url = _value(fields, "method"), _value(fields, "url")
    if method != "POST":
        raise _Unusable("invalid_method", f'method: "POST" is served, got {_shown(method)}')
    if url not in URLS:
        raise _Unusable("invalid_url", f"url: one of {', '.join(URLS)}, got {_shown(url)}")
    assert isinstance(url, str)
    return url


def _body(fields: _Fields, default_model: str | None) -> tuple[str | None, bytes]:
    raw = fields.get("body", msgspec.Raw(b"null"))
    try:
        body = msgspec.json.decode(raw, type=_Fields)
    except (msgspec.DecodeError, RecursionError):
        raise _Unusable("invalid_body", "body: a JSON object is required") from None
    if _value(body, "stream"):
        raise _Unusable("invalid_stream", "body.stream: an answer in a file cannot be streamed")
    model = _value(body, "model")
    if model is None and default_model is not None:
        body["model"] = msgspec.Raw(msgspec.json.encode(default_model))
        return default_model, msgspec.json.encode(body)
    # A model that is no text is for the server to refuse.
    return model if isinstance(model, str) else None, bytes(raw)


def _value(fields: _Fields, name: str) -> Any:
    """None without it, or if it is nothing that can be read."""
    raw = fields.get(name)
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _shown(value: object) -> str:
    """A value can be as large as a line: no more of it is rendered than is shown."""
    shorten = reprlib.Repr()
    shorten.maxstring = shorten.maxlong = _MAX_SHOWN_CHARS
    return shorten.repr(value)
