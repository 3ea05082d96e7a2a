"""Drafts from the context: the same tokens in fewer passes."""

import dataclasses

import pytest
import torch

from r3lite.core.episode import ANSWERED, CUT_OFF, Document, Question
from r3lite.core.grant import Grant, Memory
from r3lite.models import lora
from r3lite.models.causal_lm import LayerKind, Rope
from r3lite.models.kv_cache import Decode, KVCache, Prefill
from r3lite.models.verification import Verification
from r3lite.protocols.layout import Layout
from r3lite.protocols.r3 import R3
from r3lite.protocols.registry import build_protocol
from r3lite.rl.batch import Batch, Rollout, action_logprobs, action_states
from r3lite.rollout import drafts, engine
from r3lite.rollout.decoder import Decoder, GraphDecoder
from r3lite.rollout.drafts import Drafter, SamplingResult, worthwhile
from r3lite.rollout.lanes import LaneEngine, Lanes, Visitor
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.sampling_batches import sampling_batches
from r3lite.rollout.sequence import Listener, Sequence
from r3lite.rollout.uniforms import Uniforms
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.rollout.test_decoder import Replayed

PROTOCOL = R3("Q: {question}", "The retrieval documents:\n{documents}\nNow Step {step}.")
LENGTHS = LengthSettings(max_hops=2, max_new_tokens=120, max_length=1200, max_document_tokens=60)
DOCUMENTS = [Document("1", "Rome", "Rome is in Italy, where the river Tiber runs through the old town.")]
LIMIT = 7
SLOTS = 4096  # of a cache with graphs, more than any episode here has tokens
STOP = 0  # the id of a stop token that no test writes


def questions(n):
    return [Question(str(i), f"question {'x' * i}?", ("a",)) for i in range(n)]


def ask(number, query):
    return f"Step {number}:\nThe problem analysis: where the river Tiber runs\nThe retrieval query: {query}"


def answer(number, text):
    return f"Step {number}:\nThe problem analysis: Rome is in Italy, where it runs\nThe final answer: {text}"


SCRIPT = {
    "0": [ask(1, "question ?"), ask(2, "the old town"), answer(3, "Rome is in Italy")],
    "1": [ask(1, "question x?"), ask(2, "the old town"), ask(3, "the old town of Rome"), " the river Tiber"],
    "2": [answer(1, "question xx?")],
}


def documents(pairs):
    return [DOCUMENTS for _ in pairs]


def nothing(pairs):
    return [[] for _ in pairs]


class Counted:
    """Counts the passes of a model that decode, and the tokens of their drafts."""

    def __init__(self, monkeypatch):
        self.passes = 0
        self.verified = 0
        run_drafts = Decoder.run_drafts

        def counted_run_drafts(decoder, additions):
            self.verified += 1
            self.passes += 1
            return run_drafts(decoder, additions)

        monkeypatch.setattr(Decoder, "run_drafts", counted_run_drafts)
        for kind in (Decoder, GraphDecoder):
            monkeypatch.setattr(kind, "__call__", self.counting(kind))

    def counting(self, kind):
        """The `__call__` of a kind of decoder, which counts its calls."""
        call = kind.__call__

        def counted_call(decoder, tokens):
            if type(decoder) is kind:  # GraphDecoder may ask its base
                self.passes += 1
            return call(decoder, tokens)

        return counted_call

    def of(self, work):
        """What `work` returns, with its passes and how many of them had drafts."""
        self.passes = self.verified = 0
        return work(), self.passes, self.verified


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


@pytest.fixture(params=["passes", "graphs"])
def decoders(request, monkeypatch):
    """The decoders of the engine: on a CPU, and as on a card, which has as many places for all rows of a pass."""
    graph_decoders = []

    def by_graphs(model, cache, drafter):
        decoder = GraphDecoder(model, cache, SLOTS, Replayed(), drafter)
        graph_decoders.append(decoder)
        return decoder

    if request.param == "graphs":
        monkeypatch.setattr(engine, "Decoder", by_graphs)
    yield
    assert bool(graph_decoders) == (request.param == "graphs")
    assert all(decoder.uses_graphs and decoder.graphs for decoder in graph_decoders)


def assert_same(drafted, plain):
    """All of episodes that were sampled with drafts and without."""
    for actual, expected in zip(drafted, plain, strict=True):
        assert (actual.tokens, actual.action_mask) == (expected.tokens, expected.action_mask)
        assert (actual.steps, actual.step_ends, actual.finish) == (expected.steps, expected.step_ends, expected.finish)
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert actual.values == pytest.approx(expected.values, abs=1e-4)
        assert actual.stream.peek(0) == expected.stream.peek(0)  # no uniform number was drawn for what was not kept


