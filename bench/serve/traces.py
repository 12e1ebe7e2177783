"""Request traces as published: Mooncake's JSON lines and Azure's CSV, plain or gzipped.

Invariant: entries come out in order of time, each with at least one token in and out; a line that
is not of its format is refused with its number.

Formats: Mooncake (FAST'25): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`, one for
each block of 512 tokens, equal where the content up to and in the block is equal. Azure LLM
inference: `TIMESTAMP,ContextTokens,GeneratedTokens`.
"""

import gzip
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import msgspec

from engine.errors import ShoalError

BLOCK_TOKENS = 512
_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ShoalError):
    """A file that is no trace of a known format."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace."""

    timestamp_s: float
    """From any origin, the same for the whole trace."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path) -> list[TraceEntry]:
    """Raises `TraceError` with the reason and the line."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == _GZIP_MAGIC
        data = path.read_bytes()
        text = (gzip.decompress(data) if compressed else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None
    try:
        return parse_trace(text.splitlines())
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def parse_trace(lines: Iterable[str]) -> list[TraceEntry]:
    """Tells the format by the first line."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise TraceError("an empty file")
    if first[1].lstrip().startswith("{"):
        entries = _parse_mooncake(itertools.chain([first], numbered))
    elif first[1].strip().split(",") == _AZURE_HEADER:
        entries = _parse_azure(numbered)
    else:
        raise TraceError(
            "neither Mooncake's JSON lines nor Azure's CSV, which begins with "
            f"{','.join(_AZURE_HEADER)!r}"
        )
    return sorted(entries, key=lambda entry: entry.timestamp_s)


def _parse_mooncake(numbered: Iterable[tuple[int, str]]) -> Iterator[TraceEntry]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in numbered:
        try:
            fields = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"line {number}: {error}") from None
        yield _entry(
            number,
            TraceEntry(
                fields.timestamp / 1000,
                fields.input_length,
                fields.output_length,
                tuple(fields.hash_ids),
            ),
        )


def _parse_azure(numbered: Iterable[tuple[int, str]]) -> Iterator[TraceEntry]:
    for number, line in numbered:
        try:
            timestamp, context, generated = line.strip().split(",")
            time_s = (datetime.fromisoformat(timestamp) - datetime(1970, 1, 1)).total_seconds()
            entry = TraceEntry(time_s, int(context), int(generated))
        except (ValueError, TypeError) as error:
            raise TraceError(f"line {number}: {error}") from None
        yield _entry(number, entry)


def _entry(number: int, entry: TraceEntry) -> TraceEntry:
    if entry.input_tokens < 0 or entry.output_tokens < 0:
        raise TraceError(f"line {number}: a negative number of tokens")
    return replace(
        entry,
        input_tokens=max(1, entry.input_tokens),
        output_tokens=max(1, entry.output_tokens),
    )


def capped(
    entries: Iterable[TraceEntry], max_input_tokens: int | None, max_output_tokens: int | None
) -> list[TraceEntry]:
    """Longer requests cut to these lengths; a prompt keeps its beginning, so what is shared at the
    beginning stays shared."""
    return [
        replace(
            entry,
            input_tokens=min(entry.input_tokens, max_input_tokens or entry.input_tokens),
            output_tokens=min(entry.output_tokens, max_output_tokens or entry.output_tokens),
        )
        for entry in entries
    ]
