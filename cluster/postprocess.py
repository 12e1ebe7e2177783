"""From an engine's tokens to a client's text: the last stage of a request. Pure.

Invariant: what is shown depends on the sequence of tokens only, never on how they were grouped on
the way, so that a streamed answer and a whole one are equal. Text that could still change is held
back: the bytes of an unfinished character, and whatever may yet become a stop string.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.wire import Finish, FinishReason, TokenItem, TokenLogprobs

_REPLACEMENT = "\ufffd"
_UNFINISHED_TOKENS = 3
"""An unfinished UTF-8 character has at most three bytes, and a token has at least one."""
_WINDOW_TOKENS = 32


class TextDecoder(Protocol):
    """The part of `Tokenizer` that this stage needs."""

    special_ids: frozenset[int]

    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Text of a growing token sequence, piece by piece; the pieces join to the whole decode.

    The method is that of vLLM and TGI: decode a window that starts at text already shown, and show
    what is new unless it ends in an unfinished character. `tokenizers.DecodeStream` does the same,
    but keeps the tail at the end of the output, raises on some byte sequences, and takes quadratic
    time on a run of bytes that never makes a character, which a client can ask for.
    """

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._num_shown_tokens = 0
        """Tokens at the window's start whose text is out in full."""
        self._num_shown_chars = 0
        """Characters of the window's text that are out."""

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        if token_id in self._decoder.special_ids:
            return ""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        if not text.endswith(_REPLACEMENT):
            new = text[self._num_shown_chars :]
            if new or len(self._window) > _WINDOW_TOKENS:
                self._window = self._window[self._num_shown_tokens :]
                self._num_shown_chars = len(self._decoder.decode(self._window))
            self._num_shown_tokens = len(self._window)
            return new
        if len(self._window) - self._num_shown_tokens <= _UNFINISHED_TOKENS:
            return ""
        # More tokens than any character needs: all but the last replacement is there for good.
        new = text[self._num_shown_chars : -1]
        self._num_shown_chars += len(new)
        if len(self._window) > _WINDOW_TOKENS:
            self._window = self._window[-_UNFINISHED_TOKENS - 1 :]
            self._num_shown_tokens = 0
            self._num_shown_chars = len(self._decoder.decode(self._window)) - 1
        return new

    def flush(self) -> str:
        """What is left at the end of the output: an unfinished character stays one."""
        new = self._decoder.decode(self._window)[self._num_shown_chars :]
        self._window.clear()
        self._num_shown_tokens = self._num_shown_chars = 0
        return new


class StopMatcher:
    """Finds the stop string that is complete first, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """Takes new text; returns what can be shown, and whether a stop string was completed.

        With `may_stop` false a stop string that ends in `text` is text like any other. Of two that
        end at the same character the longer wins."""
        if not self._stops:
            return text, False
        whole, num_old = self._held + text, len(self._held)
        if may_stop and (start := self._first_match(whole, num_old)) is not None:
            self._held = ""
            return whole[:start], True
        num_held = self._num_held(whole)
        self._held = whole[len(whole) - num_held :]
        return whole[: len(whole) - num_held], False

    def flush(self) -> str:
        """What was held back, when the output has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, whole: str, num_old: int) -> int | None:
        """Start of the match that ends first, among those that end in the new text."""
        matches = []
        for stop in self._stops:
            start = whole.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), start))
        return min(matches)[1] if matches else None

    def _num_held(self, whole: str) -> int:
        """Length of the longest end of `whole` that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(whole)), 0, -1):
            end = whole[len(whole) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


class OutputEnd(StrEnum):
    """Why a choice ended, as a client is told."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What this stage must know of a request."""

    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    """A stop string counts only from this many output tokens on."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output when the engine says so, and are not shown."""


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One billed token with its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one engine item adds to a choice."""

    text: str
    tokens: tuple[OutputToken, ...]
    end: OutputEnd | None = None
    failure: Finish | None = None
    """The engine gave up on the request; nothing follows."""


class Postprocessor:
    """The output of one choice. Feed it each item in order; it is finished after `end`."""

    def __init__(self, decoder: TextDecoder, rules: OutputRules) -> None:
        self._rules = rules
        self._detokenizer = Detokenizer(decoder)
        self._matcher = StopMatcher(rules.stops)
        self.num_tokens = 0
        """Billed: up to and including the token that completes a stop string."""
        self.cached_tokens = 0

    def push(self, item: TokenItem) -> OutputDelta:
        """Text, tokens and end that `item` adds. Tokens past a stop string are dropped."""
        if not self.num_tokens:  # Of an attempt elsewhere they would count output as well.
            self.cached_tokens = item.cached_tokens
        finish = item.finish
        parts: list[str] = []
        tokens: list[OutputToken] = []
        for index, token_id in enumerate(item.token_ids):
            logprobs = item.logprobs[index] if item.logprobs is not None else None
            tokens.append(OutputToken(token_id, logprobs))
            self.num_tokens += 1
            is_last = finish is not None and index == len(item.token_ids) - 1
            if is_last and finish is not None and self._is_end(token_id, finish):
                continue
            text, stopped = self._show(self._detokenizer.push(token_id))
            parts.append(text)
            if stopped:
                return OutputDelta("".join(parts), tuple(tokens), OutputEnd.STOP)
        if finish is None:
            return OutputDelta("".join(parts), tuple(tokens))
        text, stopped = self._show(self._detokenizer.flush())
        parts.append(text)
        if not stopped:
            parts.append(self._matcher.flush())
        return _ended("".join(parts), tuple(tokens), finish, stopped)

    def _is_end(self, token_id: int, finish: Finish) -> bool:
        return finish.reason is FinishReason.STOP and token_id in self._rules.end_token_ids

    def _show(self, text: str) -> tuple[str, bool]:
        if not text:
            return "", False
        return self._matcher.push(text, may_stop=self.num_tokens >= self._rules.min_tokens)


def _ended(
    text: str, tokens: tuple[OutputToken, ...], finish: Finish, stopped: bool
) -> OutputDelta:
    if stopped or finish.reason is FinishReason.STOP:
        return OutputDelta(text, tokens, OutputEnd.STOP)
    if finish.reason is FinishReason.LENGTH:
        return OutputDelta(text, tokens, OutputEnd.LENGTH)
    return OutputDelta(text, tokens, failure=finish)
