"""What leaves preprocessing fits the model; what does not is refused with the figures."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.preprocess import (
    GenerationRequest,
    InvalidRequest,
    ModelLimits,
    PreparedRequest,
    Preprocessor,
)
from cluster.tokenizer import TemplateRefused, Tokenizer
from engine.errors import ModelRefused, RequestRejected
from engine.wire import RejectCode, SamplingParams

_LIMITS = ModelLimits(max_model_len=100, vocab_size=49152, end_token_ids=frozenset({2}))
_HELLO = [{"role": "user", "content": "Hello"}]

Prepare = Callable[..., PreparedRequest]


@pytest.fixture
def prepare(tokenizer: Tokenizer) -> Prepare:
    def run(prompt: Any = _HELLO, **fields: Any) -> PreparedRequest:
        preprocessor = Preprocessor(tokenizer, num_threads=1)
        request = GenerationRequest(prompt, **{"sampling": SamplingParams(), **fields})
        try:
            return asyncio.run(preprocessor.prepare("id", request, _LIMITS))
        finally:
            preprocessor.close()

    return run


@pytest.fixture
def with_template(model_folder: Path) -> Callable[[str | None], Tokenizer]:
    def load(template: str | None) -> Tokenizer:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
        tokenizer.chat_template = template
        return Tokenizer(tokenizer)

    return load


def test_the_models_own_template_and_special_tokens(prepare: Prepare, tokenizer: Tokenizer) -> None:
    prepared = prepare(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        max_tokens=5,
        stops=("x",),
    )
    assert "".join(map(tokenizer.token_text, prepared.choices[0].prompt_ids)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prepared.choices[0].prompt_ids[0] == 1  # one token, not its letters
    assert prepared.rules.stops == ("x",)
    assert prepared.rules.end_token_ids == {2}


def test_choices_share_prompt_and_seed_and_differ_in_number(prepare: Prepare) -> None:
    choices = prepare(num_choices=3, max_tokens=5).choices
    assert [c.sampling.choice for c in choices] == [0, 1, 2]
    assert len({c.sampling.seed for c in choices}) == 1
    assert len({c.request_id for c in choices}) == 3
    assert choices[0].prompt_ids == choices[2].prompt_ids


def test_a_request_without_seed_gets_a_random_one(prepare: Prepare) -> None:
    assert prepare().choices[0].sampling.seed != prepare().choices[0].sampling.seed
    assert prepare(seed=7).choices[0].sampling.seed == 7
    assert 0 <= prepare(seed=-7).choices[0].sampling.seed < 1 << 63


def test_max_tokens_defaults_to_what_is_left(prepare: Prepare) -> None:
    prepared = prepare()
    assert prepared.choices[0].sampling.max_tokens == 100 - prepared.num_prompt_tokens


def test_context_overflow_names_both_numbers(prepare: Prepare) -> None:
    num_prompt = prepare().num_prompt_tokens
    with pytest.raises(RequestRejected, match=rf"limit is 100 .* {num_prompt} and 90 are") as info:
        prepare(max_tokens=90)
    assert info.value.code is RejectCode.CONTEXT_LENGTH
    with pytest.raises(RequestRejected, match="limit is 100 tokens, but the prompt has 4"):
        prepare([{"role": "user", "content": "word " * 400}])


def test_limits_of_the_model_name_field_and_value(prepare: Prepare) -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias.*49152.*191222"):
        prepare(sampling=SamplingParams(logit_bias={191222: -100.0}))
    with pytest.raises(InvalidRequest, match=r"min_tokens must be at most max_tokens \(5\), got 6"):
        prepare(sampling=SamplingParams(min_tokens=6), max_tokens=5)
    with pytest.raises(InvalidRequest, match="no tokens"):
        prepare("")


def test_a_template_that_refuses_is_the_clients_error(
    with_template: Callable[[str | None], Tokenizer],
) -> None:
    refusing = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        refusing.render_chat(_HELLO)
    escaping = with_template("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateRefused):
        escaping.render_chat(_HELLO)
    with pytest.raises(TemplateRefused, match="no chat template"):
        with_template(None).render_chat(_HELLO)


def test_a_folder_without_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_the_ingress_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, cluster.ingress, cluster.commands.generate;"
        "print([name for name in ('torch', 'ray', 'bench') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
