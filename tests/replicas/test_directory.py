"""The Registry's directory: leases, versions, and what a restart may forget."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from replicas.directory import (
    Directory,
    EngineEntry,
    EngineState,
    ModelEntry,
    ejected,
    model_state,
)
from replicas.restarts import RestartBudget, StallWatch

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


IDLE = {"step_age_s": 0.0, "step_s": 0.1, "running": 0, "waiting": 0, "steps": 7}


def test_a_step_that_takes_far_too_long_is_a_stall() -> None:
    for age_s, usual_s, is_stalled in ((29, 0.1, False), (31, 0.1, True), (31, 10, False)):
        stats = {**IDLE, "running": 1, "step_age_s": age_s, "step_s": usual_s}
        assert bool(StallWatch().look(0.0, stats, stall_s=30)) is is_stalled


def test_work_without_steps_is_a_stall_though_the_engine_answers() -> None:
    watch = StallWatch()
    queued = {**IDLE, "waiting": 3}
    assert not watch.look(0.0, IDLE, stall_s=30)
    assert not watch.look(1000.0, queued, stall_s=30), "it has been idle until now"
    assert not watch.look(1029.0, queued, stall_s=30)
    assert watch.look(1031.0, queued, stall_s=30) == "it has work, and has made no step for 31 s"
    assert not watch.look(1032.0, {**queued, "steps": 8}, stall_s=30)
    assert not watch.look(1061.0, {**queued, "steps": 8}, stall_s=30)
    assert not watch.look(1090.0, {**IDLE, "steps": 8}, stall_s=30)


STATES = st.sampled_from(list(EngineState))


@given(st.lists(st.tuples(STATES, st.booleans()), max_size=40), st.randoms())
def test_at_most_a_quarter_is_ejected_whoever_else_dies(kinds, random) -> None:  # type: ignore[no-untyped-def]
    engines = [
        entry(
            f"e{number}",
            state,
            was_stalled=out and state in (EngineState.LOADING, EngineState.FAILED),
        )
        for number, (state, out) in enumerate(kinds)
    ]
    gone = ejected(engines)
    stalled = {each.replica_id for each in engines if each.state is EngineState.STALLED}
    out = sum(each.was_stalled for each in engines)
    ready = sum(each.state is EngineState.READY for each in engines)
    assert gone <= stalled
    assert len(gone) + out <= max(1, (len(stalled) + ready + out) // 4) or not gone
    if stalled and not out:
        assert gone
    random.shuffle(engines)
    assert ejected(engines) == gone
    bystanders = [each for each in engines if each.state is EngineState.DRAINING]
    assert ejected([each for each in engines if each not in bystanders]) == gone


def test_stalled_engines_go_one_quarter_after_the_other() -> None:
    directory = Directory("boot", lease_s=5, now=0)
    names = [f"e{number}" for number in range(8)]
    for name in names:
        directory.report(entry(name, EngineState.STALLED), MODEL, now=0)
    assert [name for name in names if directory.may_eject(name)] == ["e0", "e1"]
    for name in ("e0", "e1"):
        directory.report(entry(name, EngineState.LOADING, was_stalled=True), MODEL, now=1)
    assert not any(directory.may_eject(name) for name in names)
    back = msgspec.structs.replace(entry("e0"), restarts=1)
    directory.report(back, MODEL, now=2)
    assert [name for name in names if directory.may_eject(name)] == ["e2"]
    assert directory.may_eject("unheard of")
