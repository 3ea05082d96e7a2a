"""What an episode holds before the model's first turn: the prompt alone, or what a baseline gives besides.

A baseline gives the model all of an episode but the answer, in the layout that it was trained on.
"""

from dataclasses import dataclass

from r3lite.episode import Question, Step


@dataclass(frozen=True)
class Opening:
    """What comes after the prompt."""

    searches: bool = False  # a first step with the question itself as its query, and the documents that it brings
    forces_answer: bool = False  # the forced prefix of an answer, so that the model's first turn is the answer

    def first_step(self, question: Question) -> Step | None:
        """The step that is given, still without its documents; None: the model writes the first step itself."""
        if not self.searches:
            return None
        return Step(f"I need to find out: {question.text}", " ".join(question.text.split()))


# By the values of --baseline.
OPENINGS = {
    "none": Opening(),
    "no-retrieval": Opening(forces_answer=True),
    "single-retrieval": Opening(searches=True, forces_answer=True),
}
