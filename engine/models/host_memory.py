"""The KV of blocks in host memory: the tier below the device.

Invariant: a slot holds all of one block, of every layer, in one piece: ``[layers, 2, kv_heads,
block_size, head_dim]`` (0: keys, 1: values), so that a disk reads or writes it in one go.

On a GPU the copies run beside the steps, on a stream of their own, and the host waits for none of
them within a step. What has to be in order is:

- A copy begins after the steps before it: it reads what they wrote, and they may still read what it
  overwrites. The copy stream waits for an event of the compute stream.
- A step attends to what was loaded: the compute stream waits for the load. So do later copies
  within the device.
- A saved block may be overwritten at once, by a step or a copy within the device: these wait for
  the save, if they are about to write one of its blocks (`before_writes`), and only then. A load
  into it comes later on the same stream.
- A slot that is saved to, loaded from and saved to again: one stream, one order.
- Whoever reads or writes a slot from the host (a disk does) waits for the last copy from or to it
  (`memory`). What the host writes is there before any load that is given to the stream later.
"""

from collections.abc import Iterable, Sequence

import torch

from engine.models.copy_streams import CopyEvent, CopyStream, copy_streams
from engine.models.kv_cache import KVCache


class HostMemory:
    """`num_slots` slots, allocated once; page-locked beside a GPU. `save`, `load` and
    `before_writes` belong to the thread that runs steps, `memory` to any."""

    def __init__(
        self,
        cache: KVCache,
        num_slots: int,
        streams: tuple[CopyStream, CopyStream] | None = None,
    ) -> None:
        """`streams`: that of the steps and that of the copies; by default those of the device."""
        storage = cache.storage
        shape = (num_slots, *storage.shape[:2], *storage.shape[3:])
        self.num_slots = num_slots
        self._storage = storage
        self._slots = torch.zeros(
            shape, dtype=storage.dtype, pin_memory=bool(num_slots) and storage.device.type == "cuda"
        )
        self._compute, self._copies = streams or copy_streams(storage.device)
        self._saving: dict[int, CopyEvent] = {}
        """By block: the end of its save, if that has not been seen to have come."""
        self._last_save: CopyEvent | None = None
        self._in_use: dict[int, CopyEvent] = {}
        """By slot: the end of the last copy from or to it."""

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks to slots, (block, slot), in order."""
        if not pairs:
            return
        self._copies.wait_event(self._compute.record_event())
        for block, slot in pairs:
            self._copies.copy(self._slots[slot], self._storage[:, :, block])
        done = self._copies.record_event()
        self._in_use.update((slot, done) for _, slot in pairs)
        if not done.query():
            self._saving.update((block, done) for block, _ in pairs)
            self._last_save = done

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies slots to blocks, (slot, block), in order; what a step does from now on comes
        after."""
        if not pairs:
            return
        self._copies.wait_event(self._compute.record_event())
        for slot, block in pairs:
            self._copies.copy(self._storage[:, :, block], self._slots[slot])
        done = self._copies.record_event()
        self._in_use.update((slot, done) for slot, _ in pairs)
        self._compute.wait_event(done)

    @property
    def is_saving(self) -> bool:
        """Saves may be under way: to be asked before the trouble of listing blocks."""
        if self._last_save is not None and self._last_save.query():
            # One stream: with the last all are done.
            self._saving.clear()
            self._last_save = None
        return self._last_save is not None

    def before_writes(self, blocks: Iterable[int]) -> None:
        """The steps' stream is about to write `blocks`: it waits for saves of them."""
        if self.is_saving:
            for event in {self._saving[block] for block in blocks if block in self._saving}:
                self._compute.wait_event(event)

    def memory(self, slot: int) -> memoryview:
        """The slot's bytes, to read and to write, once no copy uses it any more."""
        event = self._in_use.get(slot)
        if event is not None:
            event.synchronize()
        return self._slots[slot].view(torch.uint8).view(-1).numpy().data

    def close(self) -> None:
        """Waits for all copies: the memory may go afterwards."""
        self._copies.record_event().synchronize()
