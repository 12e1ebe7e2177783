"""Which requests may have killed a core, and where such a one may run. Pure.

Invariant: on a core there is at most one suspect on trial, so that a core which dies under a trial
condemns exactly one request.

What distinguishes a request that kills from those that only ran beside it is how soon a core dies
of it: when it is computed there. Whatever had delivered some tokens since it came to a core
(`failover.probation_tokens`, more than a core can compute without their being delivered) has passed
that, and is no suspect when the core dies later. Whatever had not is one. It goes on trial: alone
among suspects on a core, until it has delivered so much there. If that core dies too it is
condemned, otherwise it is cleared. Its choices are one suspect: what is wrong with one of them is
wrong with all.

So a request that kills whatever computes its prompt kills two cores: the first makes it a suspect,
the second condemns it. One that kills at a token far in its output has run well on the first, goes
on with all that ran there, and is a suspect from the second on: it kills three.

Which of several causes killed a core cannot be seen from here, so the rule may err, both ways. A
machine that fails under a trial condemns a request that did nothing; a request that kills now and
then, at no certain place, is cleared each time, and `max_failovers` is its bound.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """What becomes of a request whose core has ended."""

    MOVE = "move"
    CONDEMNED = "condemned"
    """It was on trial there: not to be computed again."""
    WORN_OUT = "worn_out"
    """It has survived as many ends as it may."""


@dataclass(slots=True, eq=False)
class Case:
    """What is held against one request. Its choices share it."""

    ends: set[str] = field(default_factory=set)
    """What it lost its place by: cores that ended with it, each once, whatever ran there of it."""
    is_condemned: bool = False
    trial: str | None = None
    """The core that it is on trial on."""
    num_on_trial: int = 0
    """Choices that are."""


class Quarantine:
    """The trials of one model, as one ingress knows them."""

    def __init__(self) -> None:
        self._trials: dict[str, Case] = {}

    def __len__(self) -> int:
        """Cores with a trial."""
        return len(self._trials)

    def closed_to(self, case: Case, cores: Iterable[str]) -> set[str]:
        """Of the cores, those that a suspect may not be sent to now."""
        if case.trial is not None:
            return {core for core in cores if core != case.trial}
        return {core for core in cores if core in self._trials}

    def begin(self, case: Case, core: str) -> None:
        """One choice of a suspect goes on trial, on a core that is not closed to it."""
        assert case.trial in (None, core)
        assert self._trials.get(core) in (None, case)
        self._trials[core] = case
        case.trial = core
        case.num_on_trial += 1

    def end(self, case: Case) -> bool:
        """One choice is on trial no more: cleared, over, or without its core. Returns whether that
        leaves room for another suspect."""
        assert case.trial is not None
        case.num_on_trial -= 1
        if case.num_on_trial:
            return False
        del self._trials[case.trial]
        case.trial = None
        return True

    def ended(self, case: Case, how: str, is_blamed: bool, max_failovers: int) -> Verdict:
        """A choice of the request has lost its core, through no wish of ours. `how` names that end,
        alike for all choices that it took; `is_blamed`: it died while the request was on trial."""
        case.ends.add(how)
        case.is_condemned |= is_blamed
        if case.is_condemned:
            return Verdict.CONDEMNED
        return Verdict.WORN_OUT if len(case.ends) > max_failovers else Verdict.MOVE

    def check_integrity(self) -> None:
        for core, case in self._trials.items():
            assert case.trial == core
            assert case.num_on_trial > 0
