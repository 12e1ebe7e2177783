"""Ray's dashboard, as far as it deploys: the interface that `serve deploy` and KubeRay use too.

Invariant: only applications of Shoal's are changed. Serve takes a whole configuration and deletes
what is not in it, so what others have deployed is handed back as it was.
"""

from typing import Any

from cluster.applications import INGRESS, is_ours, serve_config
from configs.shoal import ShoalConfig
from engine.errors import ShoalError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_DECLARATIVE = "declarative"


class DeployFailed(ShoalError):
    """The cluster cannot be reached, has refused, or could not start what it was told to."""


class Dashboard:
    """The Serve side of one dashboard. Raises `DeployFailed` from every method."""

    def __init__(self, address: str) -> None:
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        self.address = address
        try:
            self._client = ServeSubmissionClient(address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise DeployFailed(
                f"no Ray dashboard at {address} ({_first_line(error)}); `ray start --head` prints "
                "its address"
            ) from error

    def applications(self) -> dict[str, dict[str, Any]]:
        """What Serve says of each application, by name; empty while Serve does not run."""
        found: dict[str, dict[str, Any]] = self._details()["applications"]
        return found

    def deployed(self) -> ShoalConfig | None:
        """The configuration that is deployed; None when there is none."""
        front = self.applications().get(INGRESS)
        if front is None:
            return None
        described = front.get("deployed_app_config") or {}
        ours = [
            each["user_config"]["config"]
            for each in described.get("deployments", [])
            if "config" in (each.get("user_config") or {})
        ]
        if not ours:
            raise DeployFailed(
                f"the cluster has an application named {INGRESS!r} that is not Shoal's"
            )
        return ShoalConfig.model_validate(ours[0])

    def apply(self, config: ShoalConfig) -> None:
        """Tells Serve what is to run; returns before it does."""
        details = self._details()
        wanted = serve_config(config)
        self._check_http(details, wanted)
        described = [
            each["deployed_app_config"]
            for each in details["applications"].values()
            if each.get("source") == _DECLARATIVE
        ]
        others = [each for each in described if not is_ours(each)]
        wanted["applications"] = [*others, *wanted["applications"]]
        try:
            self._client.deploy_applications(wanted)
        except RuntimeError as error:
            raise DeployFailed(f"Serve refuses the configuration: {error}") from error

    @staticmethod
    def _check_http(details: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Serve's address is chosen when it starts, and then fixed."""
        running = details.get("http_options")
        if not details["applications"] or not running:
            return
        for key, value in wanted["http_options"].items():
            if running[key] != value:
                raise DeployFailed(
                    f"Serve runs already, with {key} {running[key]}; ingress.{key} is {value}. Set "
                    "it to the same, or end Serve first (`serve shutdown`)"
                )

    def _details(self) -> dict[str, Any]:
        try:
            details: dict[str, Any] = self._client.get_serve_details()
        except (ConnectionError, RuntimeError) as error:
            raise DeployFailed(f"{self.address} does not answer: {_first_line(error)}") from error
        return details


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
