"""Engines that a model is compared with: answering at once, and answering after one retrieval with the question.

The model is given all of an episode but the answer, in the layout that it was trained on.
"""

from r3lite.episode import CUT_OFF, Step
from r3lite.rollout.engine import Engine
from r3lite.rollout.fetcher import Retrieve
from r3lite.rollout.sequence import Sequence


class NoRetrieval(Engine):
    """The first turn opens with a forced answer: what the model knows by itself."""

    def _prepare(self, sequences: list[Sequence], retrieve: Retrieve) -> None:
        self._begin(sequences, retrieve)
        for sequence in sequences:
            if sequence.finish is None and not sequence.opening:
                self._ask_for_answer(sequence)

    def _begin(self, sequences: list[Sequence], retrieve: Retrieve) -> None:
        """What comes before the answer: nothing."""

    def _ask_for_answer(self, sequence: Sequence) -> None:
        opening = self.format.forced_answer(len(sequence.steps) + 1)
        given = self.tokenizer.encode(opening)
        if len(sequence.tokens) + len(given) >= self.lengths.max_length:
            sequence.finish = CUT_OFF
            return
        sequence.observe(given)
        sequence.opening = opening


class SingleRetrieval(NoRetrieval):
    """The first step is given, with the question itself as its query; then the answer is forced."""

    def _begin(self, sequences: list[Sequence], retrieve: Retrieve) -> None:
        for sequence in sequences:
            text = sequence.question.text
            step = Step(f"I need to find out: {text}", " ".join(text.split()))
            sequence.observe(self.tokenizer.encode(self.format.render(step, 1)))
            sequence.add_step(step)
        found = retrieve([(s.question, s.steps[-1].query) for s in sequences])
        for sequence, documents in zip(sequences, found, strict=True):
            self._splice(sequence, documents)
