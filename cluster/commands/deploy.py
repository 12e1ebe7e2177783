"""`shoal deploy`: puts a configuration on a Ray cluster that runs, and changes it later.

Invariant: it says what will change, and how, before it changes anything; it touches what differs
and nothing else. Ended early, it leaves the cluster to finish what it was told.
"""

import json
import sys
import time
from typing import Any

import click

from cluster.commands.phases import Phases
from cluster.deploy.dashboard import DEFAULT_ADDRESS, Dashboard, DeployFailed
from cluster.deploy.plan import Plan, make_plan
from cluster.deploy.rollout import Rollout
from configs.load import ConfigError, load
from configs.shoal import ShoalConfig

_POLL_S = 0.5


@click.command()
@click.argument("config_name", metavar="CONFIG")
@click.option(
    "--address",
    default=DEFAULT_ADDRESS,
    show_default=True,
    help="Ray's dashboard, where `ray job submit` goes too.",
)
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
@click.option("--no-wait", is_flag=True, help="Do not wait until all of it runs.")
@click.option(
    "--timeout", type=click.IntRange(1), default=1800, show_default=True, help="Seconds to wait."
)
@click.option("--json", "as_json", is_flag=True, help="The plan and the outcome as JSON on stdout.")
def deploy(
    config_name: str,
    address: str,
    dry_run: bool,
    no_wait: bool,
    timeout: int,
    as_json: bool,
) -> None:
    """Deploy CONFIG to a running Ray cluster, or change what is deployed there.

    Prints every field that differs from what is deployed: `live` is applied to what runs, `restart`
    replaces the engines of that model. Nothing else is touched. Run again it changes nothing.

    Exit codes: 0 it runs, 1 failed, 2 wrong usage, 130 interrupted (the cluster
    goes on by itself).

    \b
    Examples:
      shoal deploy shoal.yaml
      shoal deploy shoal.yaml --address http://head:8265 --dry-run
    """
    config = _configuration(config_name)
    dashboard = Dashboard(address)
    plan = make_plan(dashboard.deployed(), config)
    _show(plan)
    outcome: dict[str, Any] = {"address": address, **plan.as_json(), "applied": False}
    if not dry_run:
        # Also without a change: Serve may have been told of another one by other ways.
        dashboard.apply(config)
        outcome["applied"] = True
        if not no_wait:
            outcome["failed"] = _await_done(Rollout(dashboard, config, plan), timeout)
    if as_json:
        click.echo(json.dumps(outcome, indent=2))
    elif outcome.get("failed") == {}:
        names = ", ".join(model.name for model in config.models)
        host, port = config.ingress.host, config.ingress.port
        click.echo(f"Shoal serves {names} at {host}:{port} of the nodes with an ingress")
    if outcome.get("failed"):
        sys.exit(1)


def _configuration(name: str) -> ShoalConfig:
    try:
        config = load(name)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    if config.cluster_secret_file is None:
        raise click.ClickException(
            f"{name}: cluster_secret_file is required: engines listen on the network, and the "
            "cluster's keys are derived from it. The same file, readable by its owner alone, must "
            "be on every node; this makes one: (umask 077; openssl rand -hex 32 > PATH)"
        )
    return config


def _show(plan: Plan) -> None:
    for change in plan.changes:
        click.echo(str(change), err=True)
    for note in plan.notes:
        click.echo(note, err=True)
    if not plan.changes:
        click.echo("nothing changes", err=True)


def _await_done(rollout: Rollout, timeout_s: float) -> dict[str, str]:
    """Shows what is being waited for, and why. Returns the reason of each part that has failed.
    Raises `DeployFailed` at the end of its patience."""
    phases = Phases()
    end_s = time.monotonic() + timeout_s
    shown: tuple[str, ...] = ()
    told = ""
    try:
        while (look := rollout.look()).pending:
            if time.monotonic() > end_s:
                raise DeployFailed(f"not done after {timeout_s:g} s: {', '.join(look.pending)}")
            if look.hindrance != told:
                told, shown = look.hindrance, ()
                phases.end()
                click.echo(told or "it goes on", err=True)
            if look.pending != shown:
                shown = look.pending
                phases.begin(", ".join(shown))
            time.sleep(_POLL_S)
    finally:
        phases.end()
    for label, message in look.failed.items():
        click.echo(f"{label} failed: {message}", err=True)
    return look.failed
