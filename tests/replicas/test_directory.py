"""The Registry's directory: leases, versions, and what a restart may forget."""

from replicas.directory import Directory, EngineEntry, EngineState, ModelEntry, model_state
from replicas.restarts import RestartBudget, has_stalled

MODEL = ModelEntry("m", "default")


def entry(name: str, state: EngineState = EngineState.READY, **fields: object) -> EngineEntry:
    return EngineEntry(name, "m", state, endpoint="ipc://x", **fields)  # type: ignore[arg-type]


def test_an_engine_is_listed_while_it_renews_its_lease() -> None:
    directory = Directory("boot", lease_s=5, now=0)
    directory.report(entry("a"), MODEL, now=0)
    directory.report(entry("b"), MODEL, now=3)
    directory.expire(now=5.1)
    assert [engine.replica_id for engine in directory.view().engines] == ["b"]
    directory.withdraw("b")
    directory.withdraw("b")
    assert directory.view().engines == ()


def test_the_last_failure_of_a_model_is_remembered_until_another_engine_reports() -> None:
    directory = Directory("boot", lease_s=5, now=0)
    directory.set_models((MODEL,))
    for name in "ab":
        directory.report(entry(name, EngineState.FAILED, detail="no GPU"), MODEL, now=0)
    directory.expire(now=100)
    (left,) = directory.view().engines
    assert left.detail == "no GPU"
    directory.report(entry("c", EngineState.LOADING), MODEL, now=101)
    assert [engine.replica_id for engine in directory.view().engines] == ["c"]
    directory.report(entry("c", EngineState.FAILED), MODEL, now=102)
    directory.set_models(())
    directory.expire(now=200)
    assert directory.view().engines == ()


def test_the_version_rises_with_every_change_and_with_nothing_else() -> None:
    directory = Directory("boot", lease_s=5, now=0)
    directory.set_models((MODEL,))
    versions = [directory.version]

    def note() -> bool:
        versions.append(directory.version)
        return versions[-1] > versions[-2]

    directory.report(entry("a", EngineState.LOADING), MODEL, now=0)
    assert note()
    directory.report(entry("a", EngineState.LOADING), MODEL, now=1)
    directory.set_models((MODEL,))
    assert not note()
    directory.report(entry("a"), MODEL, now=2)
    assert note()
    directory.expire(now=4)
    assert not note()
    directory.expire(now=6)
    assert note(), "it has settled"
    directory.expire(now=8)
    assert note(), "the lease has run out"


def test_a_new_registry_is_unsettled_for_a_lease_and_learns_models_from_engines() -> None:
    directory = Directory("boot", lease_s=5, now=100)
    directory.report(entry("a"), MODEL, now=101)
    directory.expire(now=101)
    assert not directory.view().is_settled
    assert directory.view().models == (MODEL,)
    directory.report(entry("a"), MODEL, now=104)
    directory.expire(now=105)
    assert directory.view().is_settled


def test_once_told_the_models_it_believes_no_engine() -> None:
    directory = Directory("boot", lease_s=5, now=0)
    directory.set_models(())
    directory.report(entry("a"), MODEL, now=0)
    assert directory.view().models == ()


def test_a_model_is_as_well_as_its_best_engine() -> None:
    directory = Directory("boot", lease_s=5, now=0)
    assert model_state(directory.view(), "m") is EngineState.LOADING
    directory.report(entry("a", EngineState.FAILED), MODEL, now=0)
    assert model_state(directory.view(), "m") is EngineState.FAILED
    directory.report(entry("b", EngineState.DRAINING), MODEL, now=0)
    assert model_state(directory.view(), "m") is EngineState.DRAINING
    directory.report(entry("c"), MODEL, now=0)
    assert model_state(directory.view(), "m") is EngineState.READY


def test_a_restarted_core_is_another_engine() -> None:
    assert entry("a").core_id != entry("a", restarts=1).core_id


def test_restarts_are_counted_over_a_window() -> None:
    budget = RestartBudget()
    assert [budget.take(now, 2, 10) for now in (0, 1, 2, 9.9)] == [True, True, False, False]
    assert budget.take(10.1, 2, 10)
    assert not budget.take(10.5, 2, 10)
    assert budget.take(10.5, 3, 10)


def test_a_step_stalls_beyond_both_limits() -> None:
    assert not has_stalled(step_age_s=29, usual_step_s=0.1, stall_s=30)
    assert has_stalled(step_age_s=31, usual_step_s=0.1, stall_s=30)
    assert not has_stalled(step_age_s=31, usual_step_s=10, stall_s=30)
