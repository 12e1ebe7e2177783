"""What a load has found out about a checkpoint, kept for the next one: its traits, and that packed
and paged it computes what `transformers` does. So only the first start on a machine pays for that.

Invariant: a record is used only where all that it followed from is the same: the checkpoint, the
dtypes of weights and KV, device, our own code of models and kernels, and the versions of torch and
transformers. Without one, or with one that cannot be read, a load does everything itself.
"""

import hashlib
import logging
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from engine.models.decoder_traits import DecoderTraits
from engine.models.traits import ModelTraits, checkpoint_digest
from engine.user_cache import user_cache

_log = logging.getLogger(__name__)

_CODE = ("models", "kernels")
_SUFFIXES = frozenset({".py", ".cpp", ".h"})


@dataclass(frozen=True, slots=True)
class Record:
    traits: ModelTraits
    decoder: DecoderTraits


def find_record(
    folder: Path, dtype: str, device: torch.device, kv_dtype: str = "auto"
) -> Record | None:
    """Of the checkpoint in `folder`, loaded as `dtype` and over KV of `kv_dtype`, which both may be
    ``auto``: other KV may take another back end."""
    try:
        return msgspec.json.decode(_path(folder, dtype, device, kv_dtype).read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        _log.info("what is on record of %s cannot be read: %s", folder, error)
        return None


def keep_record(
    record: Record, folder: Path, dtype: str, device: torch.device, kv_dtype: str = "auto"
) -> None:
    """Has no effect where the user's cache cannot be written."""
    try:
        path = _path(folder, dtype, device, kv_dtype)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_bytes(msgspec.json.encode(record))
        whole.replace(path)
    except OSError as error:
        _log.info("what was found out about %s cannot be kept: %s", folder, error)


def _path(folder: Path, dtype: str, device: torch.device, kv_dtype: str) -> Path:
    digest = hashlib.blake2b(checkpoint_digest(folder), digest_size=16)
    versions = torch.__version__, version("transformers")
    facts = (dtype, kv_dtype, device.type, _device_name(device), *versions)
    digest.update("\0".join(facts).encode())
    package = Path(__file__).parents[1]
    for path in sorted(file for name in _CODE for file in (package / name).rglob("*")):
        if path.suffix in _SUFFIXES:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return user_cache() / "verified" / f"{digest.hexdigest()}.json"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()
