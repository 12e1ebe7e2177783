"""What the engine knows of a model: read from its Hugging Face config, never from its name.

Invariant: two engines with equal fingerprints compute with equal weights in an equal dtype, over KV
of an equal dtype, so one can go on with what the other began.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT8 = "float8_e4m3fn"
_HEADER_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Keys of config.json that say who wrote it, not what the model is.
_VOLATILE_KEYS = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version"})
_SAMPLE_BYTES = 4096
_SAMPLES = 64
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The shape of a decoder-only model."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]
    """Of each layer; none: it sees everything."""
    dtype: str
    """What the engine computes in: a key of `DTYPE_BYTES`."""
    kv_dtype: str | None = None
    """What it caches in where that is not `dtype`: `FLOAT8`."""

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        size = 1 if self.cache_dtype == FLOAT8 else DTYPE_BYTES[self.cache_dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * size


def read_traits(config: Any, folder: Path, dtype: str = "auto") -> ModelTraits:
    """Traits of a `transformers` text config whose checkpoint lies in `folder`.

    `config` must have passed `support.check_config`. Raises `ModelRefused` where something that
    the engine needs is not stated.
    """
    num_heads = _number(config, "num_attention_heads")
    return ModelTraits(
        model_type=str(config.model_type),
        num_layers=_number(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or _number(config, "hidden_size") // num_heads,
        vocab_size=_number(config, "vocab_size"),
        max_model_len=_number(config, "max_position_embeddings"),
        eos_token_ids=_eos_token_ids(config, folder),
        sliding_windows=_sliding_windows(config),
        dtype=_dtype(config, folder) if dtype == "auto" else dtype,
    )


def with_kv_dtype(traits: ModelTraits, kv_dtype: str) -> ModelTraits:
    """`traits` with the cache that a configuration asks for: ``auto`` or ``fp8``."""
    return replace(traits, kv_dtype=FLOAT8 if kv_dtype == "fp8" else None)


def fingerprint(folder: Path, traits: ModelTraits) -> str:
    """32 hex digits over config.json (without the keys that name its origin), the dtypes of
    weights and KV, the end tokens, and of each safetensors file its name, size, header and 64 pages
    of 4 KiB spread evenly over the tensors. It tells checkpoints and fine-tunes apart in
    milliseconds; it is no proof against someone who changes single weights on purpose."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    dtypes = [traits.dtype] if traits.kv_dtype is None else [traits.dtype, traits.kv_dtype]
    stated = (
        json.dumps(kept, sort_keys=True),
        json.dumps([*dtypes, sorted(traits.eos_token_ids)]),
    )
    return _digest(folder, *(text.encode() for text in stated)).hex()


def checkpoint_digest(folder: Path) -> bytes:
    """16 bytes over what loading a checkpoint reads: both configs whole, and of the weights what
    `fingerprint` takes."""
    paths = (folder / "config.json", folder / "generation_config.json")
    return _digest(folder, *(path.read_bytes() for path in paths if path.is_file()))


def _digest(folder: Path, *stated: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)

    def feed(data: bytes) -> None:
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)

    for data in stated:
        feed(data)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        header = _header_bytes(path)
        feed(path.name.encode())
        feed(struct.pack("<Q", size))
        feed(header)
        start = 8 + len(header)
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(start + (size - start) * index // _SAMPLES)
                feed(file.read(_SAMPLE_BYTES))
    return digest.digest()


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ModelRefused(f"the model's config.json does not state a usable {name}: {value!r}")
    return value


def _eos_token_ids(config: Any, folder: Path) -> tuple[int, ...]:
    """The generation config's, which chat models correct more often than config.json."""
    value = None
    path = folder / "generation_config.json"
    if path.is_file():
        value = json.loads(path.read_text()).get("eos_token_id")
    if value is None:
        value = getattr(config, "eos_token_id", None)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _sliding_windows(config: Any) -> tuple[int | None, ...]:
    num_layers = _number(config, "num_hidden_layers")
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _dtype(config: Any, folder: Path) -> str:
    """The config's, or the one that most bytes of the checkpoint are in."""
    stated = getattr(config, "dtype", None)
    if stated is not None:
        name = str(stated).removeprefix("torch.")
    else:
        totals: dict[str, int] = {}
        for entry in _header_entries(folder):
            start, end = entry["data_offsets"]
            totals[entry["dtype"]] = totals.get(entry["dtype"], 0) + end - start
        most = max(totals, key=lambda key: totals[key], default="none")
        name = _HEADER_DTYPES.get(most, most)
    if name not in DTYPE_BYTES:
        raise ModelRefused(f"weights in {name} are not supported; set dtype to one of these: "
                           f"{', '.join(DTYPE_BYTES)}")  # fmt: skip
    return name


def _header_entries(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.safetensors")):
        header = json.loads(_header_bytes(path))
        yield from (entry for name, entry in header.items() if name != "__metadata__")


def _header_bytes(path: Path) -> bytes:
    """A safetensors file starts with the header's length (8 bytes, little endian) and the header
    in JSON (https://github.com/huggingface/safetensors#format)."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ModelRefused(f"{path.name} is not a safetensors file")
        header = file.read(length)
    if len(header) != length:
        raise ModelRefused(f"{path.name} is cut short")
    return header
