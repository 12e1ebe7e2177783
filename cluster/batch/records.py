"""The lines of a batch output: OpenAI's batch output lines, written and read again.

Invariant: what `read` says of a line is what was written, and a line that was cut anywhere is not
taken for a whole one. A row that got an HTTP answer has `response` and a null `error`, whatever
the status; one that got none has an `error` and a null `response`. Pure.
"""

from dataclasses import dataclass

import msgspec

from cluster.batch.index import key_of_custom_id, key_of_line
from cluster.batch.rows import BadRow, Row

MAX_ANSWER_BYTES = 64 << 20
"""Of one body."""
_FIRST_BAD_STATUS = 300
_ID = "batch_req_"
_LINE_ID = f"{_ID}line_"
_OPENING = b'{"id":"batch_req_'
"""How every line begins, so that a cut one is told from a line of another file."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer."""

    status: int
    request_id: str
    body: bytes
    """JSON, on one line."""
    retry_after_s: float | None = None

    @property
    def is_success(self) -> bool:
        return self.status < _FIRST_BAD_STATUS


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why there is none."""

    code: str
    message: str
    was_sent: bool = True
    """False when there was not even a connection: the server knows nothing of the request."""


Outcome = Answer | NoAnswer


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str


class _Written(msgspec.Struct, frozen=True):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


class _ReadResponse(msgspec.Struct, frozen=True):
    status_code: int


class _ReadBack(msgspec.Struct, frozen=True):
    """As little of a line as is needed."""

    id: str
    custom_id: str | None
    response: _ReadResponse | None
    error: dict[str, msgspec.Raw] | None


@dataclass(frozen=True, slots=True)
class Record:
    """What an output line says of its row."""

    key: bytes
    failed: bool


def line_of(row: Row | BadRow, outcome: Outcome) -> bytes:
    """One line with its end."""
    name = f"{_LINE_ID}{row.line}" if row.custom_id is None else f"{_ID}{row.key.hex()}"
    response = error = None
    match outcome:
        case Answer(status=status, request_id=request_id, body=body):
            response = _Response(status, request_id, msgspec.Raw(body))
        case NoAnswer(code=code, message=message):
            error = _Error(code, message)
    return msgspec.json.encode(_Written(name, row.custom_id, response, error)) + b"\n"


def read(line: bytes) -> Record | None:
    """None for what is no whole output line; one without its end is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        written = msgspec.json.decode(line, type=_ReadBack)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    number = written.id.removeprefix(_LINE_ID)
    if written.custom_id is not None:
        key = key_of_custom_id(written.custom_id)
    elif number != written.id and number.isascii() and number.isdigit():
        key = key_of_line(int(number))
    else:
        return None
    if written.response is None:
        return Record(key, failed=True) if written.error is not None else None
    failed = written.error is not None or written.response.status_code >= _FIRST_BAD_STATUS
    return Record(key, failed)


def may_be_cut(data: bytes) -> bool:
    """Whether the end of a file can be what is left of a line whose writing was broken off. After a
    power failure, zeros can stand where data was to be."""
    written = data.rstrip(b"\0")
    return written.startswith(_OPENING) or _OPENING.startswith(written)
