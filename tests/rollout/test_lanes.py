"""Sequences that join and leave while others are sampled, and adapters side by side."""

import threading

import pytest
import torch

from r3lite.core.episode import ANSWERED, CUT_OFF, Document, Question
from r3lite.core.grant import Grant, Memory
from r3lite.models import lora
from r3lite.protocols.layout import Layout
from r3lite.protocols.r3 import R3
from r3lite.rollout.engine import Engine
from r3lite.rollout.lanes import LaneEngine, Lanes, Visitor
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.uniforms import Uniforms
from r3lite.settings import LengthSettings
from tests.rollout.conftest import ScriptedEngine

PROTOCOL = R3("Instructions that all questions share. Q: {question}", "D: {documents}")
LENGTHS = LengthSettings(max_hops=2, max_new_tokens=40, max_length=600, max_document_tokens=30)
GREEDY = Sampler(0.0)
QUERY = "Step 1:\nThe problem analysis: x\nThe retrieval query: y"
ANSWER = "Step {}:\nThe problem analysis: x\nThe final answer: z"


def nothing(pairs):
    return [[] for _ in pairs]


@pytest.fixture
def layout(tokenizer):
    return Layout(tokenizer, PROTOCOL, LENGTHS)


@pytest.fixture
def lanes_of(model, layout):
    open_lanes = []

    def make(adapters=(None,), rows=4, retrieve=nothing, kind=LaneEngine):
        engine = kind(model, layout, GREEDY, Grant(Memory()))
        open_lanes.append(Lanes(engine, list(adapters), rows, retrieve))
        return open_lanes[-1]

    yield make
    for lanes in open_lanes:
        lanes.close()


@pytest.fixture
def visitor(layout):
    def make(name, sampler=GREEDY, adapter=None, max_tokens=None):
        question, stream = Question(name, f"question {name}?", ()), Uniforms(name)
        sequence = Visitor(question, stream=stream, sampler=sampler, adapter=adapter, max_tokens=max_tokens)
        layout.open(sequence)
        return sequence

    return make


def run(lanes):
    """The sequences in the order in which they ended."""
    completions = []
    while lanes.visitors:
        completions += lanes.iterate()
    return completions


def alone(model, layout, sequence, sampler=GREEDY):
    """What an engine makes of the same question."""
    engine = Engine(model, layout, sampler, Grant(Memory()))
    (expected,) = engine.run([sequence.question], [sequence.question.id], nothing)
    return expected


def test_who_joins_later_says_what_it_says_alone(lanes_of, visitor, model, layout):
    lanes = lanes_of(rows=2)
    early, late, last = visitor("a"), visitor("bb"), visitor("ccc")
    lanes.join(early)
    for _ in range(7):
        lanes.iterate()
    lanes.join(late)
    lanes.join(last)  # there is no row for it until one of the others is over
    lanes.iterate()
    assert not last.logprobs and late.logprobs
    assert len(run(lanes)) == 3
    for sequence in (early, late, last):
        assert sequence.tokens == alone(model, layout, sequence).tokens


