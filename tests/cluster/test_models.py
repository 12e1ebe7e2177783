"""`shoal models check` as a user runs it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster.commands.models import models
from tests.tiny_models import tiny_model

LLAMA_KV_BYTES = 2 * 3 * 2 * 16 * 4


def run(*arguments: str) -> Result:
    return CliRunner().invoke(models, ["check", *arguments])


def test_json_has_a_key_a_figure() -> None:
    folder = str(tiny_model("llama"))
    done = run(folder, "--device", "cpu", "--memory", "8MiB", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    weight_bytes = found["weight_bytes"]
    assert weight_bytes == (tiny_model("llama") / "model.safetensors").stat().st_size - header(
        tiny_model("llama") / "model.safetensors"
    )
    assert found == {
        "model": folder,
        "served": True,
        "path": found["path"],
        "reason": None if found["path"] == "native" else found["reason"],
        "model_type": "llama",
        "dtype": "float32",
        "weight_bytes": weight_bytes,
        "stored_bytes": weight_bytes,
        "kv_dtype": "float32",
        "kv_bytes_per_token": LLAMA_KV_BYTES,
        "max_model_len": 1024,
        "memory_bytes": 8 << 20,
        "is_converted_first": False,
        "kv_tokens": ((8 << 20) - weight_bytes) // (16 * LLAMA_KV_BYTES) * 16,
    }


def header(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_text_says_why_there_is_no_faster_path() -> None:
    done = run(str(tiny_model("gpt_oss")), "--dtype", "bfloat16")
    assert done.exit_code == 0
    assert "its own modules of transformers" in done.stdout
    assert "model type 'gpt_oss' is not one that it knows" in done.stdout
    assert "gpt_oss, bfloat16" in done.stdout


@pytest.mark.parametrize("as_json", [False, True])
def test_a_refusal_is_exit_code_1(tmp_path: Path, as_json: bool) -> None:
    done = run(str(tmp_path), *(["--json"] if as_json else []))
    assert done.exit_code == 1
    if as_json:
        found = json.loads(done.stdout)
        assert (found["served"], found["path"]) == (False, "refused")
        assert "no config.json" in found["reason"]
    else:
        assert done.stdout == ""
        assert "no config.json" in done.stderr


@pytest.mark.parametrize("memory", ["8 parsecs", "much", "-1"])
def test_memory_that_is_no_size_is_wrong_usage(memory: str) -> None:
    done = run(str(tiny_model("llama")), f"--memory={memory}")
    assert done.exit_code == 2
    assert "write it like 8GiB" in done.stderr
