"""Sizes and durations that carry their unit.

Invariant: a value is a plain number everywhere in the program (bytes as int, seconds as float);
text with a unit exists at its edges only, and what is written there reads back as the same number.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z]*)")
_MAX_TEXT = 64

_BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BYTES_BY_UNIT = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    **_BINARY_UNITS,
}
_SECONDS_BY_UNIT = {
    "": Decimal(1),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}


def parse_bytes(value: int | float | str) -> int:
    """Bytes of `8MiB`, `1.5 GB` or a plain number. Raises `ValueError` for anything else."""
    if isinstance(value, str):
        number, unit = _quantity(value)
        by_unit = {name.lower(): size for name, size in _BYTES_BY_UNIT.items()}
        if unit.lower() not in by_unit:
            raise ValueError(f"unknown unit {unit!r}; one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB")
        amount: Decimal | float | int = number * by_unit[unit.lower()]
    else:
        amount = _number(value)
    if amount != int(amount):
        raise ValueError("not a whole number of bytes")
    return int(amount)


def parse_duration(value: int | float | str) -> float:
    """Seconds of `10m`, `1.5s`, `250ms` or a plain number. Raises `ValueError` for anything
    else."""
    if not isinstance(value, str):
        return float(_number(value))
    number, unit = _quantity(value)
    if unit not in _SECONDS_BY_UNIT:
        raise ValueError(f"unknown unit {unit!r}; one of us, ms, s, m, h, d")
    return float(_number(float(number * _SECONDS_BY_UNIT[unit])))


def format_bytes(value: int) -> str | int:
    """The largest binary unit that divides the value, else the value itself."""
    for unit, size in reversed(_BINARY_UNITS.items()):
        if value >= size and value % size == 0:
            return f"{value // size}{unit}"
    return value


def format_duration(value: float) -> str | float:
    """A whole number of the largest unit that fits, or seconds with a fraction; where neither says
    the value exactly, the value itself."""
    exact = Decimal(repr(value))
    for unit in ("d", "h", "m", "s", "ms", "us"):
        count, rest = divmod(exact, _SECONDS_BY_UNIT[unit])
        if unit == "s" and exact >= 1 and rest:
            count, rest = exact, Decimal(0)
        text = f"{count:f}{unit}"
        if count >= 1 and not rest and len(text) <= 16 and parse_duration(text) == value:
            return text
    return value


def _quantity(text: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _MAX_TEXT else None
    if match is None:
        raise ValueError("not a number with a unit")
    return Decimal(match[1]), match[2]


def _number(value: int | float) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number with a unit")
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


class Unit:
    """Pydantic metadata: reads text with a unit; writes it where the serialization context has
    `units` set, a plain number elsewhere."""

    def __init__(
        self,
        name: str,
        example: str,
        parse: Callable[[Any], Any],
        format: Callable[[Any], str | int | float],
    ) -> None:
        self.name = name
        """What a plain number counts."""
        self.example = example
        self.parse = parse
        self.format = format

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        number = handler(source)
        return core_schema.no_info_before_validator_function(
            self._validate,
            number,
            json_schema_input_schema=core_schema.union_schema(
                [number, core_schema.str_schema(max_length=_MAX_TEXT)]
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(
                self._serialize, info_arg=True
            ),
        )

    def _validate(self, value: Any) -> Any:
        try:
            return self.parse(value)
        except (ValueError, OverflowError) as error:
            raise PydanticCustomError(
                "unit",
                "{reason} (write it like {example}; a plain number counts {name})",
                {"reason": str(error), "example": self.example, "name": self.name},
            ) from None

    def _serialize(self, value: Any, info: core_schema.SerializationInfo) -> Any:
        context = info.context
        return self.format(value) if isinstance(context, dict) and context.get("units") else value


BYTE_SIZE = Unit("bytes", "64GiB", parse_bytes, format_bytes)
DURATION = Unit("seconds", "10m", parse_duration, format_duration)

ByteSize = Annotated[int, BYTE_SIZE]
"""Bytes; `64GiB`, `8MiB`, `1.5GB`, or a number."""
Duration = Annotated[float, DURATION]
"""Seconds; `10m`, `1.5s`, `250ms`, or a number."""