def with_drafts(plain):
    return dataclasses.replace(plain, draft_tokens=LIMIT)


@pytest.mark.parametrize(
    "sampler",
    [Sampler(0.0), Sampler(0.2), Sampler(0.5, top_k=2), Sampler(1.0, top_p=0.2)],
    ids=["greedy", "sampled", "top-k", "top-p"],
)
def test_tokens_are_those_of_sampling_one_by_one(engine_of, counted, decoders, sampler):
    """Two episodes of a question draft for each other.

    Whether a random model repeats itself, so that drafts save passes, is luck: the next test has one that does.
    """
    plain = engine_of(PROTOCOL, dataclasses.replace(LENGTHS, max_new_tokens=60), sampler)
    group = [questions(1)[0]] * 2
    expected, passes, _ = counted.of(lambda: plain.run(group, ["a", "b"], nothing))
    drafted, fewer_passes, verified = counted.of(lambda: with_drafts(plain).run(group, ["a", "b"], nothing))
    assert verified and fewer_passes <= passes
    assert_same(drafted, expected)
    rerun = with_drafts(plain).run(group, ["a", "b"], nothing)
    assert [s.logprobs for s in rerun] == [s.logprobs for s in drafted]  # to the bit


@pytest.fixture
def head():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(32, 1), torch.nn.Flatten(-2))


def test_episodes_with_retrievals_forced_answers_and_a_critic(scripted, counted, decoders, model, tokenizer, head):
    """Turns that repeat their documents; log-probabilities and values equal those of one uncached pass."""
    plain = scripted(SCRIPT, protocol=PROTOCOL, lengths=LENGTHS, value_head=head)
    expected, passes, _ = counted.of(lambda: plain.run(questions(3), ["a", "b", "c"], documents))
    drafted, fewer_passes, _ = counted.of(lambda: with_drafts(plain).run(questions(3), ["a", "b", "c"], documents))
    assert fewer_passes < 0.8 * passes
    assert_same(drafted, expected)
    assert [s.finish for s in drafted] == [ANSWERED] * 3
    assert drafted[1].steps[-1].faults == ("answer_was_forced",)
    batch = Batch.of([Rollout(s, [], 0) for s in drafted])
    logprobs = action_logprobs(model, batch, tokenizer.size, 1.0)
    assert (logprobs - batch.logprobs[batch.action_mask]).abs().max() <= 1e-4 and logprobs.abs().max() > 1
    values = head(action_states(model, batch)[0])
    assert torch.allclose(values, batch.values[batch.action_mask], atol=1e-4) and values.abs().max() > 0.01


def test_a_stop_string_within_a_draft_ends_the_turn(scripted, counted, decoders):
    """What the draft has behind it is dropped: the turn would go on with the document that the model copied."""
    protocol = build_protocol(ProtocolSettings(format="tags"))
    turns = [f"<think> what </think>\n<search> {query} </search>..." for query in ("the Tiber", "the Tiber there")]
    script = {"0": [*turns, "<think> what </think>\n<answer> Rome </answer>..."]}
    repeated = "<think> what </think>\n<search> the Tiber </search> and more of it"
    (question,) = questions(1)
    question = dataclasses.replace(question, text=f"Copy: {repeated}")
    lengths = dataclasses.replace(LENGTHS, max_length=4000)
    plain = scripted(script, protocol=protocol, lengths=lengths)
    expected = plain.run([question], ["a"], nothing)
    drafted, _, verified = counted.of(lambda: with_drafts(plain).run([question], ["a"], nothing))
    assert verified
    assert_same(drafted, expected)
    assert len(drafted[0].steps) == 3


def test_a_listener_gets_the_same_text(scripted, counted):
    texts = []
    for limit in (0, LIMIT):
        engine = dataclasses.replace(scripted(SCRIPT, protocol=PROTOCOL, lengths=LENGTHS), draft_tokens=limit)
        pieces = []
        engine.run(questions(1), ["a"], documents, listeners=[Listener(pieces.append, lambda sequence: None)])
        texts.append("".join(pieces))
    assert texts[0] == texts[1] and "the old town" in texts[0] and counted.verified


def accept_all(rows, proposed, sample, append, turn_is_over):
    """The sabotage: a draft is kept as it is, and nothing is sampled but what follows it."""
    (batch,) = sampling_batches(rows, proposed)
    sampled = {}
    for sequence, token in zip(batch.sequences, sample(batch), strict=True):
        sampled[id(sequence)] = token  # in the end the one after the draft
    for (sequence,), draft in zip(rows, proposed, strict=True):
        sequence.write(draft)
        sequence.logprobs += [0.0] * len(draft)
        sequence.values += [0.0] * len(draft)
        append(sequence, sampled[id(sequence)])
    lengths = [len(draft) for draft in proposed]
    return SamplingResult(examined=lengths, accepted=lengths, surviving=[sequence for (sequence,) in rows])


