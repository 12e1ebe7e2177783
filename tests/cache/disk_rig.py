"""A small folder of blocks, and what tests of it ask: what is in it is a function of its number."""

import random
from pathlib import Path

from cache.disk import DiskFolder

BLOCK_BYTES = 100
FILE_BYTES = 132
SECRET = b"s" * 32


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def data_of(key: bytes) -> memoryview:
    return memoryview(random.Random(key).randbytes(BLOCK_BYTES))


def folder_in(
    root: Path, num_blocks: int = 80, layout: str = "tiny bf16 16", secret: bytes = SECRET
) -> DiskFolder:
    return DiskFolder(root, layout, secret, BLOCK_BYTES, num_blocks * FILE_BYTES)


def store(folder: DiskFolder, *numbers: int) -> None:
    for number in numbers:
        assert folder.write(key_of(number), data_of(key_of(number)))


def has(folder: DiskFolder, number: int) -> bool:
    """Whether a read hits; if so, it must be exact."""
    into = bytearray(BLOCK_BYTES)
    hit = folder.read(key_of(number), memoryview(into))
    assert not hit or into == data_of(key_of(number))
    return hit


def block_files(root: Path) -> list[Path]:
    """All that is on the disk but locks, oldest generation first."""
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name != "lock")


def file_of(root: Path, number: int) -> Path:
    [path] = root.rglob(key_of(number).hex())
    return path
