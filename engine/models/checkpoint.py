"""What the safetensors files of a folder hold, by their headers.

Invariant: no weight is read. With an index, the files are those that it names, and no others.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

Shape = tuple[int, ...]


class CheckpointUnreadable(Exception):
    """A file of the checkpoint is missing, cut short, or not what its name says."""


def read_shapes(folder: Path) -> dict[Path, dict[str, Shape]]:
    """Shapes of tensors by name, by file. Raises `CheckpointUnreadable`."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            listed = json.loads(index.read_text())["weight_map"]
            paths = sorted({folder / str(name) for name in listed.values()})
        else:
            paths = [folder / "model.safetensors"]
        found: dict[Path, dict[str, Shape]] = {}
        for path in paths:
            with open_safetensors(path) as file:
                names = file.keys()
                found[path] = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise CheckpointUnreadable(f"the checkpoint cannot be read: {error}") from error
    return found


def open_safetensors(path: Path) -> Any:
    """A context manager over one file; it checks that the file is as long as its header says."""
    return safe_open(str(path), framework="pt")


def stored_bytes(paths: Iterable[Path]) -> int:
    """Of all tensors as the files hold them: what follows each header, whose length the first 8
    bytes give (https://github.com/huggingface/safetensors#format). The files have been read by
    `read_shapes`."""
    total = 0
    for path in paths:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        total += path.stat().st_size - 8 - header
    return total
