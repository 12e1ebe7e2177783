"""The Serve application of one model: supervisors, each with its core.

Invariant: its arguments are the model's identity, what takes new engines to change; all else comes
as options of the deployment, which Serve applies to the replicas that run. Serve restarts a
deployment whose arguments, resources or autoscaling policy change, and no other.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import Field
from ray import serve

from configs.section import Section
from configs.shoal import ModelConfig, PlacementConfig, RegistryConfig
from configs.tree import joined, part
from replicas.supervisor import EngineSupervisor

DEPLOYMENT = "Supervisor"
_SUPERVISOR_CPUS = 0.01
_ACCELERATOR_SHARE = 0.001
_SHUTDOWN_TIMEOUT_S = 2 * 86400.0
"""Beyond every drain limit. The supervisor keeps to its own, which may change while it runs."""
_POLICY = "autoscaler.policy:BacklogPolicy"


class EngineArguments(Section):
    """What identifies the engines of one model; a change restarts them."""

    model: dict[str, Any] = Field(description="A model's fields that are marked `restart`.")
    cluster_secret_file: str | None = Field(None, description="As in `ShoalConfig`.")
    registry: RegistryConfig = Field(default_factory=RegistryConfig)
    socket_root: str | None = Field(
        None, description="Folder for sockets, on one node; none: engines listen on the network."
    )


def engine_application(
    arguments: EngineArguments, options: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """An application for Serve; `options` are those of `live_options`."""
    model = joined(arguments.model, {})
    engine = model.engine.with_secret(arguments.cluster_secret_file)
    identity = engine_arguments(model.model_copy(update={"engine": engine}))
    placement = model.placement
    fixed = {
        "name": DEPLOYMENT,
        "ray_actor_options": {"num_cpus": _SUPERVISOR_CPUS},
        "placement_group_bundles": _bundles(placement),
        "placement_group_strategy": "STRICT_PACK",
        **_node_selector(placement),
        "max_ongoing_requests": 100,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_timeout_s": _SHUTDOWN_TIMEOUT_S,
        # Each has tried as often as its own limit allows.
        "max_constructor_retry_count": 2,
    }
    deployment: Any = serve.deployment(**{**fixed, **options})(EngineSupervisor)
    registry_json = arguments.registry.model_dump_json()
    return deployment.bind(identity, registry_json, arguments.socket_root)


def engine_arguments(model: ModelConfig) -> dict[str, Any]:
    """The `model` of `EngineArguments`."""
    return part(model, "restart")


def live_options(model: ModelConfig) -> dict[str, Any]:
    """Options of the deployment that may change while it runs, as JSON."""
    live = part(model, "live")
    del live["replicas"]
    scaling = {
        "min_replicas": model.replicas,
        "max_replicas": model.autoscaling.max_replicas or model.replicas,
        # How often supervisors are asked, and over what time: the policy takes the last answer.
        "metrics_interval_s": 0.5,
        "look_back_period_s": 1.0,
        # The policy has delays of its own, which may change without a restart.
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        # Also of a fixed number of replicas: to give a deployment a policy restarts it.
        "policy": {"policy_function": _POLICY},
    }
    return {"autoscaling_config": scaling, "user_config": live}


def _bundles(placement: PlacementConfig) -> list[dict[str, float]]:
    engine = {"CPU": placement.num_cpus, "GPU": placement.num_gpus}
    if placement.accelerator_type is not None:
        # Ray's own way to ask for a kind: every node that has it offers one of this resource.
        engine[f"accelerator_type:{placement.accelerator_type}"] = _ACCELERATOR_SHARE
    return [
        {"CPU": _SUPERVISOR_CPUS},
        {kind: amount for kind, amount in engine.items() if amount > 0},
    ]


def _node_selector(placement: PlacementConfig) -> dict[str, Any]:
    """Labels that the engine's node must carry; its supervisor is packed beside it."""
    if not placement.node_labels:
        return {}
    return {"placement_group_bundle_label_selector": [{}, dict(placement.node_labels)]}
