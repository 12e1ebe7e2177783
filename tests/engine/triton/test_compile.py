"""Every kernel compiles and fits shared memory: of one that has a row of its own in the table.
`compile_kernels` takes the others by name."""

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
def test_kernels_compile(tmp_path):
    architecture = "sm90"
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
