"""The whole check: one part after the other, and one JSON at the end.

Invariant: it ends within its limits whatever a part does, and reports every part.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from bench.figures import Figures, report, show_phase
from bench.gpu_check.machine import describe_machine
from bench.gpu_check.parts import LIMITS_S, NAMES

_TOTAL_S = 570.0
"""Of the ten minutes that the check may take."""


@click.command(epilog="Example: bench/gpu_check.sh --json gpu.json")
@click.option("--device", default="cuda", show_default=True, help="torch device.")
@click.option(
    "--shapes",
    type=click.Choice(["full", "tiny"]),
    default="full",
    show_default=True,
    help="tiny: to see on a CPU that the check itself runs.",
)
@click.option(
    "--part",
    "names",
    multiple=True,
    type=click.Choice(NAMES),
    help="Only this one; may be repeated.  [default: all]",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
def main(device: str, shapes: str, names: tuple[str, ...], json_path: Path | None) -> None:
    """Compare kernels, graphs and whole models with their references on a GPU, and measure them.

    Exit code 0: whatever could run has passed; 1: something is wrong. Parts that cannot run here
    are reported with the reason."""
    began_s = time.monotonic()
    figures: Figures = {"benchmark": "gpu_check", "shapes": shapes, **describe_machine(device)}
    num_failed = 0
    for name in names or NAMES:
        limit_s = min(LIMITS_S[name], began_s + _TOTAL_S - time.monotonic())
        show_phase(f"{name} (at most {limit_s:.0f} s)")
        part_began_s = time.monotonic()
        found = _run(name, device, shapes, limit_s)
        figures |= {f"{name}_{key}": value for key, value in found["figures"].items()}
        figures[f"{name}_s"] = round(time.monotonic() - part_began_s, 1)
        figures[f"{name}_result"] = _verdict(found)
        num_failed += bool(found["failures"])
    figures["failed_parts"] = num_failed
    figures["total_s"] = round(time.monotonic() - began_s, 1)
    report(figures, json_path)
    sys.exit(1 if num_failed else 0)


def _verdict(found: dict[str, Any]) -> str:
    if found["failures"]:
        return "failed: " + "; ".join(found["failures"])
    return f"not_run: {found['not_run']}" if found["not_run"] else "passed"


def _run(name: str, device: str, shapes: str, limit_s: float) -> dict[str, Any]:
    """What the part's process reports, or that it did not."""
    failure = f"it was ended after {limit_s:.0f} s"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        command = [sys.executable, "-m", "bench.gpu_check.part", name]
        options = ["--device", device, "--shapes", shapes, "--out", str(out)]
        process = subprocess.Popen([*command, *options], start_new_session=True)
        try:
            code = process.wait(max(1.0, limit_s))
            failure = f"its process ended with code {code}"
        except subprocess.TimeoutExpired:
            pass
        finally:
            # With all that it may have started: compilers of kernels, say.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if out.is_file():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
    return {"figures": {}, "failures": [failure], "not_run": None}


if __name__ == "__main__":
    main()
