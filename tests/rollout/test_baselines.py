"""Baselines: what is given, what is sampled, and that the retriever is asked exactly once or never."""

import pytest

from r3lite.episode import ANSWERED, CUT_OFF, Document, Question
from r3lite.protocols.r3 import Prompts
from r3lite.rollout.baselines import NoRetrieval, SingleRetrieval
from r3lite.settings import LengthSettings

PROMPTS = Prompts("Q: {question}", "D: {documents}")
QUESTIONS = [Question("a", "Who wrote it?", ("Ada",)), Question("b", "Where\nis it?", ("Rome",))]
DOCUMENT = Document("1", "Ada", "Ada wrote it.")


@pytest.fixture
def says(model, tokenizer):
    """Makes a baseline whose model says the same answer whatever it is asked."""

    def make(kind, text, **lengths):
        class Scripted(kind):
            def _sample(self, logits, rows):
                ids = [*tokenizer.encode(text), tokenizer.stop_id]
                return [ids[len(s.turn)] for s in rows], [0.0] * len(rows)

        return Scripted(
            model, tokenizer, PROMPTS, LengthSettings(**({"max_length": 600, "max_new_tokens": 64} | lengths))
        )

    return make


def test_no_retrieval(says, tokenizer):
    asked = []
    sequences = says(NoRetrieval, " Ada").run(QUESTIONS, ["0", "1"], asked.extend)
    for sequence in sequences:
        episode = sequence.episode()
        assert (episode.prediction, episode.finish, episode.searches) == ("Ada", ANSWERED, 0)
        assert len(episode.steps) == 1 and not episode.steps[0].faults
        said = tokenizer.decode([t for t, sampled in zip(sequence.tokens, sequence.action) if sampled])
        assert said == " Ada"
    assert asked == []


def test_single_retrieval_asks_the_question_once(says, tokenizer):
    calls = []

    def retrieve(pairs):
        calls.append([(q.id, query) for q, query in pairs])
        return [[DOCUMENT] for _ in pairs]

    sequences = says(SingleRetrieval, " Rome").run(QUESTIONS, ["0", "1"], retrieve)
    assert calls == [[("a", "Who wrote it?"), ("b", "Where is it?")]]
    for sequence in sequences:
        episode = sequence.episode()
        assert (episode.prediction, episode.finish, episode.searches) == ("Rome", ANSWERED, 1)
        assert episode.documents == [DOCUMENT] and not any(s.faults for s in episode.steps)
        text = tokenizer.decode(sequence.tokens)
        assert text.index("D: [1] Ada: Ada wrote it.") < text.index("The final answer: Rome")
        assert [t for t, sampled in zip(sequence.tokens, sequence.action) if sampled][-1] == tokenizer.stop_id


def test_documents_that_do_not_fit_leave_room_for_the_answer(says):
    long = Document("1", "Ada", "word " * 400)
    engine = says(SingleRetrieval, " Ada", max_length=620, max_document_tokens=2000)
    (sequence,) = engine.run(QUESTIONS[:1], ["0"], lambda pairs: [[long] for _ in pairs])
    assert sequence.episode().prediction == "Ada" and len(sequence.tokens) <= 620


def test_no_room_is_cut_off(says):
    (sequence,) = says(NoRetrieval, " Ada", max_length=100).run(QUESTIONS[:1], ["0"], None)
    assert sequence.episode().finish == CUT_OFF and sequence.episode().steps == []
