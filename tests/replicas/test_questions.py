"""Questions to all ingresses: what stands open, and whose answer counts."""

from replicas.questions import Questions


def test_the_first_answer_counts_and_what_nobody_waits_for_is_gone() -> None:
    questions = Questions(first=100)
    one, two = questions.ask("one"), questions.ask("two")
    assert questions.since(0) == [(101, "one"), (102, "two")]
    assert questions.since(101) == [(102, "two")]
    questions.answer(two.number, b"first")
    questions.answer(two.number, b"second")
    assert (one.answer, two.answer) == (None, b"first")
    questions.close(two)
    questions.answer(two.number, b"late")
    questions.close(one)
    assert len(questions) == 0
    assert questions.since(0) == []
