"""What a folder gives back is what was stored in it, whatever happens to its files."""

import errno
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.disk import DiskFolder, DiskUnusable

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


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DiskFolder]:
    folder = folder_in(tmp_path)
    yield folder
    folder.close()


def test_a_block_comes_back_as_it_was(folder: DiskFolder) -> None:
    assert key_of(1) not in folder
    assert not has(folder, 1)
    store(folder, 1)
    assert key_of(1) in folder
    assert has(folder, 1)
    assert (folder.num_files, folder.num_bytes) == (1, FILE_BYTES)
    assert (folder.num_written, folder.num_read, folder.num_missed) == (1, 1, 1)


def test_what_is_there_already_is_not_written_again(folder: DiskFolder) -> None:
    store(folder, 1, 1)
    assert (folder.num_files, folder.num_written) == (1, 1)


def test_what_was_deleted_behind_its_back_is_written_again(
    folder: DiskFolder, tmp_path: Path
) -> None:
    store(folder, 1)
    file_of(tmp_path, 1).unlink()
    store(folder, 1)
    assert has(folder, 1)


def test_a_restart_finds_all_and_goes_on(tmp_path: Path) -> None:
    first = folder_in(tmp_path)
    store(first, *range(35))
    first.close()
    assert key_of(0) not in first
    assert not first.write(key_of(99), data_of(key_of(99)))
    second = folder_in(tmp_path)
    assert second.num_files == 35
    store(second, *range(35, 45))
    assert all(has(second, number) for number in range(45))
    assert len(block_files(tmp_path)) == 45
    second.check_integrity()


def test_a_restart_removes_what_was_left_half_done(tmp_path: Path) -> None:
    first = folder_in(tmp_path)
    store(first, 1)
    (first.path / "scratch" / "140").write_bytes(b"torn")
    shutil.copytree(first.path / "g00000000", first.path / "scratch" / "g00000007")
    (first.path / "g00000000" / "README").write_text("not a block")
    first.close()
    second = folder_in(tmp_path)
    assert second.num_files == 1
    assert not list((first.path / "scratch").iterdir())


def test_a_lower_cap_holds_at_once(tmp_path: Path) -> None:
    first = folder_in(tmp_path, num_blocks=80)
    store(first, *range(80))
    first.close()
    second = folder_in(tmp_path, num_blocks=24)
    assert len(block_files(tmp_path)) == 20
    assert all(has(second, number) for number in range(60, 80))
    assert second.num_dropped == 60
    second.close()
    third = folder_in(tmp_path, num_blocks=8)
    assert len(block_files(tmp_path)) <= 8
    store(third, 1)
    assert has(third, 1)
    assert len(block_files(tmp_path)) <= 8


def test_engines_side_by_side_share_no_file(tmp_path: Path) -> None:
    first = folder_in(tmp_path)
    store(first, 1)
    second = folder_in(tmp_path)
    assert second.path != first.path
    assert not has(second, 1)
    store(second, 2)
    first.close()
    third = folder_in(tmp_path)
    assert third.path == first.path
    assert has(third, 1)
    assert not has(third, 2)


@pytest.mark.parametrize(
    ("layout", "secret"), [("tiny bf16 32", SECRET), ("tiny bf16 16", b"t" * 32)]
)
def test_another_layout_or_secret_finds_nothing(tmp_path: Path, layout: str, secret: bytes) -> None:
    mine = folder_in(tmp_path)
    store(mine, 1)
    theirs = folder_in(tmp_path, layout=layout, secret=secret)
    assert key_of(1) not in theirs
    store(theirs, 2)
    # Not even when the file is put where it would be looked for.
    shutil.copy(file_of(tmp_path, 1), file_of(tmp_path, 2))
    assert not has(theirs, 2)
    assert theirs.num_corrupt == 1


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


def test_the_cap_holds_and_the_oldest_go(folder: DiskFolder, tmp_path: Path) -> None:
    for number in range(200):
        store(folder, number)
        assert has(folder, number)
        # With one thread, exactly: room is made before a file is written.
        assert sum(path.stat().st_size for path in block_files(tmp_path)) <= 80 * FILE_BYTES
    kept = [number for number in range(200) if key_of(number) in folder]
    assert len(kept) >= 70
    assert sum(number < 120 for number in kept) <= 5, "more than false positives"
    assert folder.num_written == folder.num_dropped + folder.num_files == 200
    folder.check_integrity()


def test_what_is_read_stays(folder: DiskFolder, tmp_path: Path) -> None:
    store(folder, *range(5))
    for number in range(5, 200):
        store(folder, number)
        if number % 25 == 0:
            assert all(has(folder, kept) for kept in range(5))
    assert all(has(folder, kept) for kept in range(5))
    assert not has(folder, 5)
    assert len(block_files(tmp_path)) <= folder.num_files
    folder.check_integrity()


def test_reads_alone_keep_generations_few(folder: DiskFolder) -> None:
    store(folder, *range(80))
    rng = random.Random(3)
    for _ in range(2000):
        has(folder, rng.randrange(80))
        assert len(list(folder.path.glob("g*"))) <= 16
    assert folder.num_files >= 60
    folder.check_integrity()


def test_nobody_else_may_look(folder: DiskFolder, tmp_path: Path) -> None:
    store(folder, 1)
    inside = list((tmp_path / folder.path.relative_to(tmp_path).parts[0]).rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in inside if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in inside if path.is_file()} == {0o600}


def test_an_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskUnusable, match=r"/file/cache: .*Not a directory"):
        folder_in(tmp_path / "file" / "cache")
    with pytest.raises(DiskUnusable, match="not one block a generation"):
        folder_in(tmp_path, num_blocks=7)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_unusable(tmp_path: Path) -> None:
    folder_in(tmp_path).close()
    [layout_folder] = tmp_path.iterdir()
    (layout_folder / "0").chmod(0o500)
    with pytest.raises(DiskUnusable, match="Permission denied"):
        folder_in(tmp_path)


def test_an_unusable_folder_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fail_with(errno.EIO))
        with pytest.raises(DiskUnusable, match="Input/output error"):
            folder_in(tmp_path)
    assert folder_in(tmp_path).path.name == "0"


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


def test_threads_read_nothing_but_what_was_written(tmp_path: Path) -> None:
    folder = folder_in(tmp_path, num_blocks=80)
    errors: list[BaseException] = []
    hits = [0] * 4
    end = time.monotonic() + 0.5

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < end:
                # A tenth of the keys is used half of the time.
                number = rng.randrange(rng.choice([20, 200]))
                if rng.random() < 0.4:
                    folder.write(key_of(number), data_of(key_of(number)))
                else:
                    hits[seed] += has(folder, number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert min(hits) > 0
    assert folder.num_dropped > 0
    assert folder.num_corrupt == 0
    assert folder.num_read == sum(hits)
    assert len(block_files(tmp_path)) <= folder.num_files
    folder.check_integrity()
    folder.close()
