"""A configuration as Ray Serve applications: one for each model, and one for HTTP.

Invariant: this is the only place that says which applications there are. `shoal serve`, `shoal
deploy` and the Helm chart all deploy these; `engine` and `ingress` are the builders that Serve
calls by their import path, with arguments from a configuration file.
"""

import re
from collections.abc import Mapping
from typing import Any

from cluster import deployment as ingress_deployment
from cluster.deployment import IngressArguments, ingress_application
from configs.shoal import ShoalConfig
from replicas import application as engine_deployment
from replicas.application import EngineArguments, engine_application, engine_arguments

INGRESS = "ingress"
_ENGINE_PREFIX = "engine-"
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}


def ingress(arguments: IngressArguments) -> Any:
    """The builder of the HTTP front."""
    return ingress_application(arguments)


def engine(arguments: EngineArguments) -> Any:
    """The builder of one model's engines."""
    return engine_application(arguments)


def application_name(model_name: str) -> str:
    """Serve's name of a model's application: model names may have characters that it refuses."""
    escaped = re.sub(r"[^A-Za-z0-9._-]", lambda match: f"%{ord(match[0]):02x}", model_name)
    return _ENGINE_PREFIX + escaped


def is_ours(described: Mapping[str, Any]) -> bool:
    """Whether an application, as a Serve configuration file describes it, is one of these."""
    name, import_path = str(described["name"]), str(described["import_path"])
    has_name = name == INGRESS or name.startswith(_ENGINE_PREFIX)
    return has_name and import_path.startswith(f"{__name__}:")


def serve_applications(config: ShoalConfig, socket_root: str | None = None) -> list[dict[str, Any]]:
    """`applications` of a Serve configuration file. The configuration must name a secret file."""
    common = {
        "cluster_secret_file": config.cluster_secret_file,
        "registry": config.registry.model_dump(mode="json"),
    }
    front = {
        "name": INGRESS,
        "route_prefix": "/",
        "import_path": f"{__name__}:{ingress.__name__}",
        "args": common,
        "logging_config": _LOGGING,
        "deployments": [
            {"name": ingress_deployment.DEPLOYMENT, **ingress_deployment.live_options(config)}
        ],
    }
    sockets = {} if socket_root is None else {"socket_root": socket_root}
    engines = [
        {
            "name": application_name(model.name),
            "route_prefix": None,
            "import_path": f"{__name__}:{engine.__name__}",
            "args": {"model": engine_arguments(model), **common, **sockets},
            "logging_config": _LOGGING,
            "deployments": [
                {"name": engine_deployment.DEPLOYMENT, **engine_deployment.live_options(model)}
            ],
        }
        for model in config.models
    ]
    return [front, *engines]


def serve_config(config: ShoalConfig) -> dict[str, Any]:
    """A whole Serve configuration file, as `serve deploy` takes it."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.ingress.host, "port": config.ingress.port},
        "applications": serve_applications(config),
    }
