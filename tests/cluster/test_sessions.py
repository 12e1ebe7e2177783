"""Requests of one session meet, over HTTP: two engines, the real application."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from configs.shoal import IngressConfig, RouterConfig
from engine.launcher import LocalEngine
from tests.cluster.test_cache_metrics import engines, ready, source
from tests.cluster.test_holding import Client, with_ingress

__all__ = ["engines", "source"]


async def engine_of(client: Client, number: int, headers: dict[str, str], **fields: Any) -> str:
    """Which engine took a prompt that nobody has seen; returns when both are idle again."""
    body = {"model": "m", "prompt": f"{number} {fields}{headers} " * 6, "max_tokens": 1, **fields}
    reply = await client.http.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    await asyncio.sleep(0.1)
    return reply.headers["x-shoal-engine"]


@pytest.mark.parametrize("by", ["X-Session-ID", "x-conversation", "prompt_cache_key", "user"])
def test_prompts_of_a_session_meet(source: Path, engines: list[LocalEngine], by: str) -> None:
    async def use(client: Client) -> None:
        if by == "x-conversation":
            client.ingress.configure(IngressConfig(session_header=by), RouterConfig())
        await ready(client, engines)
        is_header = by.lower().startswith("x-")
        where = []
        for session in ("a", "b", "c", "d", "e", "f"):
            headers, fields = ({by: session}, {}) if is_header else ({}, {by: session})
            where.append({await engine_of(client, n, headers, **fields) for n in range(3)})
        assert [len(each) for each in where] == [1] * 6
        assert len(set().union(*where)) == 2

    with_ingress(source, use)


def test_the_header_goes_before_the_body_and_is_bounded(
    source: Path, engines: list[LocalEngine]
) -> None:
    async def use(client: Client) -> None:
        await ready(client, engines)
        headers = {"X-Session-ID": "mine"}
        where = {await engine_of(client, n, headers, user=f"user {n}") for n in range(8)}
        assert len(where) == 1
        body = {"model": "m", "prompt": "Hello", "max_tokens": 1}
        for path in ("/v1/completions", "/v1/chat/completions"):
            if path.endswith("chat/completions"):
                body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            headers = {"X-Session-ID": "x" * 1025}
            reply = await client.http.post(path, json=body, headers=headers)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, "X-Session-ID")
            assert error["message"] == (
                "the header X-Session-ID may have at most 1024 characters, got 1025"
            )

    with_ingress(source, use)
