"""Which models and engines there are: the Registry's state, without the actor around it.

Invariant: an engine is listed while its supervisor renews its lease, and no longer, a model's last
failure apart; every change raises `version`, so that a reader who knows a version misses nothing
after it. Time is passed in.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has; takes nothing new."""
    STALLED = "stalled"
    """A step takes far longer than it should."""
    FAILED = "failed"
    """Cannot start, or has died; its supervisor tries again."""


class EngineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine replica, as its supervisor reports it."""

    replica_id: str
    """Of the supervisor; survives a restart of the core."""
    model: str
    state: EngineState
    source: str = ""
    """What it runs: the model's source when it was started."""
    detail: str = ""
    """The phase it is in, or why it failed."""
    endpoint: str = ""
    """Where the core listens; a restarted core has another one."""
    pid: int = 0
    node: str = ""
    restarts: int = 0
    last_error: str = ""
    """Why the core before this one ended."""
    was_stalled: bool = False
    """That one was ejected as stalled, and this one is not ready yet."""

    @property
    def core_id(self) -> str:
        """Of the core itself: a restarted one is another engine, with nothing in its cache."""
        return f"{self.replica_id}#{self.restarts}"

    @property
    def is_reachable(self) -> bool:
        """Whether an ingress should hold a session with it."""
        return bool(self.endpoint) and self.state in (
            EngineState.READY,
            EngineState.DRAINING,
            EngineState.STALLED,
        )


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is meant to be served, whether or not an engine runs for it."""

    name: str
    source: str
    """Local folder, hub id, or 'default': where its tokenizer is found."""
    aliases: tuple[str, ...] = ()


class DirectoryView(msgspec.Struct, frozen=True):
    """The directory at one moment."""

    version: int
    boot_id: str
    """Changes when the Registry has restarted."""
    is_settled: bool
    """Whether the Registry has run for a lease: before that an engine may be missing only because
    it has not reported to this Registry yet."""
    models: tuple[ModelEntry, ...]
    engines: tuple[EngineEntry, ...]


class Directory:
    """Models by name, engines by replica id."""

    def __init__(self, boot_id: str, lease_s: float, now: float) -> None:
        self.boot_id = boot_id
        self.lease_s = lease_s
        self.version = 1
        self._settles_s = now + lease_s
        self._is_settled = False
        self._models: dict[str, ModelEntry] = {}
        self._is_told = False
        """Whether `set_models` has said which models there are to be."""
        self._engines: dict[str, tuple[EngineEntry, float]] = {}

    @property
    def models(self) -> tuple[ModelEntry, ...]:
        return tuple(self._models.values())

    def set_models(self, models: tuple[ModelEntry, ...]) -> None:
        """Replaces the list of models meant to be served."""
        self._is_told = True
        wanted = {model.name: model for model in models}
        if wanted != self._models:
            self._models = wanted
            self.version += 1

    def report(self, entry: EngineEntry, model: ModelEntry, now: float) -> None:
        """Renews the lease of an engine, and takes over what has changed. A Registry that has lost
        its memory learns the models again from their engines."""
        if not self._is_told and self._models.get(model.name) != model:
            self._models[model.name] = model
            self.version += 1
        for name in self._unheard(entry.model, now):
            if name != entry.replica_id:
                self.withdraw(name)
        known = self._engines.get(entry.replica_id)
        self._engines[entry.replica_id] = (entry, now + self.lease_s)
        if known is None or known[0] != entry:
            self.version += 1

    def withdraw(self, replica_id: str) -> None:
        """Removes an engine that has ended in order. Unknown ones are no error."""
        if self._engines.pop(replica_id, None) is not None:
            self.version += 1

    def may_eject(self, replica_id: str) -> bool:
        """Whether a stalled engine is to be given up now. Unknown ones are."""
        if replica_id not in self._engines:
            return True
        model = self._engines[replica_id][0].model
        return replica_id in ejected(e for e, _ in self._engines.values() if e.model == model)

    def expire(self, now: float) -> None:
        """Removes engines whose lease has run out; but the last of a model, if it failed, stays for
        the reason it gave, until another reports."""
        num_engines = len(self._engines)
        for name, (entry, until_s) in list(self._engines.items()):
            if until_s < now and not self._is_last_word(entry):
                del self._engines[name]
        settled = now >= self._settles_s
        if len(self._engines) < num_engines or settled != self._is_settled:
            self._is_settled = settled
            self.version += 1

    def _unheard(self, model: str, now: float) -> list[str]:
        """Of a model, those that have outlived their lease."""
        return [
            name
            for name, (entry, until_s) in self._engines.items()
            if entry.model == model and until_s < now
        ]

    def _is_last_word(self, entry: EngineEntry) -> bool:
        is_alone = sum(other.model == entry.model for other, _ in self._engines.values()) == 1
        return is_alone and entry.state is EngineState.FAILED and entry.model in self._models

    def view(self) -> DirectoryView:
        return DirectoryView(
            self.version,
            self.boot_id,
            self._is_settled,
            self.models,
            tuple(entry for entry, _ in self._engines.values()),
        )


_MAX_EJECTED_SHARE = 4


def ejected(engines: Iterable[EngineEntry]) -> set[str]:
    """Of one model's engines, the replicas to give up as stalled.

    At most a quarter of those that should serve are ejected at once, but one at least: when more
    stall together the cause is rather what they share, and to take them all out would only make it
    worse. One that was ejected counts until its next core is ready; what drains or has died by
    itself does not. The same for whoever has the same list."""
    engines = list(engines)
    out = sum(each.was_stalled for each in engines)
    serving = [e for e in engines if e.state in (EngineState.READY, EngineState.STALLED)]
    stalled = sorted(e.replica_id for e in serving if e.state is EngineState.STALLED)
    most = max(1, (len(serving) + out) // _MAX_EJECTED_SHARE)
    return set(stalled[: max(0, most - out)])


_BEST_FIRST = (
    EngineState.READY,
    EngineState.LOADING,
    EngineState.STALLED,
    EngineState.DRAINING,
    EngineState.FAILED,
)


def model_state(view: DirectoryView, model: str) -> EngineState:
    """The best state of any engine of a model; `LOADING` while none has reported."""
    states = {entry.state for entry in view.engines if entry.model == model}
    return next((state for state in _BEST_FIRST if state in states), EngineState.LOADING)
