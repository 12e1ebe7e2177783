"""GGUF files made into model folders of safetensors, once each.

Invariant: a folder is written under another name and renamed when all of it is there, and a lock
keeps two processes from doing the work twice. Its name says which file it was made from: a file
that has changed since is converted anew.
"""

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigurationError, ModelRefused
from engine.models.gguf_file import GgufModel, read_gguf, unreadable
from engine.models.traits import DTYPE_BYTES
from engine.user_cache import locked, user_cache

# It rises when the conversion changes, so that an old result is not taken for a new one.
_VERSION = 1
_ALWAYS = ("config.json", "tokenizer.json", "tokenizer_config.json")
_MAX_STEM = 60


@dataclass(frozen=True, slots=True)
class Conversion:
    """A file and the folder that is made of it."""

    source: Path
    folder: Path
    name: str
    """What progress calls it."""
    needed: tuple[str, ...] = _ALWAYS
    """Files that the folder has, beside weights."""

    def is_done(self) -> bool:
        complete = all((self.folder / name).is_file() for name in self.needed)
        return complete and any(self.folder.glob("*.safetensors"))


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/shoal/models``, or the same under ``~/.cache``."""
    return user_cache() / "models"


def conversion_of(source: Path, root: Path | None = None) -> Conversion:
    """Of a GGUF file, known by its place, size and time of change."""
    status = source.stat()
    identity = f"{source.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    stem = re.sub(r"[^\w.-]", "_", source.stem)[:_MAX_STEM]
    root = cache_root() if root is None else root
    return Conversion(source, root / f"{stem}-{digest}-v{_VERSION}", source.name)


def ensure_converted(
    conversion: Conversion, progress: Callable[[str], None] = lambda message: None
) -> Path:
    """The folder. Raises `ModelRefused` for a file that cannot be converted, and
    `ConfigurationError` where there is no room for the result."""
    folder = conversion.folder
    if conversion.is_done():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)

    def on_wait() -> None:
        progress(f"waiting for another process that prepares {conversion.name}")

    with locked(folder.parent / f".{folder.name}.lock", on_wait):
        if conversion.is_done():
            return folder
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _convert(conversion, temporary, progress)
            _make_readable(temporary)
            # Only what an interrupted or tampered run left behind can be in the way.
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _make_readable(folder: Path) -> None:
    """An image prepares the model as one user and serves it as another; temporary folders and
    safetensors files are created for their owner only."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _convert(conversion: Conversion, folder: Path, progress: Callable[[str], None]) -> None:
    """Unpacks the weights and saves what the folder needs."""

    def say(what: str) -> None:
        progress(f"preparing {conversion.name}: {what}")

    say("reading its tokenizer (once; about 20 seconds for 100 MB)")
    found = read_gguf(conversion.source)
    _check_room(found, folder)
    try:
        _convert_tokenizer(conversion.source, folder)
        say("unpacking its weights")
        _convert_weights(conversion.source, found, folder, lambda: say("saving it"))
    except (ModelRefused, OSError):
        raise
    except Exception as error:
        raise unreadable(conversion.source, error) from error
    missing = [name for name in conversion.needed if not (folder / name).is_file()]
    if missing:
        raise ModelRefused(f"converting {conversion.name} did not produce {', '.join(missing)}")


def _check_room(found: GgufModel, folder: Path) -> None:
    needed = found.num_elements * DTYPE_BYTES[found.dtype]
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigurationError(
            f"converting the model takes {needed} bytes in {folder.parent}, where {free} are free"
        )


def _convert_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(folder)


def _convert_weights(
    source: Path, found: GgufModel, folder: Path, on_save: Callable[[], None]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model, report = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        # Without it the weights stay packed, which is slower in bfloat16 on a CPU.
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, found.dtype),
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise ModelRefused(f"{source.name} lacks {len(missing)} tensors, among them {missing[0]}")
    on_save()
    model.save_pretrained(folder)
