"""KV blocks in a folder: the slowest tier of the prefix cache, a file a block, kept over restarts.

Invariant: a read is true only if the buffer holds, byte for byte, what was stored under that key in
that layout by someone who knows the secret. All else is a miss: a torn, damaged, renamed or planted
file, a disk that is full or fails, a folder that is gone. A key always stands for the same bytes.

A file is `root/<layout>/<n>/g<generation>/<key>`. `<layout>` is a keyed hash of what a block's
bytes mean, so that no others are met; `<n>` is the first folder whose lock is free: engines side by
side share no file, and one that starts again takes over what was left.

New files go to the newest generation. At an eighth of the cap the next one is begun, and over the
cap the oldest is dropped whole. A block read from the older half moves to the newest, so it is
roughly the least recently used that goes. A generation has its own Bloom filter, which goes with
it: so there is no index by key (10 million blocks take 33 MB) and no need of filters that count.
"""

import fcntl
import itertools
import os
import re
import shutil
import threading
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from struct import Struct

from cache.bloom.blocked import BlockedBloom
from cache.events import BlockKey

_GENERATIONS, _MOST_GENERATIONS = 8, 16
"""Full ones in the cap; all, with those that blocks have left: a bound on what a look-up costs."""

# Magic, version, bytes of payload, MAC over key and payload.
_HEADER = Struct("<4sIQ16s")

_KEY_NAME = re.compile("[0-9a-f]{32}")
_GENERATION_NAME = re.compile("g[0-9]{8}")


class DiskUnusable(Exception):
    """The folder can't be used; the message names it and the reason."""


class _Generation:
    def __init__(self, folder: Path, number: int, capacity: int) -> None:
        self.path = str(folder / f"g{number:08}")
        self.filter = BlockedBloom(capacity, target_rate=0.001)
        self.num_files = 0  # Never fewer than there are: those on their way count.

    def file(self, key: BlockKey) -> str:
        return f"{self.path}/{key.hex()}"


