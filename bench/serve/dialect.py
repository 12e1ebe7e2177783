"""The two OpenAI endpoints: where a request goes and what its body holds.

Invariant: a prompt begins with every prompt before it in its conversation and the answers to them,
unchanged; that is all a prefix cache can live on.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from bench.serve.prompts import Content

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """What every request of a run has in common."""

    api: Api
    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields as the user gave them; they come last and win."""


@dataclass(slots=True)
class History:
    """What was said in one conversation."""

    messages: list[tuple[Literal["system", "user", "assistant"], Content]] = field(
        default_factory=list
    )

    def as_chat(self) -> list[dict[str, Content]]:
        return [{"role": role, "content": content} for role, content in self.messages]

    def as_prompt(self) -> Content:
        """One text, with a line end before each of our messages but the first; or, of token ids,
        one list."""
        if all(isinstance(content, list) for _, content in self.messages):
            return [token_id for _, content in self.messages for token_id in content]  # type: ignore[misc]
        text = ""
        for role, content in self.messages:
            assert isinstance(content, str), "words and token ids in one conversation"
            text += "\n" + content if text and role != "assistant" else content
        return text


def request_body(options: BodyOptions, history: History, max_tokens: int) -> bytes:
    """The JSON of one streamed request."""
    prompt: dict[str, Any] = (
        {"messages": history.as_chat()}
        if options.api == "chat"
        else {"prompt": history.as_prompt()}
    )
    return msgspec.json.encode(
        {
            "model": options.model,
            **prompt,
            "max_tokens": max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if options.ignore_eos else {}),
            **options.extra,
        }
    )
