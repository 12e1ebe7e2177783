"""Compiles the CPU kernels, once for each machine type, and loads them.

Invariant: the library in the cache is complete and fits: its folder's name is a digest of the
sources, torch, the compiler, its flags and the processor's features. It is built under another name
and renamed when it is there, and a lock keeps two engines from building at once.
"""

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.user_cache import locked, user_cache

_log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++20")
_LIBRARY = "shoal_cpu.so"
# A slow core with nothing else to do takes two minutes.
_BUILD_TIMEOUT_S = 900


def cpu_kernels(progress: Callable[[str], None] = lambda message: None) -> bool:
    """Whether ``torch.ops.shoal_cpu`` is there; the first call compiles it where it has to (about
    45 seconds on two cores) and loads it. Where that fails it logs one warning with the reason."""
    try:
        library = _ensure_library(progress)
        if not _is_loaded():
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except Exception as error:
        _warn_once(f"no CPU kernels, so plain torch computes, slowly: {error}")
        return False
    return True


def why_no_kernels() -> str | None:
    """What stands against compiling them here, as far as it shows without doing so."""
    try:
        _compiler()
    except Exception as error:
        return str(error)
    return None


def _is_loaded() -> bool:
    """Loading a second build into one process would end it."""
    return hasattr(torch.ops.shoal_cpu, "paged_attention")


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def _ensure_library(progress: Callable[[str], None]) -> Path:
    root = user_cache() / "kernels"
    folder = root / _digest()
    library = folder / _LIBRARY
    if library.is_file():
        return library
    root.mkdir(parents=True, exist_ok=True)

    def on_wait() -> None:
        progress("waiting for another process that compiles the CPU kernels")

    with locked(root / f".{folder.name}.lock", on_wait):
        if library.is_file():
            return library
        progress("compiling the CPU kernels (once; about a minute)")
        began = time.monotonic()
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
        try:
            _compile(temporary)
            temporary.chmod(0o755)
            # Only what an interrupted run left behind can be in the way.
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        progress(f"compiled the CPU kernels in {time.monotonic() - began:.0f} s")
    return library


def _compile(folder: Path) -> None:
    """In a process of its own, whose PATH finds the ninja of this environment."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "engine.kernels.cpu.build", str(folder), *_FLAGS],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=_BUILD_TIMEOUT_S,
    )
    if done.returncode != 0 or not (folder / _LIBRARY).is_file():
        lines = (done.stderr + done.stdout).strip().splitlines()
        errors = [line for line in lines if "error: " in line] or lines[-1:] or ["no output"]
        raise RuntimeError(f"compiling them failed: {errors[0].strip()}")


def _sources() -> list[Path]:
    folder = Path(__file__).parent
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])


def _digest() -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    facts = [torch.__version__, _compiler(), *_FLAGS, platform.machine(), _processor()]
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()


def _compiler() -> str:
    """What the compiler that torch would call says of itself."""
    from torch.utils.cpp_extension import get_cxx_compiler

    name: str = get_cxx_compiler()  # type: ignore[no-untyped-call]
    if shutil.which(name) is None:
        raise RuntimeError(f"there is no C++ compiler ({name})")
    done = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=60)
    return done.stdout


def _processor() -> str:
    """What ``-march=native`` goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _build_into(folder: str, flags: list[str]) -> None:
    from torch.utils.cpp_extension import load

    load(
        name=Path(_LIBRARY).stem,
        sources=[str(path) for path in _sources() if path.suffix == ".cpp"],
        extra_cflags=flags,
        build_directory=folder,
        is_python_module=False,
    )


if __name__ == "__main__":
    _build_into(sys.argv[1], sys.argv[2:])
