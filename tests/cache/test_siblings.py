"""The nearest sibling, against a look at all of them."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.siblings import Siblings, SkipList, common_run, pack

TOKENS = st.lists(st.integers(0, 2) | st.sampled_from([255, 256, 2**31 - 1]), max_size=5)


@given(TOKENS, TOKENS)
def test_a_run_is_counted_in_whole_tokens(one: list[int], other: list[int]) -> None:
    run = common_run(pack(one), pack(other))
    assert one[:run] == other[:run]
    assert run == min(len(one), len(other)) or one[run] != other[run]


@given(st.lists(TOKENS, unique_by=tuple), TOKENS)
def test_a_skip_list_is_a_sorted_list(entries: list[list[int]], wanted: list[int]) -> None:
    listed = SkipList()
    for number, tokens in enumerate(entries):
        listed.insert(pack(tokens), number)
    assert [tokens for tokens, _ in listed] == sorted(map(pack, entries))
    before = [pack(tokens) for tokens in entries if pack(tokens) < pack(wanted)]
    after = [pack(tokens) for tokens in entries if pack(tokens) >= pack(wanted)]
    around = ([max(before)] if before else []) + ([min(after)] if after else [])
    assert [tokens for tokens, _ in listed.around(pack(wanted))] == around
    for tokens in entries:
        listed.remove(pack(tokens))
    assert len(listed) == 0
    assert not list(listed)


class SiblingsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.siblings = Siblings()
        self.model: dict[tuple[int, bytes], int] = {}
        self.next_block = 0

    @rule(parent=st.integers(0, 1), tokens=TOKENS)
    def add(self, parent: int, tokens: list[int]) -> None:
        if (parent, pack(tokens)) not in self.model:
            self.model[parent, pack(tokens)] = self.next_block
            self.siblings.add(parent, pack(tokens), self.next_block)
            self.next_block += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        parent, tokens = data.draw(st.sampled_from(sorted(self.model)))
        del self.model[parent, tokens]
        self.siblings.remove(parent, tokens)

    @rule(parent=st.integers(0, 1), tokens=TOKENS)
    def nearest(self, parent: int, tokens: list[int]) -> None:
        block_id, run = self.siblings.nearest(parent, pack(tokens))
        runs = {
            block: common_run(pack(tokens), each)
            for (of, each), block in self.model.items()
            if of == parent
        }
        assert run == max(runs.values(), default=0)
        assert run == 0 or runs[block_id] == run

    @invariant()
    def holds(self) -> None:
        self.siblings.check_integrity()
        found = {(parent, tokens): block for parent, tokens, block in self.siblings.entries()}
        assert found == self.model


class FewListed(SiblingsMachine):
    """Where two children are many already."""

    def __init__(self) -> None:
        super().__init__()
        self.siblings = Siblings(most_listed=1)


TestSiblings = SiblingsMachine.TestCase
TestSiblings.settings = settings(max_examples=60)
TestManySiblings = FewListed.TestCase
TestManySiblings.settings = settings(max_examples=60)
