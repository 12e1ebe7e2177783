"""What a folder gives back is what was stored in it, within its cap, and to nobody else."""

import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from cache.disk import DiskFolder, DiskUnusable
from tests.cache.disk_rig import (
    FILE_BYTES,
    SECRET,
    block_files,
    data_of,
    file_of,
    folder_in,
    has,
    key_of,
    store,
)


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


def test_threads_read_nothing_but_what_was_written(tmp_path: Path) -> None:
    folder = folder_in(tmp_path, num_blocks=80)
    errors: list[BaseException] = []
    hits = [0] * 4

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(500):
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
