"""YAML as plain values that know their lines.

Invariant: a scalar means what YAML 1.2 says (`yes`, `1:30` and dates are text), every
value's line is kept under its path, and nothing but plain data is ever built.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

_MAX_NODES = 100_000
"""Aliases may repeat a part; a file that unfolds to more than this is a mistake or an attack."""
_MAX_DEPTH = 32
_MAX_NUMBER = 64
"""Characters; anything longer is text."""
_PREFIX = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class _Dumper(yaml.SafeDumper):
    """Quotes also what YAML 1.2 alone would take for a number."""


_Dumper.add_implicit_resolver(f"{_PREFIX}float", re.compile(f"^(?:{_FLOAT.pattern})$"), None)
_Dumper.add_implicit_resolver(f"{_PREFIX}int", re.compile(f"^(?:{_INT.pattern})$"), None)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    file: str
    line: int
    """From 1; 0 where the whole file is meant."""
    path: str
    """Of the key in the tree, such as `models[0].engine.cache`; empty at the root."""
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


@dataclass
class Source:
    """A parsed file: its value, the line of every path in it, what was wrong with it as YAML."""

    file: str
    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    num_nodes: int = 0

    def line_of(self, path: Path) -> int:
        """Of the path itself, or of the nearest part above it that the file holds."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def report(self, path: Path, message: str, line: int | None = None) -> None:
        """Adds a problem; its line is that of the path unless given."""
        line = self.line_of(path) if line is None else line
        self.problems.append(Problem(self.file, line, path_text(path), message))


def path_text(path: Path) -> str:
    """`("models", 0, "name")` as `models[0].name`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".")


def parse(text: str, file: str) -> Source:
    """Never raises: what is wrong is among the result's problems."""
    source = Source(file)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            source.value = _build(source, node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        source.report((), f"not valid YAML: {message}", mark.line + 1 if mark else 0)
    except yaml.YAMLError as error:
        source.report((), f"not valid YAML: {str(error).splitlines()[0]}", 0)
    except RecursionError:
        source.report((), "nested too deeply", 0)
    return source


def dump(value: Any) -> str:
    """Text that `parse` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _build(source: Source, node: yaml.Node, path: Path) -> Any:
    line = node.start_mark.line + 1
    source.lines.setdefault(path, line)
    source.num_nodes += 1
    if len(path) > _MAX_DEPTH:
        raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=node.start_mark)
    if source.num_nodes > _MAX_NODES:
        problem = f"unfolds to more than {_MAX_NODES} values"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_PREFIX}seq":
        return [_build(source, each, (*path, index)) for index, each in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_PREFIX}map":
        return _mapping(source, node, path)
    if isinstance(node, yaml.ScalarNode) and node.tag.startswith(_PREFIX):
        return _scalar(node)
    source.report(path, f"the tag {node.tag} is not understood", line)
    return None


def _mapping(source: Source, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if key_node.tag == f"{_PREFIX}merge":
            source.report(path, "merge keys (<<) are not read; write the keys out", line)
        elif not isinstance(key, str):
            source.report(path, "a key must be text (put quotes around it)", line)
        elif key in mapping:
            first = source.lines[(*path, key)]
            source.report((*path, key), f"given twice (first on line {first})", line)
        else:
            source.lines[(*path, key)] = line
            mapping[key] = _build(source, value_node, (*path, key))
    return mapping


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.style is not None or len(text) > _MAX_NUMBER:
        return text
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text, 0 if text[:2] in ("0x", "0o") else 10)
    return float(text) if _FLOAT.fullmatch(text) else text
