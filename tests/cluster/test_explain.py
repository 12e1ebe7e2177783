"""What is told of a request afterwards: where it went, what it found, where its time went."""

import gc
import json
import weakref

import httpx
import pytest
from click.testing import CliRunner

from cluster.commands.explain import explain
from cluster.explain import Trace, Traces, proxy_s
from cluster.generation import Generation
from cluster.postprocess import OutputRules
from cluster.preprocess import PreparedRequest
from cluster.routing.decision import Candidate, Decision, Reason
from cluster.tokenizer import Tokenizer
from engine.attempt import EngineRequest
from engine.wire import SamplingParams, TokenItem
from tests.cluster.conftest import MODEL_NAME, Served


def _decision(request_id: str) -> Decision:
    best, other = Candidate("a#0", 64, 0.25, 0.5), Candidate("b#0", 0, 0.0, 0.0)
    return Decision(request_id, Reason.CACHED, best, 36, (other,), num_replicas=2, num_tied=1)


@pytest.mark.parametrize(
    ("header", "expected"),
    [("t=1000500", 1.5), ("1001000", 1.0), ("t=9000000", 0.0), ("t=x", 0.0), (None, 0.0)],
)
def test_a_proxys_header_is_believed_when_it_is_credible(
    header: str | None, expected: float
) -> None:
    assert proxy_s(header, now=1002.0) == pytest.approx(expected)


def test_an_answer_is_explained_stage_by_stage(served: Served) -> None:
    text = "an unusual beginning " * 20
    ids = []
    for _ in range(2):
        body = {"model": MODEL_NAME, "prompt": text, "max_tokens": 4, "ignore_eos": True}
        reply = httpx.post(f"{served.url}/v1/completions", json=body)
        assert reply.headers["x-request-id"] == reply.json()["id"]
        ids.append(reply.json()["id"])
    cold, warm = (httpx.get(f"{served.url}/explain/{each}").json() for each in ids)
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] > 32
    assert warm["decisions"][0]["candidates"][0]["engine"] == warm["decisions"][0]["engine"]
    assert (warm["completion_tokens"], warm["is_over"]) == (4, True)
    stages = warm["stages_s"]
    parts = sum(stages[name] for name in ("preprocess", "route", "admit", "engine"))
    assert parts == pytest.approx(stages["ttft"], abs=1e-4)
    assert 0 < stages["prefill"] < stages["ttft"]
    assert stages["queue"] >= 0
    assert "unusual" not in json.dumps(warm)


def test_the_command_shows_it_and_says_what_it_does_not_know(served: Served) -> None:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    headers = {"x-request-start": "t=0"}
    reply = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers)
    result = CliRunner().invoke(explain, [reply.json()["id"], "--url", served.url])
    assert result.exit_code == 0, result.output
    for word in ("went to", "SCORE", "3 completion", "first token after", "prefill"):
        assert word in result.output
    result = CliRunner().invoke(explain, ["chatcmpl-none", "--url", served.url])
    assert result.exit_code == 1
    assert "no request 'chatcmpl-none'" in str(result.exception)


class _Silent:
    """A stream that never says anything."""

    def __aiter__(self) -> "_Silent":
        return self

    async def __anext__(self) -> TokenItem:
        raise StopAsyncIteration

    def abort(self) -> None:
        pass


def test_traces_are_bounded_and_keep_nothing_of_what_is_over(tokenizer: Tokenizer) -> None:
    traces = Traces("ingress")
    prepared = PreparedRequest((EngineRequest([1, 2, 3], SamplingParams()),), OutputRules())
    generation = Generation(prepared, [_Silent()], tokenizer)
    gone = weakref.ref(generation)
    for number in range(10):
        name = f"r{number}"
        traces.add(Trace(name, "m", [_decision(name)], generation), most=4)
    traces.close("r9")
    assert len(traces) == 4
    assert traces.explain("r5") is None
    shown = traces.explain("r9")
    assert shown is not None
    assert [one.engine for one in shown.decisions[0].candidates] == ["a#0", "b#0"]
    assert shown.decisions[0].candidates[0].score_s == 0.25
    for number in range(6, 9):
        traces.close(f"r{number}")
    del generation
    gc.collect()
    assert gone() is None
