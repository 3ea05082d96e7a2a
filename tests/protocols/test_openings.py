"""Openings of baselines: what is given, what is sampled, and that the retriever is asked exactly once or never."""

import typing

import pytest
import torch

from r3lite.core.episode import ANSWERED, CUT_OFF, Document, Question
from r3lite.core.grant import Grant, Memory
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.protocols.layout import OPENINGS, Layout
from r3lite.protocols.r3 import R3
from r3lite.protocols.tags import Tags
from r3lite.rollout.engine import Engine
from r3lite.settings import EvaluateSettings, LengthSettings

PROTOCOL = R3("Q: {question}", "D: {documents}")
QUESTIONS = [Question("a", "Who wrote it?", ("Ada",)), Question("b", "Where\nis it?", ("Rome",))]
DOCUMENT = Document("1", "Ada", "Ada wrote it.")


@pytest.fixture
def says(tokenizer):
    """Makes an engine of a baseline whose model says the same answer whatever it is asked."""
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(tokenizer.size, 16, 16, 1, 2, 2)).requires_grad_(False)

    class Scripted(Engine):
        def _sample(self, logits, batch):  # without drafts
            ids = [*tokenizer.encode(self.text), tokenizer.stop_id]
            tokens = [ids[len(sequence.turn)] for sequence in batch.sequences]
            return torch.tensor(tokens), torch.zeros(len(tokens))

    def make(baseline, text, protocol=PROTOCOL, **lengths):
        lengths = LengthSettings(**({"max_length": 600, "max_new_tokens": 64} | lengths))
        engine = Scripted(model, Layout(tokenizer, protocol, lengths, OPENINGS[baseline]), None, Grant(Memory()))
        engine.text = text
        return engine

    return make


def test_every_choice_of_baseline_has_its_opening():
    assert set(typing.get_args(typing.get_type_hints(EvaluateSettings)["baseline"])) == set(OPENINGS)


def test_no_retrieval(says, tokenizer):
    searches = []
    sequences = says("no-retrieval", " Ada").run(QUESTIONS, ["0", "1"], searches.extend)
    assert len(sequences) == len(QUESTIONS)
    for sequence in sequences:
        episode = sequence.episode()
        assert (episode.prediction, episode.finish, episode.search_count) == ("Ada", ANSWERED, 0)
        assert len(episode.steps) == 1 and not episode.steps[0].faults
        sampled_text = tokenizer.decode([t for t, sampled in zip(sequence.tokens, sequence.action_mask) if sampled])
        assert sampled_text == " Ada"
    assert searches == []


def test_single_retrieval_asks_the_question_once(says, tokenizer):
    calls = []

    def retrieve(pairs):
        calls.append([(q.id, query) for q, query in pairs])
        return [[DOCUMENT] for _ in pairs]

    sequences = says("single-retrieval", " Rome").run(QUESTIONS, ["0", "1"], retrieve)
    assert calls == [[("a", "Who wrote it?"), ("b", "Where is it?")]]
    assert len(sequences) == len(QUESTIONS)
    for sequence in sequences:
        episode = sequence.episode()
        assert (episode.prediction, episode.finish, episode.search_count) == ("Rome", ANSWERED, 1)
        assert episode.documents == [DOCUMENT] and not any(s.faults for s in episode.steps)
        text = tokenizer.decode(sequence.tokens)
        assert text.index("D: [1] Ada: Ada wrote it.") < text.index("The final answer: Rome")
        assert [t for t, sampled in zip(sequence.tokens, sequence.action_mask) if sampled][-1] == tokenizer.stop_id


def test_documents_that_do_not_fit_leave_room_for_the_answer(says):
    long = Document("1", "Ada", "word " * 400)
    engine = says("single-retrieval", " Ada", max_length=620, max_document_tokens=2000)
    (sequence,) = engine.run(QUESTIONS[:1], ["0"], lambda pairs: [[long] for _ in pairs])
    assert sequence.episode().prediction == "Ada" and len(sequence.tokens) <= 620


def test_no_room_is_cut_off(says):
    """The documents do not fit, nor does the request for an answer."""
    engine = says("single-retrieval", " Ada", max_length=180)
    (sequence,) = engine.run(QUESTIONS[:1], ["0"], lambda pairs: [[DOCUMENT] for _ in pairs])
    (step,) = sequence.episode().steps
    assert sequence.finish == CUT_OFF and step.searches == () and step.faults == ("no_room",)


def test_a_protocol_with_one_turn_has_the_same_baselines(says, tokenizer):
    """Nothing is in a user turn of its own: the documents and the heading of the answer stand in the model's turn."""
    engine = says("single-retrieval", " Rome </answer>", Tags("Q: {question}"))
    (sequence,) = engine.run(QUESTIONS[1:], ["0"], lambda pairs: [[DOCUMENT] for _ in pairs])
    assert (
        sequence.episode().prediction == "Rome"
        and sequence.tokens.count(tokenizer._marked.token_to_id("<|im_start|>")) == 2
    )
    spliced = "</search>\n\n<information>Doc 1(Title: Ada) Ada wrote it.</information>\n\n"
    answer = "<answer> Rome </answer>"
    assert tokenizer.decode(sequence.tokens).endswith(spliced + answer)
