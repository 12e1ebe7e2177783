"""The tree seen as paths: every field of it, and what differs between two of them.

Invariant: a path names one field (`models[].engine.cache.block_size` in the schema,
`models[chat].engine.cache.block_size` in a configuration); models go by name, so their order is
nobody's change.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from configs.section import Change, Section
from configs.shoal import ModelConfig, ShoalConfig
from configs.units import Unit


@dataclass(frozen=True, slots=True)
class Leaf:
    """One field that holds a value, not a section."""

    path: str
    section: type[Section]
    name: str
    info: FieldInfo

    @property
    def change(self) -> Change:
        extra = self.info.json_schema_extra
        mark = extra.get("change") if isinstance(extra, dict) else None
        assert mark in ("live", "restart"), f"{self.path} is marked neither live nor restart"
        return "live" if mark == "live" else "restart"

    @property
    def unit(self) -> Unit | None:
        """Bytes or seconds, where the field takes text with a unit."""
        return unit_of(self.info)


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field that differs, or a model that came (`old` is None) or went (`new` is None)."""

    path: str
    old: Any
    new: Any
    change: Change


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field of this type holds, alone or in a list; None for a value."""
    if get_origin(annotation) is list:
        annotation = get_args(annotation)[0]
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else None


def unit_of(info: FieldInfo) -> Unit | None:
    pending: list[Any] = [*info.metadata, info.annotation]
    while pending:
        each = pending.pop()
        if isinstance(each, Unit):
            return each
        pending += get_args(each)
    return None


def leaves(section: type[Section] = ShoalConfig, prefix: str = "") -> Iterator[Leaf]:
    """Every field below `section`, in order."""
    for name, info in section.model_fields.items():
        below = section_of(info.annotation)
        if below is None:
            yield Leaf(prefix + name, section, name, info)
        else:
            in_list = "[]" if get_origin(info.annotation) is list else ""
            yield from leaves(below, f"{prefix}{name}{in_list}.")


def flatten(config: Section, prefix: str = "") -> dict[str, tuple[Any, Change]]:
    """Path of each field of a configuration, its value and its mark."""
    flat: dict[str, tuple[Any, Change]] = {}
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Section):
            flat |= flatten(value, f"{prefix}{name}.")
        elif section_of(info.annotation) is not None:
            for each in value:
                flat |= flatten(each, f"{prefix}{name}[{each.name}].")
        else:
            path = prefix + name
            flat[path] = (value, Leaf(path, type(config), name, info).change)
    return flat


def diff(old: ShoalConfig, new: ShoalConfig) -> list[FieldChange]:
    """What must change to get from `old` to `new`: models that went and came, then fields."""
    old_models = {model.name: model for model in old.models}
    new_models = {model.name: model for model in new.models}
    went = [name for name in old_models if name not in new_models]
    came = [name for name in new_models if name not in old_models]
    changes = [FieldChange(f"models[{name}]", old_models[name], None, "live") for name in went]
    changes += [FieldChange(f"models[{name}]", None, new_models[name], "live") for name in came]
    old_flat, new_flat = flatten(old), flatten(new)
    changes += [
        FieldChange(path, old_flat[path][0], value, change)
        for path, (value, change) in new_flat.items()
        if path in old_flat and old_flat[path][0] != value
    ]
    return changes


def part(section: Section, change: Change) -> dict[str, Any]:
    """The fields of `section` with this mark, as JSON of the same shape; a part of it that has none
    is left out. `joined` puts the two parts together again."""
    dumped = section.model_dump(mode="json")
    parts: dict[str, Any] = {}
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            if below := part(value, change):
                parts[name] = below
        elif Leaf(name, type(section), name, info).change == change:
            parts[name] = dumped[name]
    return parts


def joined(identity: dict[str, Any], live: dict[str, Any]) -> ModelConfig:
    """The model of which these are the two parts; what neither has is at its default."""
    return ModelConfig.model_validate(_merged(identity, live))


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {**one, **other}
    for name in one.keys() & other.keys():
        if isinstance(one[name], dict) and isinstance(other[name], dict):
            both[name] = _merged(one[name], other[name])
    return both
