"""What ranks tell each other, over gloo, and where they listen."""

import contextlib
import os
import socket
import struct
from pathlib import Path

import pytest
import torch

from engine.collectives import SINGLE, TorchCollectives
from engine.models.sharding import WHOLE
from tests.engine.ranks import on_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [2, 3])
def test_all_ranks_have_the_same_sum_to_the_bit(count: int, tmp_path: Path) -> None:
    sources = [torch.randn(7, 33, generator=torch.Generator().manual_seed(n)) for n in range(count)]

    def run(collectives: TorchCollectives) -> torch.Tensor:
        collectives.connect(CPU)
        return collectives.all_reduce(sources[collectives.shard.rank].clone())

    first, *others = on_ranks(count, tmp_path, run)
    assert all(torch.equal(first, other) for other in others)
    assert torch.allclose(first, torch.stack(sources).sum(0), atol=1e-5)


def test_a_sum_is_taken_in_float32(tmp_path: Path) -> None:
    """In bfloat16 256 + 1 is 256."""

    def run(collectives: TorchCollectives) -> torch.Tensor:
        collectives.connect(CPU)
        value = (256.0, 1.0)[collectives.shard.rank]
        return collectives.all_reduce(torch.tensor([value], dtype=torch.bfloat16))

    for total in on_ranks(2, tmp_path, run):
        assert total.dtype == torch.float32
        assert total.item() == 257


@pytest.mark.parametrize(("count", "width"), [(2, 6), (2, 7), (3, 7), (3, 4)])
def test_columns_come_together_also_where_not_all_have_as_many(
    count: int, width: int, tmp_path: Path
) -> None:
    whole = torch.arange(5.0 * width).view(5, width)

    def run(collectives: TorchCollectives) -> tuple[torch.Tensor, torch.Tensor]:
        collectives.connect(CPU)
        part = collectives.shard.part(width)
        own = whole[:, part.start : part.stop]
        return collectives.all_gather(own, width), collectives.all_gather(own[:0], width)

    for gathered, empty in on_ranks(count, tmp_path, run):
        assert torch.equal(gathered, whole)
        assert empty.shape == (0, width)


def test_one_rank_changes_nothing() -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    SINGLE.connect(CPU)
    assert SINGLE.shard == WHOLE
    assert SINGLE.all_reduce(x) is x
    assert SINGLE.all_gather(x, 3) is x


def listening(pid: int) -> set[str]:
    """Addresses that a process listens at."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = bytes.fromhex(fields[1].split(":")[0])
                packed = b"".join(
                    struct.pack("=I", *struct.unpack(">I", words[i : i + 4]))
                    for i in range(0, len(words), 4)
                )
                found.add(socket.inet_ntop(family, packed))
    return found


def test_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    def run(collectives: TorchCollectives) -> set[str]:
        collectives.connect(CPU)
        collectives.all_reduce(torch.ones(1))
        found = listening(os.getpid())
        collectives.all_reduce(torch.ones(1))
        return found

    for found in on_ranks(2, tmp_path, run):
        assert found == {"127.0.0.1"}
