"""What it takes to get from one configuration to another.

Invariant: pure, and complete: every difference is in the plan with what it does to what runs, and
what cannot be done to a cluster that runs is refused before anything is touched.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from configs.shoal import ModelConfig, ShoalConfig
from configs.tree import FieldChange, diff
from configs.units import DURATION
from engine.errors import ShoalError

_FIXED = ("ingress.", "registry.")
"""Sections whose `restart` fields belong to what all applications stand on."""
_MODEL = re.compile(r"^models\[(.*?)\](?=\.|$)")


class PlanRefused(ShoalError):
    """A change that a running cluster cannot take; the text says what can be done instead."""


class Effect(StrEnum):
    """What a change does to what runs."""

    LIVE = "live"
    """Applied to the processes that run."""
    RESTART = "restart"
    """The engines of the model are replaced; of all models, and the ingresses, when it is outside
    of one."""
    START = "start"
    """A model that is new."""
    REMOVE = "remove"
    """A model that goes: its engines finish what they have."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference."""

    path: str
    effect: Effect
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.effect is Effect.START:
            return f"{self.effect:<8} {self.path}"
        if self.effect is Effect.REMOVE:
            return f"{self.effect:<8} {self.path}"
        return f"{self.effect:<8} {self.path}: {_shown(self.old)} → {_shown(self.new)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All differences, and what they mean for each model."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        changes = [
            {"path": c.path, "effect": c.effect.value, "old": _plain(c.old), "new": _plain(c.new)}
            for c in self.changes
        ]
        return {"changes": changes, "notes": list(self.notes)}


def make_plan(former: ShoalConfig | None, new: ShoalConfig) -> Plan:
    """From what is deployed (None: nothing of Shoal's) to `new`. Raises `PlanRefused`."""
    if former is None:
        changes = [Change(f"models[{m.name}]", Effect.START, None, m) for m in new.models]
        return Plan(tuple(changes), ())
    changes = [_change(each) for each in diff(former, new)]
    restarted = {
        match[1] if (match := _MODEL.match(change.path)) else None
        for change in changes
        if change.effect is Effect.RESTART
    }
    models = new.models if None in restarted else [m for m in new.models if m.name in restarted]
    known = {model.name for model in former.models}
    notes = [_restart_note(model, new) for model in models if model.name in known]
    return Plan(tuple(changes), tuple(notes))


def _change(change: FieldChange) -> Change:
    path, old, new = change.path, change.old, change.new
    if change.change == "restart" and path.startswith(_FIXED):
        raise PlanRefused(
            f"{path} cannot change from {_shown(old)} to {_shown(new)} while the cluster runs: "
            "end Serve first (`serve shutdown`), then deploy again"
        )
    if isinstance(old, ModelConfig) and new is None:
        return Change(path, Effect.REMOVE, old, None)
    if isinstance(new, ModelConfig) and old is None:
        return Change(path, Effect.START, None, new)
    return Change(path, Effect(change.change), old, new)


def _restart_note(model: ModelConfig, config: ShoalConfig) -> str:
    """How a model's engines are replaced: Serve stops one before it starts the next, so no more
    room is needed than there is."""
    drain = DURATION.format(model.supervision.drain_timeout_s)
    hold = DURATION.format(config.ingress.hold_s)
    how = "is stopped, then started anew" if model.replicas == 1 else "are replaced in turns"
    what = "its engine" if model.replicas == 1 else f"its {model.replicas} engines"
    return (
        f"{model.name}: {what} {how}; what runs has {drain} to finish, and new requests wait up to "
        f"{hold} while none is ready"
    )


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, ModelConfig) else value


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
