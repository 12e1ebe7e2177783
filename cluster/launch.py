"""Puts a configuration on a Ray cluster: the Registry, one application a model, one for HTTP.

Invariant: models are independent applications. One that cannot start keeps no other from serving.
"""

import contextlib
import http.client
import json
import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from cluster.deployment import ingress_application
from configs.shoal import ModelConfig, ShoalConfig
from engine.errors import ShoalError
from replicas.registry import ensure_registry
from replicas.supervisor import engine_application, model_entry

_LOGGING = LoggingConfig(log_level="ERROR", enable_access_log=False)
_HTTP_TIMEOUT_S = 5.0


class LaunchFailed(ShoalError):
    """Serve could not start an application of Shoal's own."""


class Cluster:
    """One configuration on the Ray cluster that this process is connected to."""

    def __init__(self, config: ShoalConfig, socket_root: Path) -> None:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._config = config
        self._socket_root = socket_root
        self._registry = ensure_registry(config.registry.lease_s, config.registry.path)

    @property
    def url(self) -> str:
        return f"http://{self._config.ingress.host}:{self._config.ingress.port}"

    def start_engines(self, names: Collection[str] | None = None) -> None:
        """Names the models to the Registry and starts the engines of all, or of those named; waits
        for none of them. Applications that run and are not named are left alone."""
        ray.get(self._registry.set_models.remote(tuple(map(model_entry, self._config.models))))
        self._start_http_options()
        serve.run_many(
            [
                serve.RunTarget(
                    engine_application(self._with_secret(model), self._socket_root),
                    name=application_name(model.name),
                    route_prefix=None,
                    logging_config=_LOGGING,
                )
                for model in self._config.models
                if names is None or model.name in names
            ],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def start_ingress(self) -> None:
        """Returns when HTTP is served. Raises `LaunchFailed`."""
        secret_file = self._config.cluster_secret_file
        assert secret_file is not None
        application = ingress_application(self._config.ingress, self._config.router, secret_file)
        try:
            serve.run(application, name="ingress", route_prefix="/", logging_config=_LOGGING)
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

    def _start_http_options(self) -> None:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": self._config.ingress.host, "port": self._config.ingress.port},
            logging_config=_LOGGING,
        )

    def _with_secret(self, model: ModelConfig) -> ModelConfig:
        return model.model_copy(update={"engine": self._config.engine_config(model)})


def application_name(model_name: str) -> str:
    """Serve's name of a model's application: model names may have characters that it refuses."""
    return "engine-" + re.sub(r"[^A-Za-z0-9._-]", lambda match: f"%{ord(match[0]):02x}", model_name)
