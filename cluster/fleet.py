"""All models of one ingress, kept in step with the Registry's directory.

Invariant: a Registry that is away or new changes nothing: the last view stands until a settled one
says otherwise. A change to one model touches that model alone; when it is replaced or removed, what
runs on its engines runs on.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from cluster.identity import IngressIdentity
from cluster.served_model import ServedModel
from engine.errors import ShoalError
from replicas.directory import DirectoryView, EngineEntry, EngineState, ModelEntry

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


class ModelNotFound(ShoalError):
    """No model of this name is served."""

    def __init__(self, name: str, served: list[str]) -> None:
        super().__init__(f"the model {name!r} does not exist; served: {', '.join(served)}")


class DirectorySource(Protocol):
    """Where views of the directory come from."""

    async def next_view(self, known: DirectoryView | None) -> DirectoryView:
        """The present view, at once if it is not the one known, else when it changes or after a
        while. May raise anything: the caller asks again."""
        ...

    async def ask_others(self, question: str) -> bytes | None:
        """What any ingress answers; None when none does, or none can be asked."""
        ...

    async def answer_others(self, answer: Callable[[str], bytes | None]) -> None:
        """Answers what others ask, for ever."""
        ...


class Alone:
    """Of a directory: there is no other ingress."""

    async def ask_others(self, question: str) -> bytes | None:
        return None

    async def answer_others(self, answer: Callable[[str], bytes | None]) -> None:
        await asyncio.Event().wait()


class FixedDirectory(Alone):
    """One model and engines that do not change: an ingress without a Registry."""

    def __init__(self, model: ModelEntry, endpoints: tuple[str, ...]) -> None:
        engines = tuple(
            EngineEntry(
                f"engine-{number}",
                model.name,
                EngineState.READY,
                source=model.source,
                endpoint=endpoint,
            )
            for number, endpoint in enumerate(endpoints)
        )
        self._view = DirectoryView(1, "fixed", True, (model,), engines)

    async def next_view(self, known: DirectoryView | None) -> DirectoryView:
        if known is not None:
            await asyncio.Event().wait()
        return self._view


class Fleet:
    """Use `run` in a task, `model` for each request, `close`."""

    def __init__(self, source: DirectorySource, identity: IngressIdentity) -> None:
        self.view: DirectoryView | None = None
        self.models: dict[str, ServedModel] = {}
        self._source = source
        self._identity = identity
        self._retired: list[ServedModel] = []
        """Removed or replaced, but with engines that may still have work of ours."""
        self._by_name: dict[str, ServedModel] = {}

    def model(self, name: str) -> ServedModel:
        """By name or alias. Raises `ModelNotFound`."""
        model = self._by_name.get(name)
        if model is None:
            raise ModelNotFound(name[:80], sorted(self.models))
        return model

    async def run(self) -> None:
        """Follows the directory for ever."""
        while True:
            try:
                view = await self._source.next_view(self.view)
            except Exception as error:
                logger.warning("the Registry does not answer (%s); the last view stands", error)
                await asyncio.sleep(_RETRY_S)
                continue
            await self.apply(view)

    async def apply(self, view: DirectoryView) -> None:
        self.view = view
        wanted = {entry.name: entry for entry in view.models}
        for name, model in list(self.models.items()):
            entry = wanted.get(name)
            if entry is None and not view.is_settled:
                continue
            if entry is None or entry.source != model.entry.source:
                model.retire()
                self._retired.append(self.models.pop(name))
            else:
                model.entry = entry
        for name, entry in wanted.items():
            if name not in self.models:
                self.models[name] = ServedModel(entry, self._identity)
                self.models[name].open()
        self._by_name = {
            alias: model
            for model in self.models.values()
            for alias in (model.entry.name, *model.entry.aliases)
        }
        for model in (*self.models.values(), *self._retired):
            served = model.entry.name, model.entry.source
            engines = [entry for entry in view.engines if (entry.model, entry.source) == served]
            model.update(engines, is_complete=view.is_settled)
        for model in [model for model in self._retired if not model.sessions]:
            self._retired.remove(model)
            await model.close()

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in (*self.models.values(), *self._retired)))
