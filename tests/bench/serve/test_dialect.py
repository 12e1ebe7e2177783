"""Bodies as the two endpoints want them; a prompt begins with all that was said before."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bench.serve.dialect import BodyOptions, History, request_body


def _body(options: BodyOptions, history: History) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(request_body(options, history, max_tokens=7))
    return body


def test_chat() -> None:
    history = History([("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi")])
    assert _body(BodyOptions("chat", "m"), history) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
        ],
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_completions_of_text_and_of_token_ids() -> None:
    options = BodyOptions("completions", "m")
    assert _body(options, History([("system", "a b"), ("user", "c")]))["prompt"] == "a b\nc"
    assert _body(options, History([("system", [1, 2]), ("user", [3])]))["prompt"] == [1, 2, 3]


def test_fields_that_a_user_gives_win() -> None:
    options = BodyOptions("chat", "m", 0.7, ignore_eos=False, extra={"max_tokens": 3, "top_k": 5})
    body = _body(options, History([("user", "Hello")]))
    assert (body["max_tokens"], body["top_k"], body["temperature"]) == (3, 5, 0.7)
    assert "ignore_eos" not in body


@given(st.text(min_size=1), st.lists(st.tuples(st.text(), st.text(min_size=1)), max_size=5))
def test_prompts_grow_at_the_end(first: str, later: list[tuple[str, str]]) -> None:
    history = History([("user", first)])
    before = history.as_prompt()
    for answer, question in later:
        history.messages += [("assistant", answer), ("user", question)]
        prompt = history.as_prompt()
        assert isinstance(prompt, str)
        assert isinstance(before, str)
        assert prompt.startswith(before + answer)
        before = prompt
