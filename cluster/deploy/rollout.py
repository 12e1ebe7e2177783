"""How far Serve is with what it was told.

Invariant: done is when every application runs or has failed for good, and what was removed is gone.
"""

from dataclasses import dataclass
from typing import Any

from cluster.applications import INGRESS, application_name
from cluster.deploy.dashboard import Dashboard
from cluster.deploy.plan import Effect, Plan
from configs.shoal import ShoalConfig

_FAILED = "DEPLOY_FAILED"
_SETTLED = ("RUNNING", _FAILED, None)
_MAX_MESSAGE_CHARS = 1500


@dataclass(frozen=True, slots=True)
class Look:
    """The state at one moment."""

    pending: tuple[str, ...]
    """What is not done: a model, `HTTP`, or a removal."""
    hindrance: str
    """What Serve says of it, mostly of resources that are missing."""
    failed: dict[str, str]
    """Why, of what will not run."""


class Rollout:
    """Follows one deployment."""

    def __init__(self, dashboard: Dashboard, config: ShoalConfig, plan: Plan) -> None:
        self._dashboard = dashboard
        self._labels = {application_name(model.name): model.name for model in config.models}
        self._labels[INGRESS] = "HTTP"
        for change in plan.changes:
            if change.effect is Effect.REMOVE:
                self._labels[application_name(change.old.name)] = f"removing {change.old.name}"

    def look(self) -> Look:
        """Raises `DeployFailed` when the dashboard does not answer."""
        found = self._dashboard.applications()
        pending, failed, hindrances = [], {}, []
        for name, label in self._labels.items():
            application = found.get(name, {})
            status = application.get("status")
            if status == _FAILED:
                failed[label] = _said_of(application)
            elif status not in _SETTLED:
                pending.append(label)
                hindrances.append(_said_of(application))
        return Look(tuple(pending), "\n".join(filter(None, hindrances)), failed)


def _said_of(application: dict[str, Any]) -> str:
    deployments = application.get("deployments", {}).values()
    texts = [str(deployment.get("message", "")) for deployment in deployments]
    text = "\n".join(filter(None, texts)) or str(application.get("message", ""))
    return text[-_MAX_MESSAGE_CHARS:]
