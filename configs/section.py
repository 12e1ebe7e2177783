"""The base of every section of the tree, and how its fields are declared.

Invariant: a field has a description and a mark. `live` may change while what it configures runs;
`restart` takes a new process.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Change = Literal["live", "restart"]


class Section(BaseModel):
    """A part of the tree: immutable, takes no unknown key, and converts no value silently (text is
    no number and true is not 1)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def live(default: Any, description: str, **bounds: Any) -> Any:
    """A field that may change while the cluster serves; `...` as its default makes it required."""
    return Field(default, description=description, json_schema_extra={"change": "live"}, **bounds)


def restart(default: Any, description: str, **bounds: Any) -> Any:
    """A field whose change restarts what it configures."""
    return Field(
        default, description=description, json_schema_extra={"change": "restart"}, **bounds
    )
