"""Every kernel compiles and fits shared memory: of cards with little of it, which take the table's
default row, and of one with a row of its own. `compile_kernels` takes the others by name."""

import os
import subprocess
import sys

import pytest

KERNELS = {
    "_add_rms_norm",
    "_attend",
    "_best_of_chunk",
    "_best_of_row",
    "_copy",
    "_gated",
    "_merge_segments",
    "_rms_norm",
    "_rotate_and_write",
    "_write",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ["sm86", "sm90"])
def test_kernels_compile(architecture, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.triton.compile_kernels", architecture],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    name, count, *kernels = run.stdout.split()
    assert name == architecture
    assert set(kernels) == KERNELS
    assert int(count) > 25
