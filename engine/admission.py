"""Checks a request against the model and the pool before it reaches the scheduler.

Invariant: what passes can run to its end on an otherwise empty engine. The wire has checked shapes
and ranges; here are the limits that depend on what is loaded.
"""

from collections.abc import Iterable

from engine.errors import RequestRejected
from engine.plan import ExecutorInfo
from engine.wire import AddRequest, RejectCode


def context_limit(info: ExecutorInfo, configured: int | None) -> int:
    """Longest prompt plus output: the least of the model's limit, the configured one, and what
    the whole KV pool can hold. (The last token's KV is never needed, hence the one more.)"""
    pool = info.num_blocks * info.block_size + 1
    return min(info.max_model_len, pool, configured or info.max_model_len)


def check(request: AddRequest, info: ExecutorInfo, limit: int) -> None:
    """Raises `RequestRejected` with the field, the limit and the value."""
    sampling = request.sampling
    num_prompt, num_output = len(request.prompt_ids), len(request.output_ids)
    if num_prompt + sampling.max_tokens > limit:
        raise RequestRejected(
            RejectCode.CONTEXT_LENGTH,
            f"the context limit is {limit} tokens, but the prompt has {num_prompt} and max_tokens "
            f"is {sampling.max_tokens}: {num_prompt + sampling.max_tokens} together",
        )
    if num_output > sampling.max_tokens:
        _invalid("output_ids", f"at most max_tokens ({sampling.max_tokens}) tokens", num_output)
    if sampling.min_tokens > sampling.max_tokens:
        _invalid("min_tokens", f"at most max_tokens ({sampling.max_tokens})", sampling.min_tokens)
    _check_ids("prompt_ids", request.prompt_ids, info.vocab_size)
    _check_ids("output_ids", request.output_ids, info.vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, info.vocab_size)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids or (), info.vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
    for word in sampling.bad_words:
        _check_ids("bad_words", word, info.vocab_size)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        _invalid(field, f"token ids below the vocabulary size ({vocab_size})", largest)


def _invalid(field: str, limit: str, value: object) -> None:
    raise RequestRejected(RejectCode.INVALID, f"{field} must be {limit}, got {value}")
