"""What episodes of a question have in common is run once, and they say what each says alone."""

import dataclasses
import random

import pytest
import torch

from r3lite.core.episode import ANSWERED, CUT_OFF, Document, Question
from r3lite.core.grant import Grant, Memory
from r3lite.models.carried import KeysValues
from r3lite.models.causal_lm import LayerKind
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.lfm2 import Lfm2Layer, Lfm2Trunk
from r3lite.models.rotary import Rope
from r3lite.models.verification import Verification
from r3lite.protocols.layout import Layout
from r3lite.protocols.r3 import R3
from r3lite.rollout.engine import Engine
from r3lite.rollout.lanes import LaneEngine, Lanes, Visitor
from r3lite.rollout.prefixes import common_length, equal_parts, prefills
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms
from r3lite.settings import LengthSettings
from tests.evaluating import token_of

PROTOCOL = R3("Q: {question}", "D: {documents}\nNow Step {step}.")
LENGTHS = LengthSettings(max_hops=3, max_new_tokens=120, max_length=1500, max_document_tokens=60)
QUESTION = Question("q", "Where does the Tiber run?", ("a",))
ROME = Document("1", "Rome", "Rome is in Italy.")
OSLO = Document("2", "Oslo", "Oslo is in Norway.")


def ask(number, query):
    return f"Step {number}:\nThe problem analysis: where\nThe retrieval query: {query}"


def answer(number, text):
    return f"Step {number}:\nThe problem analysis: so\nThe final answer: {text}"


# Of each episode, by its stream: four are equal until their documents have come, two of them until the second query.
TURNS = {
    "a": [ask(1, "the Tiber"), ask(2, "the old town"), answer(3, "Rome")],
    "b": [ask(1, "the Tiber"), ask(2, "the old town of Rome"), answer(3, "Italy")],
    "c": [ask(1, "the Tiber"), ask(2, "the old town"), answer(3, "Rome, in Italy")],
    "d": [ask(1, "the Tiber"), answer(2, "Rome")],
    "e": [ask(1, "a river"), answer(2, "Rome")],
    "f": [answer(1, "Rome")],
}


@dataclasses.dataclass
class TurnsEngine(Engine):
    """Says the turns of an episode's name, and records the probability that the model gave each token."""

    names: tuple[str, ...] = ()  # by the places of the episodes

    def _sample(self, logits, batch):
        logprobs = torch.log_softmax(logits.float(), -1)
        tokens = []
        for sequence, depth in zip(batch.sequences, batch.depths, strict=True):
            turn = TURNS[self.names[sequence.index]][len(sequence.steps)]
            tokens.append(token_of(self.layout.tokenizer, turn, len(sequence.turn) + depth))
        return torch.tensor(tokens), logprobs[range(len(tokens)), tokens]


def documents(pairs):
    return [[ROME] for _ in pairs]


def nothing(pairs):
    return [[] for _ in pairs]


@pytest.fixture
def head():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(32, 1), torch.nn.Flatten(-2))


@pytest.fixture
def say(model, tokenizer, head):
    """Samples the episodes of some names in one run; counts the tokens and rows of the model's passes."""

    def run(names, retrieve=documents, draft_tokens=0, network=model, **memory):
        layout = Layout(tokenizer, PROTOCOL, LENGTHS)
        engine = TurnsEngine(network, layout, Sampler(), Grant(Memory(**memory)), head, draft_tokens=draft_tokens)
        engine.names = tuple(names)
        passes = []
        handle = network.register_forward_pre_hook(lambda module, inputs: passes.append(inputs))
        sequences = engine.run([QUESTION] * len(names), list(names), retrieve)
        handle.remove()
        return sequences, passes

    return run


def assert_same(together, alone):
    for actual, expected in zip(together, alone, strict=True):
        assert (actual.tokens, actual.action_mask) == (expected.tokens, expected.action_mask)
        assert (actual.steps, actual.step_ends, actual.finish) == (expected.steps, expected.step_ends, expected.finish)
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert actual.values == pytest.approx(expected.values, abs=1e-4)
        assert actual.stream.peek(0) == expected.stream.peek(0)


def has_drafts(passes):
    return any(isinstance(context, Verification) for _, context in passes)


def test_episodes_with_retrievals_and_a_critic_say_what_each_says_alone(say):
    """Also with drafts, and if there are fewer rows than episodes: the later ones copy what an earlier one has."""
    alone = [say(name)[0][0] for name in TURNS]
    assert all(sequence.finish == ANSWERED for sequence in alone)
    for rows, draft_tokens in ((6, 0), (4, 0), (6, 7)):
        together, passes = say(TURNS, draft_tokens=draft_tokens, rollout_batch_size=rows)
        assert_same(together, alone)
        assert has_drafts(passes) == bool(draft_tokens)
    rerun, _ = say(TURNS, draft_tokens=7, rollout_batch_size=6)
    assert [s.logprobs + s.values for s in rerun] == [s.logprobs + s.values for s in together]  # to the bit


def test_a_state_is_shared_as_keys_and_values_are(say, small_model, tokenizer):
    """With drafts, whose states must be taken back in a row that is copied as in that which it is copied from."""
    kinds = (LayerKind(None, taps=3), LayerKind(Rope(10_000.0)))
    form = {"layer": Lfm2Layer, "trunk": Lfm2Trunk, "qk_norm": True, "qkv_bias": False, "layer_kinds": kinds}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": tokenizer.size + 13}
    network = small_model(**sizes, **form)
    alone = [say(name, network=network)[0][0] for name in TURNS]
    together, passes = say(TURNS, network=network, draft_tokens=7, rollout_batch_size=4)
    assert_same(together, alone)
    assert has_drafts(passes)


