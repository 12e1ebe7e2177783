"""Sizes and durations: what is read, what is written, and that both agree."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from configs.units import (
    ByteSize,
    Duration,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 << 30),
        ("8 MiB", 8 << 20),
        ("8mib", 8 << 20),
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("1e3", 1000),
        ("12B", 12),
        (4096, 4096),
        (4096.0, 4096),
    ],
)
def test_bytes_read(text, size):
    assert parse_bytes(text) == size
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10m", 600), ("1.5s", 1.5), ("250ms", 0.25), ("20us", 2e-5), ("2h", 7200), ("1d", 86400)],
)
def test_durations_read(text, seconds):
    assert parse_duration(text) == seconds
    assert isinstance(parse_duration(text), float)


@pytest.mark.parametrize(
    "value", ["", "GiB", "64G", "-1MiB", "1 2MiB", "0.3B", 0.5, True, None, [], "1" * 70, "inf"]
)
def test_what_is_no_size(value):
    with pytest.raises(ValueError, match=r"unit|whole"):
        parse_bytes(value)


@pytest.mark.parametrize(
    "value", ["", "m", "10 M", "1h30m", "-1s", True, None, "nan", float("inf"), "9e999s"]
)
def test_what_is_no_duration(value):
    with pytest.raises(ValueError, match=r"unit|finite"):
        parse_duration(value)


def test_written_with_the_unit_that_says_it_best():
    assert format_bytes(1 << 30) == "1GiB"
    assert format_bytes(1536 << 20) == "1536MiB"
    assert format_bytes(1000) == 1000
    assert format_duration(600.0) == "10m"
    assert format_duration(90.0) == "90s"
    assert format_duration(1.5) == "1.5s"
    assert format_duration(0.25) == "250ms"
    assert format_duration(0.0) == 0


@given(st.integers(0, 1 << 50))
@example(1 << 40)
def test_a_size_survives_being_written(size):
    assert parse_bytes(format_bytes(size)) == size


@given(st.floats(0, 1e9))
@example(5e-324)
@example(1 / 3)
@example(0.1 + 0.2)
def test_a_duration_survives_being_written(seconds):
    assert parse_duration(format_duration(seconds)) == seconds


def test_as_field_types():
    class Both(BaseModel):
        size: ByteSize
        time: Duration | None = None

    both = Both.model_validate({"size": "8MiB", "time": "10m"})
    assert both.size == 8 << 20
    assert both.time == 600.0
    assert both.model_dump() == {"size": 8 << 20, "time": 600.0}
    assert both.model_dump(context={"units": True}) == {"size": "8MiB", "time": "10m"}
    assert Both.model_validate_json(both.model_dump_json()) == both
    with pytest.raises(ValidationError, match="unknown unit 'G'; one of B, KiB"):
        Both.model_validate({"size": "64G"})
