"""From the name of a model to a local folder.

Invariant: what comes back holds a config.json and safetensors weights; no code from a model's
repository is ever fetched or run. Nothing heavy is imported here: the ingress uses this module to
find the tokenizer.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ModelRefused

if TYPE_CHECKING:
    from engine.models.conversion import Conversion

DEFAULT_MODEL = "default"
# Everything a tokenizer needs, and a model; python files, pickles and other formats stay behind.
_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_MODEL_FILES = (*_TOKENIZER_FILES, "*.safetensors")
_GGUF = ".gguf"
_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def resolve_model(model: str, progress: Callable[[str], None] = lambda message: None) -> Path:
    """The folder of `model`: ``default``, a local folder, a GGUF file or a folder with one, or a
    hub id.

    A GGUF file is converted on first use. A hub id is looked up in the local hub cache when
    ``HF_HUB_OFFLINE`` is set, and downloaded otherwise. Raises `ModelRefused` with what to do about
    it.
    """
    found = find_model(model, progress)
    if isinstance(found, Path):
        return found
    from engine.models.conversion import ensure_converted

    return ensure_converted(found, progress)


def find_model(
    model: str,
    progress: Callable[[str], None] = lambda message: None,
    download: bool = True,
) -> "Path | Conversion":
    """As `resolve_model`, but what has to be converted stays as it is."""
    source: Path | Conversion
    if model == DEFAULT_MODEL:
        from engine.models.default import default_model

        source = default_model()
    elif (path := Path(model).expanduser()).exists():
        source = _local(path)
    elif not _HUB_ID.match(model) or model.startswith("."):
        raise ModelRefused(
            f"there is no folder {model}, and it is no hub id of the form owner/name either"
        )
    else:
        source = _from_hub(model, _MODEL_FILES, progress, download)
        _check_folder(source)
    if isinstance(source, Path):
        return source
    return source.folder if source.is_done() else source


def _local(path: Path) -> "Path | Conversion":
    from engine.models.conversion import conversion_of

    if path.is_file():
        if path.suffix.lower() != _GGUF:
            raise ModelRefused(
                f"{path} is a file; a model is a folder with config.json and *.safetensors, or a "
                "GGUF file"
            )
        return conversion_of(path)
    files = sorted(each for each in path.iterdir() if each.suffix.lower() == _GGUF)
    if not files or any(path.glob("*.safetensors")):
        _check_folder(path)
        return path.resolve()
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelRefused(f"{path} has {len(files)} GGUF files; name one of them: {names}")
    return conversion_of(files[0])


def resolve_tokenizer(model: str) -> Path:
    """As `resolve_model`, but of a hub repository only what a tokenizer needs is fetched: an
    ingress's node has no use for weights."""
    if model == DEFAULT_MODEL or Path(model).expanduser().exists() or not _HUB_ID.match(model):
        return resolve_model(model)
    return _from_hub(model, _TOKENIZER_FILES)


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelRefused(f"{folder} has no config.json: it is no model folder")
    if any(folder.glob("*.safetensors")):
        return
    others = [suffix for suffix in (".bin", ".pt", ".pth") if any(folder.glob(f"*{suffix}"))]
    found = f"; it has {', '.join(others)} files" if others else ""
    raise ModelRefused(
        f"{folder} has no *.safetensors{found}. Only safetensors are loaded (pickled weights can "
        "run code): convert it with save_pretrained"
    )


def _from_hub(
    model: str,
    files: tuple[str, ...],
    progress: Callable[[str], None] = lambda message: None,
    download: bool = True,
) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if download:
        progress(f"looking for {model} in the hub cache, or downloading it")
    try:
        found = snapshot_download(model, allow_patterns=list(files), local_files_only=not download)
        return Path(found)
    except GatedRepoError as error:
        raise ModelRefused(
            f"{model} is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelRefused(
            f"there is no folder and no hub repository {model} (or it is private and this machine "
            "is not logged in)"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        if not download:
            reason = "nothing is downloaded to look at it"
        elif constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set"
        else:
            reason = "the hub cannot be reached"
        raise ModelRefused(
            f"{model} is not in the local hub cache, and {reason}. Download it first, or give a "
            "local folder"
        ) from error
