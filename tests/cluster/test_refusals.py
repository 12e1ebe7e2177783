"""Whatever value any field of a request has, the answer is an answer or a 4xx in OpenAI's form."""

import asyncio
import json
import time
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import httpx
import pytest
from pydantic import BaseModel

from cluster.chat import ChatCompletionRequest
from cluster.completions import CompletionRequest
from tests.cluster.conftest import MODEL_NAME, Served

_ENDPOINTS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"model": MODEL_NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    ),
    "/v1/completions": (
        CompletionRequest,
        {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1},
    ),
}
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 31, 10**30, 0.5, 1e308, "", "1", "x" * 5000, "\ud800",
    [], [None], [[]], [1.5], ["x"], ["\ud800"], ["x"] * 5000, [{}],
    {}, {"x": 1}, {"1": 1e308}, {"type": "text"}, {"a": {"b": {"c": []}}},
)  # fmt: skip
_UNTYPED = {"prompt": {str, list}, "suffix": {NoneType}}
"""Fields that look at their value themselves."""


def _kinds(annotation: Any) -> Iterator[type]:
    """The JSON types that a field takes."""
    if get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield dict
    elif get_origin(annotation) in (list, dict):
        yield get_origin(annotation)
    elif get_args(annotation):
        for part in get_args(annotation):
            if (
                not isinstance(part, type)
                or part in (int, float, bool, str, NoneType)
                or (issubclass(part, BaseModel))
            ):
                yield from _kinds(part)
    elif annotation is float:
        yield from (int, float)
    elif isinstance(annotation, type):
        yield annotation


def _cases(model: type[BaseModel]) -> Iterator[tuple[str, Any, bool]]:
    """Field, value, and whether its type is one that the field does not take."""
    for name, field in model.model_fields.items():
        kinds = _UNTYPED.get(name) or set(_kinds(field.annotation))
        assert kinds, name
        for value in _VALUES:
            yield name, value, type(value) not in kinds


@pytest.mark.parametrize("path", _ENDPOINTS)
def test_no_value_is_a_500_and_a_wrong_type_is_a_400(served: Served, path: str) -> None:
    model, body = _ENDPOINTS[path]
    headers = {"content-type": "application/json"}
    statuses: list[int] = []

    async def one(client: httpx.AsyncClient, name: str, value: Any, is_wrong: bool) -> None:
        content = json.dumps(body | {name: value}).encode()
        reply = await client.post(path, content=content, headers=headers)
        statuses.append(reply.status_code)
        told = f"{name} = {value!r:.80}: {reply.text:.300}"
        assert reply.status_code in ((400, 404) if is_wrong or name == "model" else (200, 400)), (
            told
        )
        if reply.status_code == 200:
            return
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, told
        assert error["type"] == "invalid_request_error", told
        assert 0 < len(error["message"]) < 400, told
        if is_wrong:
            assert error["param"].split(".")[0] == name, told

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(base_url=served.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(one(client, *case) for case in _cases(model)))

    asyncio.run(all_of_them())
    assert min(statuses.count(200), statuses.count(400)) > 50
    served.wait_idle()


@pytest.mark.parametrize("path", _ENDPOINTS)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"17", b"\xff\xfe", b"[" * 200_000, b"{}",
        b'{"model": 1}', b'{"model": "simulated"}', b'{"model": "\\ud800"}', b'{"\\ud800": 1}',
        b'{"model": "simulated", "temperature": NaN}', b'{"model": "simulated", "seed": 1e400}',
        b'{"model": "simulated", "n": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_a_malformed_body_is_a_400(served: Served, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{served.url}{path}", content=body, headers=headers)
    assert reply.status_code == 400, reply.text
    assert 0 < len(reply.json()["error"]["message"]) < 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


_MANY = 300_000


@pytest.mark.parametrize("path", _ENDPOINTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"stop": [1] * _MANY},
        {"logit_bias": dict.fromkeys(map(str, range(-_MANY, 0)), 1)},
        dict.fromkeys(map(str, range(_MANY)), 1),
        {"messages": [1] * _MANY},
        {"messages": [dict.fromkeys(map(str, range(_MANY)), 1)]},
        {"messages": [{"role": "user", "content": [1] * _MANY}]},
        {"metadata": dict.fromkeys(map(str, range(_MANY)), 1)},
        {"prompt": [1] * _MANY + ["x"]},
        {"prompt": [[1]] * _MANY},
    ],
)
def test_many_bad_entries_are_refused_quickly(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    """One report an entry would hold up everyone for many seconds."""
    body = _ENDPOINTS[path][1] | fields
    began_s = time.monotonic()
    reply = httpx.post(f"{served.url}{path}", json=body, timeout=60)
    assert reply.status_code == 400
    assert time.monotonic() - began_s < 2
