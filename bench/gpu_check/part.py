"""Runs one part of the check in this process and writes what it found.

Invariant: the file is written whatever happens in Python; where it is missing, the process was
ended or died.
"""

import json
import traceback
from pathlib import Path

import click
import torch

from bench.figures import show_phase
from bench.gpu_check.parts import NAMES, NotRun, Setting, part


@click.command()
@click.argument("name", type=click.Choice(NAMES))
@click.option("--device", required=True)
@click.option("--shapes", type=click.Choice(["full", "tiny"]), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(name: str, device: str, shapes: str, out: Path) -> None:
    """Run part NAME; its figures, failures and reasons go to OUT as JSON."""
    setting = Setting(torch.device(device), shapes == "tiny", show_phase)
    report: dict[str, object] = {"figures": {}, "failures": [], "not_run": None}
    try:
        result = part(name)(setting)
        report |= {"figures": result.figures, "failures": result.failures}
    except NotRun as reason:
        report["not_run"] = str(reason)
    except ModuleNotFoundError as error:
        report["not_run"] = f"the package {error.name!r} is not installed"
    except Exception as error:
        traceback.print_exc()
        report["failures"] = [f"{type(error).__name__}: {error}"]
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
