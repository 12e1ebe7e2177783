"""One request with several prompts: a generation for each, as one output.

Invariant: either the engines have accepted every generation, or none of them runs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from cluster.generation import Generation, Usage
from cluster.postprocess import OutputDelta
from cluster.preprocess import GenerationRequest, InvalidRequest
from cluster.served_model import Started
from engine.errors import RequestRejected, ShoalError
from engine.wire import RejectCode


class PromptTooLong(ShoalError):
    """A prompt that, with the output asked for, is beyond the context limit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


Start = Callable[[str, GenerationRequest], Awaitable[Started]]


async def start_each(
    start: Start, request_id: str, requests: Sequence[GenerationRequest]
) -> list[Started]:
    """`start` for every prompt at once, all or none.

    Raises what `start` does, by the name and number of the prompt it is about."""
    if len(requests) == 1:
        return [await _start(start, request_id, requests[0], "prompt")]
    starts = [
        asyncio.create_task(_start(start, f"{request_id}-{number}", request, f"prompt.{number}"))
        for number, request in enumerate(requests)
    ]
    try:
        return await asyncio.gather(*starts)
    except BaseException:
        for starting in starts:
            starting.cancel()
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, Started):
                result.generation.close()
        raise


async def _start(start: Start, request_id: str, request: GenerationRequest, field: str) -> Started:
    try:
        return await start(request_id, request)
    except InvalidRequest as error:
        if error.field != "prompt":
            raise
        raise InvalidRequest(field, str(error)) from error
    except RequestRejected as error:
        if error.code is not RejectCode.CONTEXT_LENGTH:
            raise
        raise PromptTooLong(field, error.message) from error


def merged(generations: Sequence[Generation], num_choices: int) -> "Generation | MergedOutput":
    """The output of them all; each has `num_choices`."""
    return generations[0] if len(generations) == 1 else MergedOutput(generations, num_choices)


class MergedOutput:
    """The choices of several generations as they come, numbered through: choice `c` of generation
    `g` is `g * num_choices + c`."""

    def __init__(self, generations: Sequence[Generation], num_choices: int) -> None:
        self._generations = generations
        self._num_choices = num_choices
        self._merged: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []
        self._num_ends = 0

    @property
    def usage(self) -> Usage:
        """Every prompt counts once."""
        usages = [generation.usage for generation in self._generations]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
        )

    async def next_delta(self) -> tuple[int, OutputDelta] | None:
        """As `Generation.next_delta`."""
        if not self._readers:
            self._readers = [
                asyncio.create_task(self._read(number)) for number in range(len(self._generations))
            ]
        while self._num_ends < len(self._readers):
            entry = await self._merged.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is not None:
                return entry
            self._num_ends += 1
        return None

    async def _read(self, number: int) -> None:
        generation = self._generations[number]
        first = number * self._num_choices
        try:
            while (entry := await generation.next_delta()) is not None:
                self._merged.put_nowait((first + entry[0], entry[1]))
            self._merged.put_nowait(None)
        except Exception as error:
            self._merged.put_nowait(error)

    def close(self) -> None:
        """Aborts what still runs. Harmless when all has ended."""
        for reader in self._readers:
            reader.cancel()
        for generation in self._generations:
            generation.close()