def add_random_adapter(model, name, seed):
    lora.add_adapter(model, name, 4, 8, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for path, weight in lora.adapter_parameters(model, name).items():
        if ".lora_B." in path:
            weight.data.normal_(0, 0.3, generator=generator)


def test_adapters_side_by_side_give_what_each_gives_alone_to_the_bit(lanes_of, visitor, model, layout):
    """Tokens and log-probabilities, while the rows of others are sampled in the same iterations."""
    seeds = {"sft": 1, "rl": 2}
    for name, seed in seeds.items():
        add_random_adapter(model, name, seed)
    lanes = lanes_of((None, *seeds))
    together = [visitor("a", adapter=name) for name in (None, *seeds)]
    for sequence in together:
        lanes.join(sequence)
    run(lanes)
    lanes.close()
    assert len({tuple(sequence.tokens) for sequence in together}) == 3  # they do not say the same
    for name in seeds:
        lora.remove_adapter(model, name)
    for sequence in together:
        if sequence.adapter:  # loaded alone
            add_random_adapter(model, "only", seeds[sequence.adapter])
        lone_visitor = visitor("a", adapter="only" if sequence.adapter else None)
        lanes = lanes_of((lone_visitor.adapter,))
        lanes.join(lone_visitor)
        run(lanes)
        lanes.close()
        assert (sequence.tokens, sequence.logprobs) == (lone_visitor.tokens, lone_visitor.logprobs)
        if sequence.adapter:
            lora.remove_adapter(model, "only")


def test_each_row_has_its_own_sampler(lanes_of, visitor, model, layout):
    lanes = lanes_of()
    hot = Sampler(1.0)
    visitors = [visitor("a", hot), visitor("b"), visitor("c", Sampler(1.0, top_p=0.5))]
    for sequence in visitors:
        lanes.join(sequence)
    run(lanes)
    for sequence in visitors:
        expected = alone(model, layout, sequence, sequence.sampler)
        assert sequence.tokens == expected.tokens and sequence.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_a_limit_of_its_own_cuts_off(lanes_of, visitor):
    lanes = lanes_of()
    short, long = visitor("a", max_tokens=5), visitor("b")
    lanes.join(short)
    lanes.join(long)
    assert run(lanes) == [short, long]
    assert short.finish == CUT_OFF and sum(short.action_mask) == 5 and sum(long.action_mask) > 5


def test_who_leaves_frees_its_row_whether_it_waits_or_is_sampled(lanes_of, visitor, model, layout):
    lanes = lanes_of(rows=1)
    first, second, third = visitor("a"), visitor("b"), visitor("c")
    for sequence in (first, second, third):
        lanes.join(sequence)
    lanes.iterate()
    first.leaving = second.leaving = True
    assert lanes.iterate() == [first, second] and first.finish == second.finish == CUT_OFF
    assert run(lanes) == [third] and third.tokens == alone(model, layout, third).tokens


def test_who_leaves_while_its_documents_are_looked_for_goes_when_they_have_come(lanes_of, visitor):
    def slow(pairs):
        go_on.wait(10)
        return [[Document("1", "Rome", "Rome is in Italy.")] for _ in pairs]

    go_on = threading.Event()
    lanes = lanes_of(rows=2, retrieve=slow, kind=ScriptedEngine)
    lanes.engine.script = {"a": [QUERY, ANSWER.format(2)], "b": [ANSWER.format(1)]}
    lanes.engine.sampler = Sampler(1.0)
    lanes.engine.layout.lengths = LengthSettings(max_hops=2, max_new_tokens=120, max_length=900)
    asks, answers = visitor("a"), visitor("b")
    lanes.join(asks)
    lanes.join(answers)
    completions = []
    while not asks.pending:
        completions += lanes.iterate()
    asks.leaving = True
    go_on.set()
    completions += run(lanes)
    assert {s.question.id: s.finish for s in completions} == {"a": CUT_OFF, "b": ANSWERED}
    assert lanes.lanes[None][0].rows == []


def test_a_lane_that_waits_for_documents_does_not_hold_up_another(lanes_of, visitor, model):
    def slow(pairs):
        assert go_on.wait(20)
        return [[] for _ in pairs]

    go_on = threading.Event()
    add_random_adapter(model, "rl", 1)
    lanes = lanes_of((None, "rl"), retrieve=slow, kind=ScriptedEngine)
    lanes.engine.sampler, lanes.engine.layout.lengths = Sampler(1.0), LengthSettings(max_new_tokens=120, max_length=900)
    lanes.engine.script = {"a": [QUERY, ANSWER.format(2)], "b": [ANSWER.format(1)]}
    asks, answers = visitor("a"), visitor("b", adapter="rl")
    lanes.join(asks)
    while not lanes.fetchers[None].is_waiting:
        lanes.iterate()
    lanes.join(answers)
    completions = []
    while answers not in completions:  # without an end, if it waited for the documents
        completions += lanes.iterate()
    assert asks.pending and completions == [answers]
    go_on.set()
    assert run(lanes) == [asks]


def test_one_that_had_no_room_to_begin_ends_at_once(lanes_of, visitor):
    lanes = lanes_of()
    sequence = visitor("a")
    sequence.finish = CUT_OFF
    lanes.join(sequence)
    assert lanes.iterate() == [sequence] and lanes.lanes[None][0].rows == []


def break_at(model, layout, text):
    """Has the first layer give NaN for a token, so that whoever attends to it gets no numbers."""
    (token,), passes = layout.tokenizer.encode(text), []
    model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0] == token))
    first = model.model.layers[0]
    first.register_forward_hook(lambda *call: call[-1].masked_fill(passes[-1][..., None], float("nan")))


def test_a_row_without_numbers_ends_alone_and_leaves_none_in_its_row(lanes_of, visitor, model, layout):
    """It ended every answer that was being sampled; and a NaN in the cache counts in spite of a mask."""
    first, waiting = visitor("a" * 40), visitor("w", Sampler(1.0, top_k=5))  # which is the shortest
    bad = visitor("#" * 20, Sampler(1.0, top_p=0.9))
    sound = [first, waiting]
    expected = {s.question.id: alone(model, layout, s, s.sampler).tokens for s in sound}
    break_at(model, layout, "#")
    lanes = lanes_of(rows=2)
    for sequence in (first, bad, waiting):
        lanes.join(sequence)
    completions = run(lanes)
    assert completions[0] is bad and bad.finish == CUT_OFF and not bad.logprobs
    assert f"question {'#' * 20}: the model's logits are not finite: model.layers.0 was the first" in str(bad.error)
    assert {s.question.id: s.tokens for s in sound} == expected and not any(s.error for s in sound)
    scheduler, _ = lanes.lanes[None]
    assert all(layer.block.isfinite().all() for layer in scheduler.cache.layers)


def test_who_asks_again_what_had_no_numbers_is_told_again(lanes_of, visitor, model, layout):
    """The row of the first one is cleared, so that nothing of it may be copied, nor waited for."""
    break_at(model, layout, "#")
    lanes = lanes_of(rows=1)
    visitors = [visitor("#"), visitor("#")]
    for sequence in visitors:
        lanes.join(sequence)
    for _ in range(3):
        lanes.iterate()
    assert all(sequence.error for sequence in visitors) and not lanes.visitors