class DiskFolder:
    """Blocks of `block_bytes` bytes each, for any number of threads at once.

    `layout` says what a block's bytes mean: model, block size, dtype. `secret` is at most 64 bytes.
    Finished and half-written files together never exceed `max_bytes`; on top come only generations
    that are being deleted at the moment and what the file system rounds up. Folders of other
    layouts, and an `<n>` that nobody takes any more, are left alone. A start reads all file names.
    """

    def __init__(
        self, root: Path, layout: str, secret: bytes, block_bytes: int, max_bytes: int
    ) -> None:
        """Raises `DiskUnusable` if the folder can't be made, locked, listed or written to, or if
        `max_bytes` is too few for one block a generation."""
        self.block_bytes = block_bytes
        self.file_bytes = _HEADER.size + block_bytes
        self._max_files = max_bytes // self.file_bytes
        self._capacity = self._max_files // _GENERATIONS
        if self._capacity < 1:
            raise DiskUnusable(f"{root}: {max_bytes} bytes are not one block a generation")
        meaning = f"{block_bytes} {layout}".encode()
        folder = blake2b(meaning, digest_size=8, key=secret, person=b"shoal-folder").hexdigest()
        self._mac_key = blake2b(meaning, key=secret, person=b"shoal-mac").digest()

        # Guards list, filters' bits and counters. The only I/O under it begins a generation.
        self._lock = threading.Lock()
        # Oldest first. Replaced, never changed, so that it can be read without the lock.
        self._generations: tuple[_Generation, ...] = ()
        self._next_number = 0
        self._dropped: list[_Generation] = []  # Not in the list any more, still on the disk.
        self.num_written = self.num_read = self.num_missed = 0
        self.num_failed = 0
        """Errors of the file system. A file that a read does not find is none."""
        self.num_corrupt = self.num_dropped = 0
        """Files deleted: for not being what was stored; to make room."""
        self._lock_file = -1
        try:
            self.path, self._lock_file = _take_folder(root / folder)
            self._scratch = self.path / "scratch"
            self._take_over()
        except OSError as error:
            self.close()
            raise DiskUnusable(f"{root}: {error}") from error
        self._delete_dropped()

    @property
    def num_files(self) -> int:
        """Approximate: a key that two threads wrote at once counts twice."""
        return sum(generation.num_files for generation in self._generations)

    @property
    def num_bytes(self) -> int:
        return self.num_files * self.file_bytes

    def __contains__(self, key: BlockKey) -> bool:
        """Whether a read is worth it; no I/O, no lock. Never False for a stored block. True for one
        that isn't with odds of 0.1 % a generation (0.9 % as a rule, 1.6 % at most), and for one
        whose file was corrupt until its generation goes."""
        return any(key in generation.filter for generation in self._generations)

    def read(self, key: BlockKey, into: memoryview) -> bool:
        """True if `into`, `block_bytes` long, now holds the block; else its bytes are undefined."""
        assert into.nbytes == self.block_bytes
        # Twice: a file may have moved, behind the search, to where it had just looked.
        for _ in range(2):
            generations = self._generations
            for generation in reversed(generations):
                if key in generation.filter and self._load(generation, key, into):
                    if generation in generations[: len(generations) // 2]:
                        self._move_to_newest(generation, key)
                    with self._lock:
                        self.num_read += 1
                    return True
        with self._lock:
            self.num_missed += 1
        return False

    def write(self, key: BlockKey, data: memoryview) -> bool:
        """Stores the block, unless the newer half has it. False if it could not be stored."""
        assert data.nbytes == self.block_bytes
        generations = self._generations
        for generation in generations[len(generations) // 2 :]:
            if key in generation.filter and os.path.exists(generation.file(key)):
                return True
        try:
            place = self._reserve()
            self._delete_dropped()
            self._store(place, key, data)
        except OSError:
            with self._lock:
                self.num_failed += 1
            # Also if there is no place: the disk may be too full for a folder.
            self._delete_dropped()
            return False
        with self._lock:
            place.filter.add(key)
            self.num_written += 1
        return True

    def close(self) -> None:
        """Gives the lock back; all is a miss from then on. No read or write may be under way."""
        if self._lock_file >= 0:
            self._generations = ()
            os.close(self._lock_file)
            self._lock_file = -1

    def check_integrity(self) -> None:
        """For an idle folder: every file is in a filter, counted, and within the cap."""
        for generation in self._generations:
            names = os.listdir(generation.path)
            assert all(bytes.fromhex(name) in generation.filter for name in names)
            assert len(names) <= generation.num_files
        assert self.num_files <= self._max_files

    def _take_over(self) -> None:
        """Lists what the last owner left, less what it left half done or is over a lower cap."""
        if self._scratch.exists():
            shutil.rmtree(self._scratch)
        self._scratch.mkdir(0o700)
        for name in sorted(os.listdir(self.path)):
            if _GENERATION_NAME.fullmatch(name):
                self._next_number = int(name[1:])
                self._list_next()
        while self.num_files > self._max_files:
            self._drop_oldest()

    def _list_next(self) -> None:
        """The generation of the next number, with what is in its folder already."""
        folder = self.path / f"g{self._next_number:08}"
        folder.mkdir(0o700, exist_ok=True)
        names = [name for name in os.listdir(folder) if _KEY_NAME.fullmatch(name)]
        generation = _Generation(self.path, self._next_number, max(self._capacity, len(names)))
        for name in names:
            generation.filter.add(bytes.fromhex(name))
        generation.num_files = len(names)
        self._next_number += 1
        self._generations = (*self._generations, generation)

    def _reserve(self, moving: BlockKey | None = None) -> _Generation:
        """A place in the newest generation, for a new file or for one that moves there."""
        with self._lock:
            if self._lock_file < 0:
                raise OSError("closed")
            # A moving file takes up no more room than before.
            while moving is None and self.num_files >= self._max_files:
                self._drop_oldest()
            if not self._generations or self._generations[-1].num_files >= self._capacity:
                while len(self._generations) >= _MOST_GENERATIONS:
                    self._drop_oldest()
                self._list_next()
            newest = self._generations[-1]
            newest.num_files += 1
            if moving is not None:
                # Before it moves: its old generation may go at any time.
                newest.filter.add(moving)
            return newest

    def _drop_oldest(self) -> None:
        self._dropped.append(self._generations[0])
        self.num_dropped += self._generations[0].num_files
        self._generations = self._generations[1:]

    def _delete_dropped(self) -> None:
        """Not under the lock: it may be many thousand files."""
        with suppress(IndexError):
            while True:
                path = self._dropped.pop().path
                # Moved first, so that no thread that still knows the generation can add to it.
                doomed = self._scratch / os.path.basename(path)
                with suppress(OSError):
                    os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _move_to_newest(self, generation: _Generation, key: BlockKey) -> None:
        """No harm if it fails: the block has been read."""
        with suppress(OSError):
            left = newest = self._reserve(moving=key)
            with suppress(OSError):
                os.rename(generation.file(key), newest.file(key))
                left = generation
            with self._lock:
                left.num_files -= 1
        self._delete_dropped()

    def _load(self, generation: _Generation, key: BlockKey, into: memoryview) -> bool:
        """Reads the block from its file. Deletes the file if it is not what was stored."""
        path = generation.file(key)
        header, beyond = bytearray(_HEADER.size), bytearray(1)
        try:
            with open(path, "rb", buffering=0, opener=_open) as file:
                num_bytes = os.preadv(file.fileno(), [header, into, beyond], 0)
            if num_bytes == self.file_bytes and header == self._header(key, into):
                return True
            os.unlink(path)
        except OSError as error:
            with self._lock:
                self.num_failed += not isinstance(error, FileNotFoundError)
        else:
            with self._lock:
                self.num_corrupt += 1
                generation.num_files -= 1
        return False

    def _store(self, generation: _Generation, key: BlockKey, data: memoryview) -> None:
        """Under a temporary name first: a key's name never shows a file in the making. No fsync: if
        power fails, a torn file's MAC is wrong, and a block can be computed again."""
        temporary = self._scratch / str(threading.get_ident())
        try:
            with open(temporary, "xb", buffering=0, opener=_open) as file:
                if os.writev(file.fileno(), [self._header(key, data), data]) != self.file_bytes:
                    raise OSError("the disk is full")
            os.replace(temporary, generation.file(key))
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            with self._lock:
                generation.num_files -= 1
            raise

    def _header(self, key: BlockKey, payload: memoryview) -> bytes:
        mac = blake2b(key, digest_size=16, key=self._mac_key)
        mac.update(payload)
        return _HEADER.pack(b"SHKV", 1, self.block_bytes, mac.digest())


def _open(path: str, flags: int) -> int:
    """A planted link is not followed, a planted pipe does not keep anybody waiting."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _take_folder(layout_folder: Path) -> tuple[Path, int]:
    """The first folder that no engine has, and its lock, which ends with the process."""
    layout_folder.mkdir(0o700, parents=True, exist_ok=True)
    for number in itertools.count():
        folder = layout_folder / str(number)
        folder.mkdir(0o700, exist_ok=True)
        lock_file = _open(str(folder / "lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder, lock_file
        except OSError as error:
            os.close(lock_file)
            if not isinstance(error, BlockingIOError):
                raise
    raise AssertionError("the numbers never end")