def test_drafts_that_are_not_verified_change_the_tokens(engine_of, monkeypatch):
    """The comparison of the other tests sees it."""
    plain = engine_of(PROTOCOL, dataclasses.replace(LENGTHS, max_new_tokens=40), Sampler(0.5))
    expected = plain.run(questions(1), ["a"], nothing)
    monkeypatch.setattr(engine, "append_sampled", accept_all)
    with pytest.raises(AssertionError):
        assert_same(with_drafts(plain).run(questions(1), ["a"], nothing), expected)


@pytest.fixture
def lanes_of(model, tokenizer):
    opened = []

    def make(adapters, draft_tokens):
        layout = Layout(tokenizer, PROTOCOL, dataclasses.replace(LENGTHS, max_new_tokens=50))
        lane_engine = LaneEngine(model, layout, Sampler(0.0), Grant(Memory()), draft_tokens=draft_tokens)
        opened.append(Lanes(lane_engine, adapters, 2, nothing))
        return opened[-1]

    yield make
    for lanes in opened:
        lanes.close()


def answered(lanes, visitors):
    for visitor in visitors:
        lanes.engine.layout.open(visitor)
        lanes.join(visitor)
    while lanes.visitors:
        lanes.iterate()
    return visitors


def test_several_adapters_samplers_and_limits_of_tokens(lanes_of, model, counted):
    """No visitor writes more than it may, though its draft was longer."""
    lora.add_adapter(model, "rl", 4, 8, seed=1)
    for path, weight in lora.adapter_parameters(model, "rl").items():
        if ".lora_B." in path:
            weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))

    def visitors():
        settings = [("a", None, Sampler(0.0), None), ("b", "rl", Sampler(0.0), 33), ("c", "rl", Sampler(0.2), 34)]
        return [
            Visitor(Question(name, name, ()), stream=Uniforms(name), adapter=on, sampler=by, max_tokens=limit)
            for name, on, by, limit in settings
        ]

    expected = answered(lanes_of([None, "rl"], 0), visitors())
    drafted, _, verified = counted.of(lambda: answered(lanes_of([None, "rl"], LIMIT), visitors()))
    assert verified
    assert_same(drafted, expected)
    assert [len(s.logprobs) for s in drafted[1:]] == [33, 34] and drafted[1].finish == CUT_OFF


def test_a_draft_without_numbers_is_taken_back(scripted, model, counted, decoders):
    """A NaN after a draft token that is not kept is nobody's; nor does it stay in the cache, where a mask would not
    remove it from a sum."""
    (question,) = questions(1)
    question = dataclasses.replace(question, text="the river # there")
    script = {"0": [answer(1, "the river of Rome, the river of Rome, the river of it")]}
    plain = scripted(script, protocol=PROTOCOL, lengths=LENGTHS)
    expected = plain.run([question], ["a"], nothing)
    (broken,) = plain.layout.tokenizer.encode("#")
    passes = []
    broken_passes = []

    def break_drafts(module, inputs, output):
        ids, context = passes[-1]
        is_broken = ids == broken
        has_drafts = isinstance(context, Verification) or (isinstance(context, Decode) and ids.shape[1] > 1)
        if has_drafts and is_broken.any():
            broken_passes.append(ids)
            return output.masked_fill(is_broken[..., None], float("nan"))
        return output

    model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs))
    model.model.layers[0].register_forward_hook(break_drafts)
    drafted, _, verified = counted.of(lambda: with_drafts(plain).run([question], ["a"], nothing))
    assert verified > len(broken_passes) > 0
    assert_same(drafted, expected)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("counts", [(3,), (4, 4), (1, 4, 2), (2, 1, 1)], ids=str)
def test_a_pass_over_drafts_equals_one_token_after_the_other(small_model, counts, window):
    """Hidden states and the cache, for rows of different lengths and drafts of different lengths."""
    rope = Rope(10_000.0)
    kinds = (LayerKind(rope, window=window), LayerKind(rope), LayerKind(rope, window=window))
    model = small_model(layer_kinds=kinds)
    generator = torch.Generator().manual_seed(0)
    caches = [KVCache.of(model, 3), KVCache.of(model, 3)]
    starts = [5, 17, 2]
    for cache in caches:
        prefill = Prefill(cache, [(row, list(range(n))) for row, n in enumerate(starts)])
        model(prefill.tokens, prefill)
    additions = [torch.randint(300, (count,), generator=generator).tolist() for count in counts]
    verification = Verification(caches[0], additions)
    hidden = model(verification.tokens, verification)[0]
    expected = []
    for row, tokens in enumerate(additions):
        for token in tokens:
            single = Prefill(caches[1], [(row, [token])])
            expected.append(model(single.tokens, single)[0, 0])
    assert torch.allclose(hidden, torch.stack(expected), atol=1e-5)
    assert caches[0].lengths == caches[1].lengths
    for draft_layer, single_layer in zip(caches[0].layers, caches[1].layers):
        for row, length in enumerate(caches[0].lengths):
            assert torch.allclose(draft_layer.block[row, :, :length], single_layer.block[row, :, :length], atol=1e-5)


