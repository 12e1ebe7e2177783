"""A model on two ranks under `shoal serve`: a rank is killed, its engine ends and is restarted, and
the streams go on there."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from cluster.ports import free_ports
from engine.models.resolve import resolve_model
from tests.cluster.live import Live, open_stream

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]

CONFIG = """
models:
  - name: good
    engine:
      model: {folder}
      dtype: float32
      threads: 2
      tensor_parallel_size: 2
      cache: {{num_blocks: 512}}
    placement: {{num_cpus: 2}}
    supervision: {{poll_interval_s: 200ms}}
ingress: {{port: {port}}}
"""


def save_model(folder: Path) -> Path:
    """A tiny model with the default one's tokenizer."""
    default = resolve_model("default", print)
    folder.mkdir()
    for path in default.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=49152,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("parallel")
    (port,) = free_ports(1)
    config = folder / "shoal.yaml"
    config.write_text(CONFIG.format(port=port, folder=save_model(folder / "model")))
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster", "serve", str(config)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            process_group=0,
        )
    assert process.stdout is not None
    try:
        if not any(line.startswith("curl") for line in process.stdout):
            pytest.fail(f"it did not start: {(folder / 'stderr').read_text()}")
        yield Live(f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def workers_of(pid: int) -> list[int]:
    """Its ranks, by the module that they run."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_child = f"\nPPid:\t{pid}\n" in (folder / "status").read_text()
            if is_child and b"engine.worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def test_a_killed_rank_costs_its_engine_and_no_stream(live: Live) -> None:
    undisturbed = open_stream(live, "good", max_tokens=300, temperature=0).text
    (engine,) = live.engines().values()
    (worker,) = workers_of(engine["pid"])
    stream = open_stream(live, "good", max_tokens=300, temperature=0)
    live.wait(lambda: live.engines()[engine["id"]]["running"] == 1)
    os.kill(worker, signal.SIGKILL)
    assert stream.num_tokens == 300
    assert stream.text == undisturbed
    live.wait(lambda: live.engines()[engine["id"]]["restarts"] == 1)
    live.wait_ready()
    after = live.engines()[engine["id"]]
    assert after["last_error"] == "rank 1: its process ended with code -9"
    assert after["pid"] != engine["pid"]
    assert len(workers_of(after["pid"])) == 1
    live.wait(lambda: not Path(f"/proc/{engine['pid']}").exists())
    assert live.ask().status_code == 200
