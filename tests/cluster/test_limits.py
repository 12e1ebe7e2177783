"""What an ingress takes on: limits by model, a budget for retries, a thousand clients at once."""

import asyncio
import resource
from collections import Counter
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.limits import OpenRequests, RetryBudget, TooManyOpen
from configs.shoal import IngressConfig
from tests.cluster.conftest import MODEL_NAME, serve_ingress, simulated


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=60),
    most=st.integers(1, 5),
    most_tokens=st.integers(1, 100),
)
def test_what_is_open_stays_within_the_limits(
    steps: list[tuple[bool, int]], most: int, most_tokens: int
) -> None:
    config = IngressConfig(max_open_requests=most, max_open_tokens=most_tokens)
    limit, held = OpenRequests(), list[int]()
    for enters, tokens in steps:
        if enters:
            fits = not held or (len(held) < most and sum(held) + tokens <= most_tokens)
            try:
                limit.enter(tokens, config)
            except TooManyOpen:
                assert not fits
            else:
                assert fits
                held.append(tokens)
        elif held:
            limit.leave(held.pop(0), 1.0)
        assert (limit.count, limit.tokens) == (len(held), sum(held))


def test_who_is_refused_is_told_when_one_will_have_ended() -> None:
    config, limit = IngressConfig(max_open_requests=4), OpenRequests()
    for _ in range(4):
        limit.enter(10, config)
    limit.leave(10, 20.0)
    limit.enter(10, config)
    with pytest.raises(TooManyOpen, match="4 requests of this model") as caught:
        limit.enter(10, config)
    assert caught.value.retry_after_s == 5.0


def test_retries_are_a_share_of_the_traffic() -> None:
    budget = RetryBudget()
    num_spent = 0
    for _ in range(1000):
        budget.earn(0.2)
        num_spent += budget.spend() + budget.spend()
    assert num_spent == pytest.approx(210, abs=1)
    for _ in range(10_000):
        budget.earn(0.2)
    assert sum(budget.spend() for _ in range(100)) == 20, "saved up for one bad moment, not more"


def test_a_thousand_clients_at_once_are_served_or_told_when_to_come_back(
    model_folder: Path,
) -> None:
    config = simulated(step_s=0.002)
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": True,
    }
    statuses: Counter[int] = Counter()
    texts: Counter[bool] = Counter()

    async def one(client: httpx.AsyncClient, url: str) -> None:
        async with client.stream("POST", url, json=body) as reply:
            statuses[reply.status_code] += 1
            text = (await reply.aread()).decode()
            if reply.status_code == 200:
                texts[text.endswith("data: [DONE]\n\n") and text.count('"content":') >= 1] += 1
            else:
                assert int(reply.headers["retry-after"]) >= 1
                assert "600 requests of this model are open" in text

    async def everyone(url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            await asyncio.gather(*(one(client, url) for _ in range(1000)))

    with serve_ingress(config, model_folder, max_open_requests=600) as served:
        url = f"{served.url}/v1/chat/completions"
        asyncio.run(everyone(url))
        assert set(statuses) <= {200, 429}
        assert statuses[200] >= 600
        assert texts == {True: statuses[200]}
        served.wait_idle()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        asyncio.run(everyone(url))
        served.wait_idle()
        growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert growth_kib < 100 << 10
