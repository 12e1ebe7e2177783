"""The GPU check runs to its end on a CPU, with shapes that take seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu_check import __main__ as check
from bench.gpu_check import graphs
from bench.gpu_check.parts import LIMITS_S, NAMES, Setting, part
from bench.gpu_check.shapes import EIGHT_BILLION, ONE_BILLION, TINY
from engine.kernels.padded_batch import PaddedDecodeBatch
from engine.kernels.torch_ops import TorchOps
from engine.models.fused_decoder import FusedDecoder
from engine.models.merged_weights import random_weights
from engine.models.op_decoder import OpDecoder

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_to_its_end_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = subprocess.run(
        [ROOT / "bench" / "gpu_check.sh", "--device", "cpu", "--shapes", "tiny", "--json", path],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(path.read_text())
    assert done.returncode == 0, done.stderr
    assert (found["device"], found["shapes"], found["failed_parts"]) == ("cpu", "tiny", 0)
    for name in NAMES:
        assert found[f"{name}_result"] == "passed" or found[f"{name}_result"].startswith(
            "not_run: "
        )
    assert found["greedy_result"] == found["memory_result"] == found["speed_8b_result"] == "passed"
    assert found["greedy_tokens"] == found["greedy_tokens_equal"] == 64
    assert found["greedy_fp8_kv_tokens"] == found["greedy_fp8_kv_tokens_equal"] == 64
    assert found["memory_host_loaded_blocks"] > 0
    assert found["compiled_graphs"] >= 3
    assert found["compiled_error"] < 0.05
    for key in (
        "copy_bytes_per_s",
        "decode_b64_tokens_per_s",
        "fp8_kv_decode_b64_tokens_per_s",
        "prefill_flops_per_s",
    ):
        assert found[f"speed_1b_{key}"] > 0
    assert found["torch"] == torch.__version__.partition("+")[0] or "+" in found["torch"]
    assert all(isinstance(value, str | int | float) for value in found.values()), "flat keys"


def test_all_parts_exist_and_fit_in_ten_minutes() -> None:
    for name in NAMES:
        assert callable(part(name))
    assert sum(LIMITS_S.values()) <= check._TOTAL_S < 600


def script(folder: Path, text: str) -> str:
    """A stand-in for Python that runs `text` in place of a part; its last argument is the file."""
    path = folder / "python"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("sleep 60", "it was ended after 1 s"),
        ("kill -SEGV $$", "its process ended with code -11"),
        ("exit 7", "its process ended with code 7"),
    ],
)
def test_a_part_that_hangs_or_dies_is_reported(tmp_path, monkeypatch, text, failure) -> None:
    monkeypatch.setattr(sys, "executable", script(tmp_path, text))
    found = check._run("kernels", "cpu", "tiny", 1.0)
    assert found["failures"] == [failure]
    assert check._verdict(found) == f"failed: {failure}"


def test_shapes_have_the_sizes_of_their_names() -> None:
    embedding = 128256 * 2048
    assert ONE_BILLION.product_elements == pytest.approx(1.236e9, rel=1e-3)
    assert EIGHT_BILLION.product_elements + 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)
    assert ONE_BILLION.prefill_flops(1) == pytest.approx(
        2 * (ONE_BILLION.product_elements - embedding) + 2 * embedding, rel=1e-3
    )


def test_random_weights_fill_every_place() -> None:
    traits, decoder = TINY.traits(torch.float32)
    first = random_weights(traits, decoder, torch.device("cpu"))
    again = random_weights(traits, decoder, torch.device("cpu"))
    assert all(tensor.isfinite().all() for tensor in first.tensors.values())
    assert torch.equal(first.tensors["0.qkv"], again.tensors["0.qkv"])
    assert first.tensors["1.gate_up"].std() == pytest.approx(TINY.hidden_size**-0.5, rel=0.1)
    assert first.tensors["final_norm"].unique().tolist() == [1.0]
    elements = sum(tensor.numel() for tensor in first.tensors.values() if tensor.dim() > 1)
    assert elements == TINY.product_elements + TINY.vocab_size * TINY.hidden_size


@pytest.mark.parametrize("num_experts", [0, *graphs._EXPERTS])
def test_graphs_are_compared_with_and_without_experts(num_experts: int) -> None:
    """With a capture that runs the step again."""
    device = torch.device("cpu")
    traits, decoder = TINY.traits(torch.float32)
    if num_experts:
        decoder = graphs._with_experts(decoder, num_experts, TINY)
    tensors = random_weights(traits, decoder, device).tensors
    model = FusedDecoder(
        traits, decoder, OpDecoder(traits, decoder, tensors, TorchOps()), device, 0
    )
    setting = Setting(device, True, lambda phase: None)
    found = graphs.compare_with_eager(setting, model, PaddedDecodeBatch, lambda step: step)
    assert found.failures == []
    assert len([key for key in found.figures if key.endswith("_error")]) == 4
