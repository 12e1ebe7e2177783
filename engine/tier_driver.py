"""The tiers below the device, driven: what `cache.tiers` decides, `cache.disk` stores.

Invariant: only the control thread uses this; bytes move in plans, and in the threads of `DiskIO`.
"""

from pathlib import Path
from typing import Self

from cache.disk import DiskFolder, DiskUnusable
from cache.events import CacheEvent, Tier
from cache.prefix import PrefixCache
from cache.tiers import LowerTiers
from configs.engine import CacheConfig
from configs.secret import derive_key
from engine.disk_io import DiskIO
from engine.errors import ConfigurationError
from engine.plan import ExecutorInfo


class TierDriver:
    """Host memory, and perhaps a disk, of one engine."""

    def __init__(self, tiers: LowerTiers, disk: DiskIO | None) -> None:
        self.tiers = tiers
        self._disk = disk

    @classmethod
    def build(cls, config: CacheConfig, info: ExecutorInfo, disk: DiskIO | None) -> Self:
        host = PrefixCache(
            info.num_slots, config.wheel_slots, config.wheel_slot_width, tier=Tier.HOST
        )
        return cls(LowerTiers(host, disk.folder if disk is not None else None), disk)

    def turn(self, now: float) -> None:
        """Takes over what the disk has done, and sends it what there is to do."""
        if self._disk is None:
            return
        for job, done in self._disk.ended():
            self.tiers.finish(job, done)
        self._disk.submit(self.tiers.take_jobs(), now)
        self._disk.give_up(now)

    def drain_events(self) -> list[CacheEvent]:
        return self.tiers.host.drain_events()

    def stats(self) -> dict[str, float]:
        """Readable from any thread."""
        counts, host = self.tiers.counts, self.tiers.host
        stats: dict[str, float] = {
            "slots": host.pool.num_blocks,
            "held_slots": host.pool.num_held,
            "evicted_slots": host.num_evicted,
            "saved_blocks": counts.saved,
            "unsaved_blocks": counts.unsaved,
            "loaded_blocks": counts.loaded,
        }
        if self._disk is not None:
            folder = self._disk.folder
            stats |= {
                "promoted_blocks": counts.promoted,
                "missed_blocks": counts.missed,
                "unwritten_blocks": counts.unwritten,
                "disk_blocks": folder.num_files,
                "disk_bytes": folder.num_bytes,
                "disk_corrupt": folder.num_corrupt,
                "disk_failed": folder.num_failed,
            }
        return stats

    def close(self, timeout_s: float) -> None:
        """Lets what is being written be written, for `timeout_s`."""
        if self._disk is not None:
            self._disk.submit(self.tiers.take_jobs(), 0.0)
            self._disk.close(timeout_s)


def open_disk(config: CacheConfig, info: ExecutorInfo, secret: bytes | None) -> DiskFolder | None:
    """The folder of the configuration, none for none. Raises `ConfigurationError`."""
    if config.disk_path is None:
        return None
    if secret is None:
        raise ConfigurationError(
            "cache.disk_path needs cluster_secret_file: with a secret made up at each start, "
            "nothing on disk could be found again"
        )
    layout = f"{info.fingerprint} {info.dtype} {info.block_size}"
    block_bytes = info.block_size * info.kv_bytes_per_token
    key = derive_key(secret, "kv-disk")
    try:
        return DiskFolder(Path(config.disk_path), layout, key, block_bytes, config.disk_bytes)
    except DiskUnusable as error:
        raise ConfigurationError(f"cache.disk_path: {error}") from error
