"""Reads a configuration: a YAML file, or a preset by its name.

Invariant: a configuration is either valid as a whole or refused with everything that is wrong with
it, each problem with its file, line and path, and with the nearest valid name or the limit.
"""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from configs import yaml_source
from configs.section import Section
from configs.shoal import ShoalConfig, name_clashes
from configs.tree import leaves, section_of, unit_of
from configs.units import Unit
from configs.yaml_source import Path, Problem, Source

_PRESETS = FilePath(__file__).with_name("presets")
_MAX_FILE_BYTES = 1 << 20
_MAX_SHOWN = 80
_LIMITS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_WORDS = (
    ("Input should be", "must be"),
    ("String should", "must"),
    ("List should", "must"),
    ("Dictionary should", "must"),
)


class ConfigError(ValueError):
    """A configuration that cannot be read; its text is one line a problem, fit for the user."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


def preset_names() -> list[str]:
    """Names that `load` takes besides the paths of files."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def load(config: str) -> ShoalConfig:
    """Reads the preset of this name, or else the file at this path. Raises `ConfigError`."""
    is_preset = config in preset_names()
    path = _PRESETS / f"{config}.yaml" if is_preset else FilePath(config)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError([Problem(config, 0, "", f"larger than {_MAX_FILE_BYTES} bytes")])
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError([Problem(config, 0, "", "not UTF-8 text")]) from None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([Problem(config, 0, "", _unreadable(config, error))]) from None
    return parse(text, config)


def parse(text: str, file: str) -> ShoalConfig:
    """Reads a configuration from YAML; `file` is what its problems name. Raises `ConfigError`."""
    source = yaml_source.parse(text, file)
    if not isinstance(source.value, dict):
        if not source.problems:
            source.report((), "the configuration must be keys with values; `models` is required")
        raise ConfigError(source.problems)
    config = None
    try:
        config = ShoalConfig.model_validate(source.value)
    except ValidationError as error:
        _report(source, error)
    if config is None or source.problems:
        raise ConfigError(sorted(source.problems, key=lambda problem: problem.line))
    return config


def dump(config: ShoalConfig) -> str:
    """The whole tree as YAML, defaults written out, sizes and durations with their units;
    `parse` reads it back as an equal configuration."""
    return yaml_source.dump(config.model_dump(mode="json", context={"units": True}))


def _unreadable(config: str, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if "/" in config or config.endswith((".yaml", ".yml")):
        return f"cannot be read: {reason}"
    near = difflib.get_close_matches(config, preset_names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"presets are {', '.join(preset_names())}"
    return f"no such preset, and no such file ({reason}); {hint}"


def _report(source: Source, error: ValidationError) -> None:
    is_name_reported = False
    for each in error.errors(include_url=False):
        loc: Path = tuple(part for part in each["loc"] if part != "[key]")
        is_name_reported = is_name_reported or each["type"] == "conflict"
        source.report(loc, _message(loc, each))
    if not is_name_reported:
        # Pydantic compares names only once everything else is right.
        for loc, _, message in name_clashes(_raw_names(source.value)):
            source.report(loc, message)


def _raw_names(value: dict[str, Any]) -> Iterator[tuple[Any, list[Any]]]:
    models = value.get("models")
    for model in models if isinstance(models, list) else []:
        known = model if isinstance(model, dict) else {}
        aliases = known.get("aliases")
        yield known.get("name"), aliases if isinstance(aliases, list) else []


def _message(loc: Path, error: Any) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(loc)
    if kind == "missing":
        return "is required"
    if kind == "model_type":
        return f"must be a section with keys, got {_shown(value)}"
    if kind == "conflict":
        return str(error["msg"])
    if kind in _LIMITS:
        words, name = _LIMITS[kind]
        unit = _unit_at(loc)
        limit = context[name]
        if unit is not None:
            limit, value = unit.format(limit), unit.format(unit.parse(value))
        return f"must be {words} {limit}, got {value}"
    message = str(error["msg"]).replace(" after validation", "")
    for said, meant in _WORDS:
        message = message.replace(said, meant)
    return f"{message}, got {_shown(value)}"


def _unknown_key(loc: Path) -> str:
    section = _section_at(loc[:-1])
    key = str(loc[-1])
    if section is None:
        return "unknown key"
    meant = key.replace("-", "_").lower()
    here = list(section.model_fields)
    below = [leaf.path for leaf in leaves(section)]
    anywhere = [leaf.path for leaf in leaves()]
    near = (
        [name for name in here if name == meant]
        or [path for path in below if path.rpartition(".")[2] == meant and "[]" not in path]
        or difflib.get_close_matches(meant, here, n=1)
        or [path for path in anywhere if path.rpartition(".")[2] == meant]
    )
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; known here: {', '.join(here)}"


def _section_at(loc: Path) -> type[Section] | None:
    section: type[Section] | None = ShoalConfig
    for part in loc:
        if section is not None and isinstance(part, str):
            info = section.model_fields.get(part)
            section = section_of(info.annotation) if info is not None else None
    return section


def _unit_at(loc: Path) -> Unit | None:
    section = _section_at(loc[:-1])
    info = section.model_fields.get(str(loc[-1])) if section is not None else None
    return unit_of(info) if info is not None else None


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False) if value is not None else "nothing"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
