"""Streamed and whole answers are equal, and both are what the engine's tokens say.

The simulated engine draws uniformly from a real vocabulary, so that outputs are full of characters
split over tokens and of bytes that are no character. What it must draw is computed here anew.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import httpx

from cluster.tokenizer import Tokenizer
from configs.engine import SimulationConfig
from engine.executors.simulated import EOS_TOKEN_ID, draw, next_history
from engine.wire import SamplingParams
from tests.cluster.conftest import MODEL_NAME, VOCAB_SIZE, Served

_NUM_CASES = 200
_WORDS = ("Hello", "the sea", "naïve", "日本語の", "🐟🐠", "\n", " ", "1 + 1 =", "Ωμέγα")
_STOPS = ("e", " a", "in", "er", "st", "\n", "é", "本")
_SIMULATION = SimulationConfig(vocab_size=VOCAB_SIZE, max_model_len=8192, eos_period=200)


@dataclass
class Choice:
    """One choice, whichever way it came."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)

    def extend(self, text: str, logprobs: dict[str, Any] | None) -> None:
        self.text += text
        for name, values in (logprobs or {}).items():
            if values is not None:
                self.logprobs.setdefault(name, []).extend(values)


@dataclass
class Case:
    """A request, and what each of its choices must be made of."""

    path: str
    body: dict[str, Any]
    prompts: list[tuple[str, list[int]]]
    """Text that is echoed, and the ids that the engine gets."""

    def outputs(self) -> list[list[int]]:
        """The token ids of each choice if no stop string were to end it."""
        return [
            _drawn(ids, choice, self.body)
            for _, ids in self.prompts
            for choice in range(self.body["n"])
        ]


def _drawn(prompt_ids: Sequence[int], choice: int, body: dict[str, Any]) -> list[int]:
    history = reduce(next_history, prompt_ids, 0)
    sampling = SamplingParams(seed=body["seed"], choice=choice)
    ids: list[int] = []
    while len(ids) < body["max_tokens"]:
        if EOS_TOKEN_ID in ids[-1:] and len(ids) >= body.get("min_tokens", 0):
            break
        ids.append(draw(history, len(prompt_ids) + len(ids), sampling, _SIMULATION))
        history = next_history(history, ids[-1])
    return ids


def _case(rng: random.Random, tokenizer: Tokenizer) -> Case:
    is_chat = rng.random() < 0.5
    texts = [
        " ".join(rng.choices(_WORDS, k=rng.randint(1, 12)))
        for _ in range(1 if is_chat else rng.randint(1, 3))
    ]
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "seed": rng.randrange(1 << 63),
        "n": rng.choice((1, 1, 2, 3)),
        "max_tokens": rng.choice((1, 2, 8, 30, 60)),
    }
    if is_chat:
        body["messages"] = [{"role": "user", "content": texts[0]}]
        rendered = tokenizer.render_chat(body["messages"])
        prompts = [(texts[0], tokenizer.encode(rendered, add_special_tokens=False))]
        if rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    else:
        ids = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
        if rng.random() < 0.4:
            # Often inside a character: none of it may show in the output.
            ids = [prompt[: rng.randint(1, len(prompt))] for prompt in ids]
            texts = [tokenizer.decode(prompt) for prompt in ids]
            body["prompt"] = ids
        else:
            body["prompt"] = texts
        if len(texts) == 1 and rng.random() < 0.5:
            body["prompt"] = body["prompt"][0]
        prompts = list(zip(texts, ids, strict=True))
        body |= rng.choice(({"echo": True}, {"logprobs": rng.randint(0, 5)}, {}, {}))
    case = Case("/v1/chat/completions" if is_chat else "/v1/completions", body, prompts)
    if rng.random() < 0.6:
        body["stop"] = _stops(rng, tokenizer.decode(case.outputs()[0]))
        body["min_tokens"] = rng.randint(0, body["max_tokens"]) if rng.random() < 0.3 else 0
    return case


def _stops(rng: random.Random, output: str) -> list[str]:
    """Common ones, and a piece of what the first choice is about to say."""
    stops = rng.sample(_STOPS, k=rng.randint(0, 2))
    start = rng.randrange(len(output)) if output else 0
    piece = output[start : start + rng.randint(2, 9)]
    return [*stops, piece] if piece else stops or ["e"]


