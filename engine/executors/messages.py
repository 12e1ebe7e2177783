"""What the ranks of a tensor-parallel engine say to each other between steps.

Invariant: frozen msgpack structs of known types, as on the engine's own wire; both ends are of one
engine, so there is no version. `Connect` and `Execute` go to the workers, all else to rank 0.
"""

from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import msgspec

from engine.plan import StepPlan, StepResult
from engine.wire import Message


class Connect(Message, frozen=True):
    """Every rank has its weights: connect, and compare them."""


class Execute(Message, frozen=True):
    plan: StepPlan


class Loaded(Message, frozen=True):
    """This rank has its weights."""


class Ready(Message, frozen=True):
    """This rank can execute plans, in this much memory."""

    num_blocks: int
    num_slots: int


class Done(Message, frozen=True):
    """A plan has been executed."""

    step: int
    digest: bytes
    """Of what it drew: `drawn_digest`."""


class Failed(Message, frozen=True):
    """This rank cannot go on, and ends."""

    reason: str


ToWorker: TypeAlias = Connect | Execute
FromWorker: TypeAlias = Loaded | Ready | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def socket_address(folder: Path, rank: int) -> str:
    """Where rank 0 listens for one worker."""
    return f"ipc://{folder}/{rank}"


def encode(message: ToWorker | FromWorker) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(frame: bytes) -> ToWorker:
    """Raises `msgspec.DecodeError` for anything else."""
    return _to_worker.decode(frame)


def decode_from_worker(frame: bytes) -> FromWorker:
    """Raises `msgspec.DecodeError` for anything else."""
    return _from_worker.decode(frame)


def drawn_digest(result: StepResult) -> bytes:
    """Eight bytes that are equal for equal tokens of equal runs, and equal runs that failed."""
    drawn = sorted((run_id, sampled.token_ids) for run_id, sampled in result.sampled.items())
    return blake2b(_encoder.encode((drawn, sorted(result.failures))), digest_size=8).digest()