def sequence_of(tokens, question=None):
    sequence = Sequence(question or Question("q", "q", ()), stream=Uniforms(0))
    sequence.tokens = list(tokens)
    return sequence


def free(limit, sequences=()):
    """A drafter for which drafted tokens cost next to nothing."""
    return Drafter(limit, STOP, sequences, token_cost=1e-4)


def test_the_last_occurrence_is_continued(monkeypatch):
    monkeypatch.setattr(drafts, "PASS_COST", 0.0)
    cases = {
        (1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3): [6, 7, 1, 2, 3],  # the last of two occurrences
        (9, 2, 3, 4, 1, 2, 3, 5, 8, 2, 3): [5, 8, 2, 3],  # of the last two tokens, as 8, 2, 3 is new
        (1, 2, 3, STOP, 5, 1, 2, 3): [STOP],  # nothing after a stop token
        (1, 2, 3, 4): [],
    }
    for tokens, draft in cases.items():
        assert free(5).propose([sequence_of(tokens)], [100]) == [draft]
    tokens = (1, 2, 3, 4, 5, 6, 1, 2, 3)
    assert free(5).propose([sequence_of(tokens)], [2]) == [[4, 5]]  # no more than there is room for
    assert free(5).propose([sequence_of(tokens)], [-1]) == [[]]


def test_other_episodes_of_the_question_draft_too(monkeypatch):
    monkeypatch.setattr(drafts, "PASS_COST", 0.0)
    question = Question("q", "q", ())
    first, second = sequence_of([1, 2, 3, 4, 5, 6], question), sequence_of([7, 1, 2, 3], question)
    assert free(3, [first, second]).propose([first, second], [9, 9]) == [[], [4, 5, 6]]
    stranger = sequence_of([7, 1, 2, 3])
    assert free(3, [first, stranger]).propose([first, stranger], [9, 9]) == [[], []]
    assert free(3).propose([first, second], [9, 9]) == [[], []]  # of visitors, who are strangers


def test_a_token_is_drafted_if_it_pays():
    assert worthwhile(0.5, 0.2, 7) == (2, 0.75)
    assert worthwhile(0.5, 0.2, 1) == (1, 0.5)
    assert worthwhile(0.2, 0.5, 7) == (0, 0.0)
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    rows = [sequence_of(tokens) for _ in range(16)]
    assert sum(map(len, free(7).propose(rows, [9] * 16))) == 32  # MOST_DRAFTED
    assert not any(Drafter(7, STOP, token_cost=0.5).propose(rows, [9] * 16))


@pytest.mark.parametrize(("episodes", "drafts"), [(16, True), (17, False)])
def test_more_than_sixteen_episodes_are_sampled_without_drafts(engine_of, counted, episodes, drafts):
    """Also if they share rows: the plan of memory counts the logits of drafts for so many."""
    lengths = dataclasses.replace(LENGTHS, max_new_tokens=20)
    drafting = with_drafts(engine_of(PROTOCOL, lengths, Sampler(0.0), rollout_batch_size=episodes))
    group = [questions(1)[0]] * episodes
    _, _, verified = counted.of(lambda: drafting.run(group, [str(i) for i in range(episodes)], nothing))
    assert bool(verified) == drafts


def test_drafts_stop_where_they_are_refused():
    drafter = Drafter(7, STOP)
    sequence = sequence_of([1, 2, 3, 4, 5, 6, 1, 2, 3])
    lengths = []
    for _ in range(12):
        (draft,) = drafter.propose([sequence], [9])
        lengths.append(len(draft))
        drafter.record(SamplingResult(examined=[1 if draft else 0], accepted=[0], surviving=[]))
    assert lengths[0] == 6 and lengths[-1] < lengths[0]
    assert sorted(lengths, reverse=True) == lengths


def test_without_drafts_nothing_is_verified(engine_of, counted):
    plain = engine_of(PROTOCOL, dataclasses.replace(LENGTHS, max_new_tokens=20), Sampler(0.0))
    _, _, verified = counted.of(lambda: plain.run(questions(1), ["a"], nothing))
    assert plain.build_scheduler_and_decoder([], 1)[1].drafter is None and not verified
