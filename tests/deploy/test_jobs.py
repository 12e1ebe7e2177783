"""A batch on the cluster by `ray job submit`, killed half-way and submitted again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cluster.reaper import marked
from tests.deploy.rig import Deployed

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]

NUM_ROWS = 500
_NOT_YET = "No available agent to submit job, please try again later"
"""What Ray says while it cannot take a job yet; nothing has been submitted then."""


def submit(deployed: Deployed, *arguments: str) -> "subprocess.Popen[str]":
    """`ray job submit … -- shoal batch …`, which follows the job and ends as it does."""
    ray = Path(sys.executable).with_name("ray")
    return subprocess.Popen(
        [ray, "job", "submit", "--address", deployed.address, "--", "shoal", "batch", *arguments],
        env={**os.environ, **deployed.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def batch_pids(deployed: Deployed, path: Path) -> list[int]:
    """Processes of the cluster that work on this file."""
    found = []
    for pid in marked(f"RAY_AUTH_TOKEN_PATH={deployed.environment['RAY_AUTH_TOKEN_PATH']}"):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if str(path).encode() in command and b"batch" in command and b"--" not in command:
                found.append(pid)
    return found


def test_a_job_killed_half_way_and_submitted_again(deployed: Deployed, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "good", "prompt": f"row {number}", "max_tokens": 10},
        }
        for number in range(NUM_ROWS)
    ]
    rows[7]["body"]["max_tokens"] = 0  # type: ignore[index]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(source), str(target), "--url", deployed.url, "--concurrency", "4"]

    job = submit(deployed, *arguments)
    end_s = time.monotonic() + 90
    while not target.exists() or target.read_bytes().count(b"\n") < NUM_ROWS // 3:
        if job.poll() is not None:
            said = job.communicate()[0]
            assert _NOT_YET in said, said
            job = submit(deployed, *arguments)
        assert time.monotonic() < end_s, job.communicate()[0]
        time.sleep(0.02)
    for pid in batch_pids(deployed, source):
        os.kill(pid, signal.SIGKILL)
    said = job.communicate(timeout=60)[0]
    assert job.returncode != 0, said
    num_before = target.read_bytes().count(b"\n")
    assert NUM_ROWS // 3 <= num_before < NUM_ROWS

    said = _NOT_YET
    while _NOT_YET in said and time.monotonic() < end_s + 60:
        job = submit(deployed, *arguments)
        said = job.communicate(timeout=120)[0]
    assert f"{num_before} were there already" in said, said
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert Counter(row["custom_id"] for row in written) == Counter(
        f"row-{number}" for number in range(NUM_ROWS)
    )
    statuses = Counter(row["response"]["status_code"] for row in written)
    assert statuses == {200: NUM_ROWS - 1, 400: 1}
    tokens = {
        row["response"]["body"]["usage"]["completion_tokens"]
        for row in written
        if row["response"]["status_code"] == 200
    }
    assert tokens == {10}
