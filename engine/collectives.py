"""What the ranks of a tensor-parallel engine tell each other within a step.

Invariant: every rank calls the same methods in the same order, and gets the same bits. So all of
them go on with equal residuals and draw from equal logits. With one rank nothing is told, and
nothing is changed.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch._C._distributed_c10d import FileStore, Store

from engine.models.sharding import WHOLE, Shard

_TIMEOUT = timedelta(minutes=5)
"""A rank that is gone is noticed at once; one that hangs, by the age of its step."""


class Collectives(Protocol):
    """The ranks of one engine, as one of them sees them."""

    @property
    def shard(self) -> Shard:
        """Which rank this is, and of how many."""
        ...

    def connect(self, device: torch.device) -> None:
        """Returns when all ranks have called it. Once, before anything below."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' `x` summed, in float32; may overwrite `x`. Of one rank `x` itself."""
        ...

    def all_gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """The ranks' `x`, each ``[N, len(shard.part(width))]``, side by side: ``[N, width]``."""
        ...

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        ...

    def abort(self) -> None:
        """Ends what waits for a rank that is gone; that raises. May be called from any thread."""
        ...


class _Single:
    """The collectives of a rank that is alone."""

    shard = WHOLE

    def connect(self, device: torch.device) -> None:
        pass

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        return x

    def least(self, number: int) -> int:
        return number

    def abort(self) -> None:
        pass


SINGLE: Collectives = _Single()


class TorchCollectives:
    """Over gloo on a CPU, over NCCL on GPUs; on loopback, met through a file in `folder`."""

    def __init__(self, shard: Shard, folder: Path, meet: Callable[[], None]) -> None:
        """`meet` returns when all ranks are about to connect: who waits in there can be told that
        another one has failed, and who connects cannot."""
        self.shard = shard
        self._path = folder / "rendezvous"
        self._meet = meet
        self._group: Any = None
        self._device = torch.device("cpu")

    def connect(self, device: torch.device) -> None:
        self._meet()
        store = FileStore(str(self._path), self.shard.count)
        store.set_timeout(_TIMEOUT)
        self._device = device
        make = _nccl_group if device.type == "cuda" else _gloo_group
        self._group = make(store, self.shard)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.float().contiguous()
        self._group.allreduce([total]).wait()
        return total

    def all_gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        if len(x) == 0:
            return x.new_empty(0, width)
        share = len(Shard(0, self.shard.count).part(width))
        # All send as much as the first, which has the most.
        x = torch.nn.functional.pad(x, (0, share - x.shape[1])).contiguous()
        found = [torch.empty_like(x) for _ in range(self.shard.count)]
        self._group.allgather([found], [x]).wait()
        return torch.cat(found, dim=1)[:, :width]

    def least(self, number: int) -> int:
        x = torch.tensor([[-number]], device=self._device)
        self._group.allreduce([x], torch.distributed.ReduceOp.MAX).wait()
        return -int(x)

    def abort(self) -> None:
        # Gloo notices a broken connection by itself.
        if self._group is not None and self._group.name() == "nccl":
            self._group.abort()


def _gloo_group(store: Store, shard: Shard) -> Any:
    # Made by hand, not by `init_process_group`: that one is a global of the process, and binds to
    # whatever address the host's name stands for.
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return gloo(store, shard.rank, shard.count, options)


def _nccl_group(store: Store, shard: Shard) -> Any:
    # NCCL reads it; without it, it listens on the first interface that it finds.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _TIMEOUT
    return nccl(store, shard.rank, shard.count, options)
