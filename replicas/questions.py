"""A question to all ingresses, which whoever can answers: the Registry's state for it, pure.

Invariant: a question is kept for as long as someone waits for its answer, and its first answer is
the one that counts.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Question:
    number: int
    text: str
    answer: bytes | None = None


class Questions:
    def __init__(self, first: int) -> None:
        """Numbers rise from `first`: one that is above those of any Registry before this one."""
        self.last = first
        """Number of the newest."""
        self._open: dict[int, Question] = {}

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, text: str) -> Question:
        """Its asker must `close` it."""
        self.last += 1
        question = self._open[self.last] = Question(self.last, text)
        return question

    def since(self, number: int) -> list[tuple[int, str]]:
        """Number and text of those that are open and newer."""
        return [(each.number, each.text) for each in self._open.values() if each.number > number]

    def answer(self, number: int, answer: bytes) -> None:
        """Of one that is no more, or has been answered, nothing is kept."""
        question = self._open.get(number)
        if question is not None and question.answer is None:
            question.answer = answer

    def close(self, question: Question) -> None:
        del self._open[question.number]
