"""Puts a configuration on this process's own Ray cluster: an application a model, and one for HTTP.

Invariant: models are independent applications. One that cannot start keeps no other from serving.
"""

import contextlib
import http.client
import json
import logging
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig

from cluster.applications import INGRESS, serve_applications
from cluster.deployment import IngressArguments, ingress_application
from configs.shoal import ShoalConfig
from engine.errors import ShoalError
from replicas.application import EngineArguments, engine_application

_LOGGING = LoggingConfig(log_level="ERROR", enable_access_log=False)
_HTTP_TIMEOUT_S = 5.0


class LaunchFailed(ShoalError):
    """Serve could not start an application of Shoal's own."""


class Cluster:
    """One configuration on the Ray cluster that this process has started."""

    def __init__(self, config: ShoalConfig, socket_root: Path) -> None:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._config = config
        self._applications = serve_applications(config, str(socket_root))

    @property
    def url(self) -> str:
        return f"http://{self._config.ingress.host}:{self._config.ingress.port}"

    def start_engines(self) -> None:
        """Starts the engines of all models; waits for none of them."""
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": self._config.ingress.host, "port": self._config.ingress.port},
            logging_config=_LOGGING,
        )
        serve.run_many(
            [_target(each) for each in self._applications if each["name"] != INGRESS],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def start_ingress(self) -> None:
        """Returns when HTTP is served. Raises `LaunchFailed`."""
        front = [_target(each) for each in self._applications if each["name"] == INGRESS]
        try:
            serve.run_many(front)
        except RuntimeError as error:
            raise LaunchFailed(f"the HTTP ingress did not start: {error}") from error

    def ready_report(self) -> dict[str, Any]:
        """What `/ready` says of each model; empty while HTTP does not answer."""
        ingress = self._config.ingress
        connection = http.client.HTTPConnection(ingress.host, ingress.port, timeout=_HTTP_TIMEOUT_S)
        with contextlib.suppress(OSError, ValueError), contextlib.closing(connection):
            connection.request("GET", "/ready")
            models: dict[str, Any] = json.loads(connection.getresponse().read()).get("models", {})
            return models
        return {}


def _target(described: dict[str, Any]) -> serve.RunTarget:
    """An application as a Serve configuration file describes it, built here: Serve would need
    seconds and a process of its own for each."""
    (options,) = described["deployments"]
    if described["name"] == INGRESS:
        arguments = IngressArguments.model_validate(described["args"])
        application = ingress_application(arguments, options)
    else:
        application = engine_application(EngineArguments.model_validate(described["args"]), options)
    return serve.RunTarget(
        application,
        name=described["name"],
        route_prefix=described["route_prefix"],
        logging_config=_LOGGING,
    )
