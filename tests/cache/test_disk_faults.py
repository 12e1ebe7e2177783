"""Whatever happens to a folder's files or calls of the system: a miss, and never other bytes."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.disk import DiskFolder, DiskUnusable
from tests.cache.disk_rig import (
    FILE_BYTES,
    block_files,
    data_of,
    file_of,
    folder_in,
    has,
    key_of,
    store,
)


def flip(content: bytes, position: int) -> bytes:
    if position >= len(content):
        return content + b"x"
    return content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :]


DAMAGES = st.one_of(
    st.integers(0, FILE_BYTES - 1).map(lambda at: lambda content: flip(content, at)),
    st.integers(0, FILE_BYTES - 1).map(lambda size: lambda content: content[:size]),
    st.binary(min_size=1, max_size=5).map(lambda more: lambda content: content + more),
    st.binary(max_size=2 * FILE_BYTES).map(lambda other: lambda content: other),
)


@given(DAMAGES)
def test_a_damaged_file_is_a_miss_and_goes(damage: Callable[[bytes], bytes]) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = folder_in(Path(root))
        store(folder, 1, 2)
        path = file_of(Path(root), 1)
        path.write_bytes(damage(path.read_bytes()))
        assert not has(folder, 1)
        assert not path.exists()
        assert (folder.num_corrupt, folder.num_missed, folder.num_files) == (1, 1, 1)
        assert has(folder, 2)
        store(folder, 1)
        assert has(folder, 1)
        folder.check_integrity()
        folder.close()


def test_every_byte_of_a_file_counts(folder: DiskFolder, tmp_path: Path) -> None:
    for position in range(FILE_BYTES):
        store(folder, 1)
        path = file_of(tmp_path, 1)
        path.write_bytes(flip(path.read_bytes(), position))
        assert not has(folder, 1)
    assert folder.num_corrupt == FILE_BYTES


def test_files_with_their_names_swapped_are_misses(folder: DiskFolder, tmp_path: Path) -> None:
    store(folder, 1, 2)
    one, two = file_of(tmp_path, 1), file_of(tmp_path, 2)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert not has(folder, 1)
    assert not has(folder, 2)
    assert block_files(tmp_path) == []


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_a_miss(
    folder: DiskFolder, tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    store(folder, 1)
    path = file_of(tmp_path, 1)
    path.unlink()
    plant(path)
    assert not has(folder, 1)
    assert folder.num_failed > 0


def test_what_was_deleted_behind_its_back_is_written_again(
    folder: DiskFolder, tmp_path: Path
) -> None:
    store(folder, 1)
    file_of(tmp_path, 1).unlink()
    store(folder, 1)
    assert has(folder, 1)


def fail_with(code: int) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("call", ["open", "writev", "replace", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_write_that_fails_is_counted(
    folder: DiskFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail_with(code))
        assert not folder.write(key_of(1), data_of(key_of(1)))
    assert (folder.num_failed, folder.num_written, folder.num_files) == (1, 0, 0)
    assert block_files(tmp_path) == []
    store(folder, 1)
    assert has(folder, 1)


def test_a_write_cut_short_is_counted(
    folder: DiskFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda file, buffers: os.write(file, buffers[0]))
        assert not folder.write(key_of(1), data_of(key_of(1)))
    assert folder.num_failed == 1
    assert block_files(tmp_path) == []


def test_a_disk_too_full_for_a_generation_still_gets_room(
    folder: DiskFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(folder, *range(80))
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", fail_with(errno.ENOSPC))
        assert not folder.write(key_of(80), data_of(key_of(80)))
    assert len(block_files(tmp_path)) == 70


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_read_that_fails_is_a_miss_and_counted(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail_with(errno.EIO))
        assert not has(folder, 1)
    assert folder.num_failed > 0
    assert has(folder, 1), "an error of the disk says nothing about the file"


def test_an_unusable_folder_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fail_with(errno.EIO))
        with pytest.raises(DiskUnusable, match="Input/output error"):
            folder_in(tmp_path)
    assert folder_in(tmp_path).path.name == "0"


def test_a_move_that_fails_is_still_a_hit(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(folder, *range(40))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_with(errno.EIO))
        assert has(folder, 0)
    assert folder.num_files == 40
    folder.check_integrity()


def test_a_folder_that_is_gone_is_misses(folder: DiskFolder, tmp_path: Path) -> None:
    store(folder, *range(80))
    shutil.rmtree(folder.path)
    for number in range(100):
        assert not has(folder, number)
        assert not folder.write(key_of(number), data_of(key_of(number)))
    folder.close()


def test_a_block_that_moves_during_a_read_is_found(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(folder, *range(41))
    real_open = os.open
    moved: list[str] = []

    def open_late(path: str, *rest: int) -> int:
        # Another reader gets there first, once.
        if path.endswith(key_of(0).hex()) and not moved:
            moved.append(path)
            assert has(folder, 0)
        return real_open(path, *rest)

    monkeypatch.setattr(os, "open", open_late)
    assert has(folder, 0)
    assert moved
    assert (folder.num_read, folder.num_missed, folder.num_failed) == (2, 0, 0)


class DiskMachine(RuleBasedStateMachine):
    """Three blocks a generation, so that all is dropped and moved all the time."""

    numbers = st.integers(0, 59)

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.num_blocks = 24
        self.folder = folder_in(self.root, self.num_blocks)
        self.stored: set[int] = set()
        self.spoiled: set[str] = set()

    @rule(number=numbers)
    def write(self, number: int) -> None:
        store(self.folder, number)
        self.stored.add(number)
        name = key_of(number).hex()
        if not has(self.folder, number):
            # A file that is there is taken to be sound, until a read has seen it.
            assert name in self.spoiled
            store(self.folder, number)
            assert has(self.folder, number)
        self.spoiled.discard(name)

    @rule(first=numbers)
    def write_many(self, first: int) -> None:
        for number in range(first, min(first + 6, 60)):
            self.write(number)

    @rule(number=numbers)
    def read(self, number: int) -> None:
        if has(self.folder, number):
            assert number in self.stored
            assert key_of(number) in self.folder

    @rule(pick=st.integers(0), damage=DAMAGES)
    def spoil(self, pick: int, damage: Callable[[bytes], bytes]) -> None:
        if files := block_files(self.root):
            path = files[pick % len(files)]
            path.write_bytes(damage(path.read_bytes()))
            self.spoiled.add(path.name)

    @rule(pick=st.integers(0))
    def lose(self, pick: int) -> None:
        if files := block_files(self.root):
            files[pick % len(files)].unlink()

    @rule(num_blocks=st.sampled_from([8, 24, 50]))
    def restart(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.folder.close()
        self.folder = folder_in(self.root, num_blocks)

    @precondition(lambda self: self.stored)
    @rule()
    def start_beside(self) -> None:
        beside = folder_in(self.root)
        assert not any(has(beside, number) for number in self.stored)
        beside.close()

    @invariant()
    def what_is_there_is_never_denied(self) -> None:
        self.folder.check_integrity()
        files = block_files(self.root)
        assert all(bytes.fromhex(path.name) in self.folder for path in files)
        assert len(files) <= self.num_blocks

    def teardown(self) -> None:
        self.folder.close()
        shutil.rmtree(self.root)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=20, stateful_step_count=25)