async def _whole(client: httpx.AsyncClient, case: Case) -> tuple[dict[int, Choice], Any]:
    reply = await client.post(case.path, json=case.body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    choices = {}
    for part in answer["choices"]:
        choice = choices[part["index"]] = Choice(finish_reason=part["finish_reason"])
        text = part["message"]["content"] if "message" in part else part["text"]
        choice.extend(text, part["logprobs"])
    return choices, answer["usage"]


async def _streamed(client: httpx.AsyncClient, case: Case) -> tuple[dict[int, Choice], Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = await client.post(case.path, json=case.body | options)
    assert reply.status_code == 200, reply.text
    events = [event.removeprefix("data: ") for event in reply.text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert [chunk["choices"] for chunk in chunks[-1:]] == [[]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    choices: dict[int, Choice] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        choice = choices.setdefault(part["index"], Choice())
        assert choice.finish_reason is None, "nothing follows a choice's end"
        text = part["delta"].get("content", "") if "delta" in part else part["text"]
        choice.extend(text, part["logprobs"])
        choice.finish_reason = part["finish_reason"]
    return choices, chunks[-1]["usage"]


def _check(case: Case, choices: dict[int, Choice], usage: Any, tokenizer: Tokenizer) -> None:
    """Compares an answer with what was drawn, for its own part."""
    body, n = case.body, case.body["n"]
    stops, min_tokens = body.get("stop", []), body.get("min_tokens", 0)
    outputs = case.outputs()
    assert sorted(choices) == list(range(len(outputs)))
    for index, ids in enumerate(outputs):
        echoed = case.prompts[index // n][0] if body.get("echo") else ""
        choice = choices[index]
        assert choice.text.startswith(echoed)
        text = choice.text[len(echoed) :]
        ended = ids[-1] == EOS_TOKEN_ID
        full = tokenizer.decode(ids[:-1] if ended else ids)
        # A stop string counts when it is completed by token `min_tokens` or a later one.
        before = tokenizer.decode(ids[: max(0, min_tokens - 1)])
        ends = [
            (start + len(stop), start)
            for stop in stops
            if (start := full.find(stop, max(0, len(before) + 1 - len(stop)))) >= 0
        ]
        if before.endswith("\ufffd"):
            assert full.startswith(text)  # which token completes what is not plain from the text
        else:
            assert text == (full[: min(ends)[1]] if ends else full)
            assert choice.finish_reason == ("stop" if ends or ended else "length")
        if "text_offset" in choice.logprobs:
            _check_offsets(text, choice.logprobs)
    assert usage["prompt_tokens"] == sum(len(ids) for _, ids in case.prompts)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if not stops:
        assert usage["completion_tokens"] == sum(map(len, outputs))


def _check_offsets(text: str, logprobs: dict[str, list[Any]]) -> None:
    assert len({len(values) for values in logprobs.values()}) == 1
    assert logprobs["text_offset"][0] == 0
    for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        is_special = token.startswith("<") and token.endswith(">")
        if not (token.startswith("bytes:") or is_special) and start + len(token) <= len(text):
            assert text.startswith(token, start)


async def _run(served: Served, cases: list[Case], tokenizer: Tokenizer) -> list[Choice]:
    seen: list[Choice] = []
    at_once = asyncio.Semaphore(12)

    async def one(client: httpx.AsyncClient, case: Case) -> None:
        async with at_once:
            whole, streamed = await asyncio.gather(_whole(client, case), _streamed(client, case))
        assert streamed[0] == whole[0], case.body
        for usage in (whole[1], streamed[1]):
            del usage["prompt_tokens_details"]  # the second of two finds what the first has left
        assert streamed[1] == whole[1], case.body
        _check(case, *whole, tokenizer)
        seen.extend(whole[0].values())

    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        await asyncio.gather(*(one(client, case) for case in cases))
    return seen


def test_streamed_and_whole_answers_agree(served: Served, tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    cases = [_case(rng, tokenizer) for _ in range(_NUM_CASES)]
    seen = asyncio.run(_run(served, cases, tokenizer))
    # That the cases are about something:
    reasons = [choice.finish_reason for choice in seen]
    assert min(reasons.count("stop"), reasons.count("length")) > 100
    assert sum("\ufffd" in choice.text for choice in seen) > 20
    assert sum(any(ord(char) > 0x3000 for char in choice.text) for choice in seen) > 50
    assert sum(bool(choice.logprobs) for choice in seen) > 100
    served.wait_idle()
