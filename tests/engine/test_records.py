"""What is kept of a load: the next one is as good, and asks nothing twice."""

import shutil
import subprocess
import sys

import pytest
import torch

from engine.models import fused_decoder, records
from engine.models.fused_decoder import FusedDecoder
from engine.models.records import find_record
from tests.tiny_models import FUSED_NAMES, tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """Models that were compared, in a cache that begins empty."""
    monkeypatch.setattr(records, "user_cache", lambda: tmp_path / "cache")
    calls = []
    verify = fused_decoder.verify_model
    monkeypatch.setattr(
        fused_decoder, "verify_model", lambda pair: (calls.append(pair), verify(pair))
    )
    return calls


@pytest.mark.parametrize("name", FUSED_NAMES)
def test_a_checkpoint_is_compared_once(name, compared):
    first = FusedDecoder.load(tiny_model(name), CPU)
    record = find_record(tiny_model(name), "auto", CPU)
    assert record is not None
    assert record.traits == first.traits
    second = FusedDecoder.load(tiny_model(name), CPU)
    assert second.traits == first.traits
    assert second.weight_bytes == first.weight_bytes
    assert len(compared) == 1


def test_another_dtype_config_or_weight_is_another_checkpoint(compared, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    FusedDecoder.load(folder, CPU)
    FusedDecoder.load(folder, CPU, "bfloat16")
    assert len(compared) == 2

    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"rope_theta": 10000', '"rope_theta": 9000'))
    assert (folder / "config.json").read_text() != config
    assert FusedDecoder.load(folder, CPU) is not None
    assert len(compared) == 3

    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    # The lowest bit of the first weight.
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    path.write_bytes(data)
    FusedDecoder.load(folder, CPU)
    assert len(compared) == 4


def test_changed_code_asks_again(compared, monkeypatch):
    FusedDecoder.load(tiny_model("llama"), CPU)
    monkeypatch.setattr(records, "_CODE", ("models",))
    FusedDecoder.load(tiny_model("llama"), CPU)
    assert len(compared) == 2


def test_a_record_that_cannot_be_read_or_kept_is_none(compared, tmp_path):
    FusedDecoder.load(tiny_model("llama"), CPU)
    (path,) = (tmp_path / "cache" / "verified").iterdir()
    path.write_text('{"traits": {"model_type": 1}}')
    FusedDecoder.load(tiny_model("llama"), CPU)
    assert len(compared) == 2
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("not a folder")
    FusedDecoder.load(tiny_model("llama"), CPU)
    assert len(compared) == 3


def test_a_second_start_needs_no_transformers():
    folder = tiny_model("llama")
    FusedDecoder.load(folder, CPU)
    code = (
        "import sys\n"
        "from configs.engine import CacheConfig, EngineConfig\n"
        "from engine.executors.model import ModelExecutor\n"
        f"config = EngineConfig(model={str(folder)!r}, device='cpu', "
        "cache=CacheConfig(num_blocks=8))\n"
        "assert ModelExecutor.load(config).info.vocab_size > 0\n"
        "print('transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
