"""The tree as a table for people.

Invariant: it is made from the fields themselves, so it says what the code accepts.
"""

from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from configs.tree import Leaf, leaves

_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def field_table() -> str:
    """Markdown: path, default, accepted values, mark and meaning of every field."""
    rows = ["| field | default | accepts | change | meaning |", "|---|---|---|---|---|"]
    for leaf in leaves():
        meaning = (leaf.info.description or "").replace("|", "\\|")
        cells = (f"`{leaf.path}`", _default(leaf), accepts(leaf), leaf.change, meaning)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def accepts(leaf: Leaf) -> str:
    """Type and bounds in words."""
    kind, metadata, is_optional = _parts(leaf)
    if get_origin(kind) is Literal:
        text = ", ".join(f"`{value}`" for value in get_args(kind))
    elif leaf.unit is not None:
        text = "size" if leaf.unit.name == "bytes" else "duration"
    elif get_origin(kind) is dict:
        text = "keys with text"
    elif get_origin(kind) is list:
        text = "list of text"
    else:
        text = _TYPES[kind]
    bounds = [
        f"{sign} {_number(leaf, getattr(each, name))}"
        for each in metadata
        for name, sign in _SIGNS.items()
        if hasattr(each, name)
    ]
    return ", ".join([text, *bounds]) + (" or `null`" if is_optional else "")


def _parts(leaf: Leaf) -> tuple[Any, list[Any], bool]:
    """The type without `None`, what bounds it (on the field or within the type), and whether null
    is accepted."""
    metadata = list(leaf.info.metadata)
    kind: Any = leaf.info.annotation
    is_optional = type(None) in get_args(kind)
    if is_optional:
        kind = next(each for each in get_args(kind) if each is not type(None))
    if hasattr(kind, "__metadata__"):
        for each in kind.__metadata__:
            metadata += getattr(each, "metadata", [each])
        kind = kind.__origin__
    return kind, metadata, is_optional


def _default(leaf: Leaf) -> str:
    default = leaf.info.default
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "`null`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{_number(leaf, default)}`"


def _number(leaf: Leaf, value: Any) -> Any:
    if leaf.unit is not None:
        value = leaf.unit.format(value)
    return f"{value:g}" if isinstance(value, float) else value