def test_each_common_prefix_is_prefilled_once(say):
    together, passes = say(TURNS)
    starts = set()  # each prefix that ends before a turn, without its last token, which is decoded
    read = 0
    for sequence in together:
        mask = sequence.action_mask
        input_tokens = 0
        for place, is_action in enumerate(mask):
            if not is_action:
                input_tokens += 1
            elif input_tokens:
                prefix = tuple(sequence.tokens[:place])
                if prefix not in starts:
                    starts.add(prefix)
                    # The last token of a turn is prefilled with the documents, whose last one is decoded.
                    read += input_tokens - 1 + (place > input_tokens)
                input_tokens = 0
    prefilled = [context for _, context in passes if isinstance(context, Prefill)]
    assert sum(context.tokens.shape[1] for context in prefilled) == read
    decoded = [len(ids) for ids, context in passes if not isinstance(context, Prefill)]
    assert decoded[0] == 1 and max(decoded) < 6  # the row of all six, until they differ


def test_documents_that_differ_part_those_who_asked_the_same(say):
    def one_each(pairs):
        return [[OSLO] if number % 2 else [ROME] for number, _ in enumerate(pairs)]

    together, _ = say("ddee", retrieve=one_each)
    assert [s.steps[0].documents[0].id for s in together] == ["1", "2", "1", "2"]
    alone = []
    for name, document in zip("ddee", [ROME, OSLO] * 2, strict=True):
        (sequence,), _ = say(name, retrieve=lambda pairs, document=document: [[document] for _ in pairs])
        alone.append(sequence)
    assert_same(together, alone)


@pytest.mark.parametrize(
    "sampler",
    [Sampler(0.0), Sampler(0.3), Sampler(1.0, top_k=3), Sampler(1.0, top_p=0.3)],
    ids=["greedy", "sampled", "top-k", "top-p"],
)
def test_what_is_sampled_does_not_depend_on_who_shares_the_row(engine_of, sampler):
    engine = engine_of(PROTOCOL, dataclasses.replace(LENGTHS, max_new_tokens=16), sampler)
    together = engine.run([QUESTION] * 3, ["x", "y", "x"], nothing)
    alone = [engine.run([QUESTION], [seed], nothing)[0] for seed in ("x", "y", "x")]
    assert_same(together, alone)


def test_one_that_leaves_a_row_lets_the_others_go_on(model, tokenizer):
    layout = Layout(tokenizer, PROTOCOL, dataclasses.replace(LENGTHS, max_new_tokens=16))
    engine = LaneEngine(model, layout, Sampler(0.0), Grant(Memory()))

    def visitor(limit):
        sequence = Visitor(QUESTION, stream=Uniforms("v"), sampler=Sampler(0.0), max_tokens=limit)
        layout.open(sequence)
        return sequence

    lanes = Lanes(engine, [None], 3, nothing)
    visitors = [visitor(None), visitor(5), visitor(9)]
    for each in visitors:
        lanes.join(each)
    while lanes.visitors:
        lanes.iterate()
    lanes.close()
    longest, *shorter = visitors
    assert [len(short.logprobs) for short in shorter] == [5, 9] and shorter[0].finish == CUT_OFF
    (alone,) = engine_run(model, layout)
    assert longest.tokens == alone.tokens
    for short in shorter:
        assert short.tokens == longest.tokens[: len(short.tokens)]


def engine_run(model, layout):
    return Engine(model, layout, Sampler(0.0), Grant(Memory())).run([QUESTION], ["v"], nothing)


def sequence_of(tokens):
    return Sequence(QUESTION, tokens=list(tokens), stream=Uniforms(0))


def test_the_common_length_is_that_of_a_comparison_one_by_one():
    draw = random.Random(0)
    for _ in range(300):
        first = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
        second = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
        expected = 0
        for first_token, second_token in zip(first[:-1], second[:-1]):
            if first_token != second_token:
                break
            expected += 1
        assert common_length(sequence_of(first), sequence_of(second)) == expected


def test_sequences_are_parted_by_their_tokens():
    row = [sequence_of(text) for text in ([1, 2], [1, 3], [1, 2], [1])]
    assert equal_parts(row) == [[row[0], row[2]], [row[1]], [row[3]]]


def test_a_row_waits_for_the_one_that_has_its_prefix_in_the_same_pass():
    """Rows of 40 common tokens, two of them of 60; one has 30 in the cache; then passes of at most 50 tokens."""
    common = list(range(40))
    texts = [[*common, 100], [*common, *range(200, 220), 101], [*common, *range(200, 220), 102, 103], [7, 8, 9]]
    for limit, expected in (
        (1000, [[(0, 40), (3, 2)], [(1, 20)], [(2, 1)]]),
        (30, [[(0, 30)], [(0, 10), (3, 2)], [(1, 20)], [(2, 1)]]),
    ):
        cpu = torch.device("cpu")
        cache = KVCache([KeysValues(4, 2, 4, torch.float32, cpu)], 4, torch.float32, cpu)
        rows = [[sequence_of(text)] for text in texts]
        passes = []
        for parts in prefills(rows, 4, cache, limit):
            passes.append([(row, len(tokens)) for row, tokens in parts])
            tokens = Prefill(cache, parts).tokens
            assert tokens.shape[1] == sum(count for _, count in passes[-1]) <= limit
        assert passes == expected
        assert cache.lengths == [len(text) - 1 for text in texts]
