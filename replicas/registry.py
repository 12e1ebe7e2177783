"""The Registry: one named Ray actor that knows which models and engines there are.

Invariant: it is never on the way of a token. While it is down, readers go on with their last view
and supervisors report again as soon as it is back; what must outlive it (the models meant to be
served) is in a file that is replaced whole.
"""

import asyncio
import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec
import ray

from replicas.directory import Directory, DirectoryView, EngineEntry, ModelEntry
from replicas.questions import Questions

REGISTRY_NAME = "shoal-registry"
NAMESPACE = "shoal"
_EXPIRY_INTERVAL_S = 0.5


class Registry:
    """Made by `ensure_registry`. Every method is asynchronous and short, but for `watch`."""

    def __init__(self, lease_s: float, path: str | None) -> None:
        """`path`: where the models are kept over a restart; none: nowhere."""
        self._path = Path(path) if path else None
        self._directory = Directory(secrets.token_hex(4), lease_s, time.monotonic())
        self._changed = asyncio.Event()
        self._questions = Questions(first=time.time_ns())
        self._asked, self._answered = asyncio.Event(), asyncio.Event()
        self._seen_version = self._directory.version
        if self._path is not None and self._path.is_file():
            models = msgspec.json.decode(self._path.read_bytes(), type=tuple[ModelEntry, ...])
            self._directory.set_models(models)

    async def set_models(self, models: tuple[ModelEntry, ...]) -> None:
        """Replaces the list of models meant to be served."""
        self._directory.set_models(models)
        if self._path is not None:
            draft = self._path.with_suffix(f".{secrets.token_hex(4)}")
            draft.write_bytes(msgspec.json.encode(models))
            draft.replace(self._path)
        self._wake()

    async def report(self, entry: EngineEntry, model: ModelEntry) -> None:
        """Renews an engine's lease."""
        self._directory.report(entry, model, time.monotonic())
        self._wake()

    async def withdraw(self, replica_id: str) -> None:
        self._directory.withdraw(replica_id)
        self._wake()

    async def may_eject(self, replica_id: str) -> bool:
        """See `Directory.may_eject`."""
        return self._directory.may_eject(replica_id)

    async def view(self) -> DirectoryView:
        self._directory.expire(time.monotonic())
        return self._directory.view()

    async def watch(self, boot_id: str, version: int, timeout_s: float) -> DirectoryView:
        """The view as soon as it differs from the one named, or after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while True:
            self._directory.expire(now := time.monotonic())
            self._wake()
            view = self._directory.view()
            if now >= end_s or (view.boot_id, view.version) != (boot_id, version):
                return view
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait(), min(_EXPIRY_INTERVAL_S, max(0.0, end_s - now))
                )

    # ------------------------------------------------------------ questions to all ingresses

    async def ask(self, text: str, timeout_s: float) -> bytes | None:
        """The first answer of any ingress; None when nobody has one in time."""
        question = self._questions.ask(text)
        self._asked.set()
        self._asked = asyncio.Event()
        end_s = time.monotonic() + timeout_s
        try:
            while question.answer is None and (left_s := end_s - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._answered.wait(), left_s)
            return question.answer
        finally:
            self._questions.close(question)

    async def next_questions(self, last: int, timeout_s: float) -> list[tuple[int, str]]:
        """Number and text of those asked after question `last`; none after `timeout_s`."""
        if not (found := self._questions.since(last)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), timeout_s)
            found = self._questions.since(last)
        return found

    async def answer(self, number: int, answer: bytes) -> None:
        self._questions.answer(number, answer)
        self._answered.set()
        self._answered = asyncio.Event()

    async def pid(self) -> int:
        return os.getpid()

    def _wake(self) -> None:
        if self._directory.version != self._seen_version:
            self._seen_version = self._directory.version
            self._changed.set()
            self._changed = asyncio.Event()


def ensure_registry(lease_s: float, path: str | None) -> Any:
    """The Registry's handle; starts it if there is none. Ray restarts it for as long as the
    cluster lives."""
    return (
        ray.remote(Registry)
        .options(
            name=REGISTRY_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=1000,
            num_cpus=0,
            # Said, or it would go into the placement group of whoever makes it, and end with that.
            scheduling_strategy="DEFAULT",
        )
        .remote(lease_s, path)
    )


def find_registry() -> Any:
    """The Registry's handle. Raises `ValueError` when there is none in this cluster."""
    return ray.get_actor(REGISTRY_NAME, namespace=NAMESPACE)
