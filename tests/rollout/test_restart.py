"""Another end for an episode: what was sampled stays as it was, and what follows goes on from there."""

import copy
import dataclasses

import pytest
import torch

from r3lite.core.episode import ANSWERED, CUT_OFF, SEARCHING, Document, Question
from r3lite.protocols.r3 import R3
from r3lite.rl.batch import Batch, Rollout, action_logprobs, action_states
from r3lite.rollout.prefixes import common_length
from r3lite.rollout.sequence import Sequence
from r3lite.settings import LengthSettings

PROTOCOL = R3("Q: {question}", "The retrieval documents:\n{documents}\nNow Step {step}.")
LENGTHS = LengthSettings(max_hops=3, max_new_tokens=120, max_length=1200, max_document_tokens=30)
DOCUMENTS = [Document("1", "Rome", "Rome is in Italy."), Document("2", "Oslo", "Oslo is in Norway. " * 10)]
ASKED = [Question(str(i), f"question {'x' * i}?", ("a",)) for i in range(2)]


def ask(number, query):
    return f"Step {number}:\nThe problem analysis: what is missing\nThe retrieval query: {query}"


def answer(number, text):
    return f"Step {number}:\nThe problem analysis: all is known\nThe final answer: {text}"


SCRIPT = {"0": [ask(1, "first"), ask(2, "second, longer"), answer(3, "London")], "1": [ask(1, "one"), answer(2, "b")]}
OTHER = {"0": [ask(1, "-"), answer(2, "Paris")], "1": [ask(1, "-"), ask(2, "another"), answer(3, "c")]}


def retrieve(pairs):
    return [DOCUMENTS for _ in pairs]


@pytest.fixture
def head():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(32, 1), torch.nn.Flatten(-2))


@pytest.fixture
def engine(scripted, head):
    return scripted(SCRIPT, protocol=PROTOCOL, lengths=LENGTHS, value_head=head)


@pytest.fixture
def firsts(engine):
    return engine.run(ASKED, ["a", "b"], retrieve)


def taken(sequence) -> dict:
    """All of a sequence that is the same however it came about; numbers as they are."""
    names = ("tokens", "action_mask", "steps", "step_ends", "finish", "turn_start", "pending")
    return {name: getattr(sequence, name) for name in names}


@pytest.mark.parametrize("steps", [1, 2])
def test_the_same_end_again_is_the_same_episode(engine, firsts, steps):
    (rerun,) = engine.continue_from([(firsts[0], steps)], ["z"], retrieve)
    assert taken(rerun) == taken(firsts[0]) and rerun is not firsts[0]
    assert rerun.logprobs == pytest.approx(firsts[0].logprobs, abs=1e-4) and len(rerun.values) == len(rerun.logprobs)


def test_another_end_keeps_what_was_sampled_and_nothing_else(engine, firsts):
    copies = copy.deepcopy([taken(s) for s in firsts])
    engine.script = OTHER
    ends = engine.continue_from([(s, 1) for s in firsts], ["y", "z"], retrieve)
    assert [s.episode().prediction for s in ends] == ["Paris", "c"] and [len(s.steps) for s in ends] == [2, 3]
    assert all(s.finish == ANSWERED for s in ends)
    for first, end in zip(firsts, ends, strict=True):
        start = first.action_mask.index(True, first.step_ends[0] + 1)
        actions = sum(first.action_mask[:start])
        assert end.tokens[:start] == first.tokens[:start] and end.action_mask[:start] == first.action_mask[:start]
        # To the bit: numbers that were recorded are not computed again.
        assert end.logprobs[:actions] == first.logprobs[:actions] and end.values[:actions] == first.values[:actions]
        assert end.tokens[start:] != first.tokens[start:] and end.steps[0] == first.steps[0]
        assert sum(end.action_mask) == len(end.logprobs) == len(end.values)
    assert [taken(s) for s in firsts] == copies  # those that were there are left alone


def test_log_probs_and_values_equal_the_trainers_on_both_sides_of_the_restart(engine, firsts, model, tokenizer, head):
    """One uncached pass over the whole of it; in one row of the cache after the other, so that prefixes are copied."""
    engine.script, engine.grant.memory = OTHER, dataclasses.replace(engine.grant.memory, rollout_batch_size=1)
    ends = engine.continue_from([(firsts[0], 1), (firsts[0], 1), (firsts[1], 1)], ["x", "y", "z"], retrieve)
    batch = Batch.of([Rollout(s, [], 0) for s in ends])
    logprobs = action_logprobs(model, batch, tokenizer.size, 1.0)
    assert (logprobs - batch.logprobs[batch.action_mask]).abs().max() <= 1e-4 and logprobs.abs().max() > 1
    values = head(action_states(model, batch)[0])
    assert torch.allclose(values, batch.values[batch.action_mask], atol=1e-4) and values.abs().max() > 0.01


def test_searches_before_the_restart_count(scripted):
    """With two searches at most, one more is left after the first."""
    lengths = dataclasses.replace(LENGTHS, max_hops=2)
    engine = scripted({"0": [*SCRIPT["0"][:2], answer(3, "x")]}, protocol=PROTOCOL, lengths=lengths)
    first = engine.run(ASKED[:1], ["a"], retrieve)[0]
    engine.script = {"0": [ask(1, "-"), ask(2, "second"), ask(3, "one too many"), " 42"]}
    for steps in (1, 2):
        (end,) = engine.continue_from([(first, steps)], ["b"], retrieve)
        assert (end.finish, end.episode().prediction, end.episode().search_count) == (ANSWERED, "42", 2)
        assert end.steps[2].faults == ("answer_was_forced",)


def test_tokens_before_the_restart_count(scripted):
    """The whole episode keeps to --max-length, and documents give way as they would have without a restart."""
    script = {"0": [ask(k, f"query {k}") for k in range(1, 9)]}
    lengths = LengthSettings(max_hops=8, max_new_tokens=100, max_length=640, max_document_tokens=60)
    engine = scripted(script, forced=" yes", protocol=PROTOCOL, lengths=lengths)
    (first,) = engine.run(ASKED[:1], ["s"], retrieve)
    (end,) = engine.continue_from([(first, 1)], ["t"], retrieve)
    assert taken(end) == taken(first) and len(end.tokens) <= 640 and end.steps[-1].faults == ("no_room",)


def test_the_rest_is_drawn_from_its_own_seed(engine_of):
    """Sampled ends differ by their seeds alone, whatever they are sampled with."""
    engine = engine_of(PROTOCOL, dataclasses.replace(LENGTHS, max_new_tokens=20))
    (first,) = engine.run(ASKED[:1], ["a"], retrieve)
    prefix = Sequence(first.question, stream=first.stream)
    prefix.observe(engine.layout.prompt(first.question.text))
    prefix.write([*engine.layout.tokenizer.encode(ask(1, "q")), engine.layout.tokenizer.stop_id])
    prefix.logprobs, prefix.values = [-1.0] * sum(prefix.action_mask), [0.0] * sum(prefix.action_mask)
    engine.layout.close_turn(prefix)
    engine.layout.splice(prefix, [DOCUMENTS])
    prefix.write([5])  # the turn that is sampled anew
    together = engine.continue_from([(prefix, 1)] * 3, ["x", "y", "x"], retrieve)
    (alone,) = engine.continue_from([(prefix, 1)], ["y"], retrieve)
    assert together[0].tokens == together[2].tokens != together[1].tokens == alone.tokens


def test_a_prefix_is_read_once_for_all_that_share_it(engine, firsts):
    passes = []
    engine.model.register_forward_pre_hook(lambda module, inputs: passes.append(tuple(inputs[0].shape)))
    engine.continue_from([(firsts[0], 2)] * 6, list("abcdef"), retrieve)
    start = firsts[0].action_mask.index(True, firsts[0].step_ends[1] + 1)
    assert [(B, T) for B, T in passes if T > 1] == [(1, start - 1)]
    assert max(B for B, T in passes) == 1  # the script has all say the same


def test_a_longer_prefix_does_not_wait_while_a_shorter_one_is_decoded(firsts):
    """What another row has sampled last is in no cache yet: waiting for it would mean to wait for its whole episode."""
    longer, shorter = firsts[0], firsts[0].cut_after(1, firsts[0].stream)
    for token in longer.tokens[len(shorter.tokens) : len(shorter.tokens) + 3]:  # it says the same, token by token
        assert common_length(longer, shorter) == len(shorter.tokens) - 1
        shorter.write([token])
    shorter.write([longer.tokens[len(shorter.tokens)] + 1])
    shorter.write([0])
    assert common_length(longer, shorter) == len(shorter.tokens) - 2


def test_the_last_turn_again_has_the_only_action_tokens(engine, firsts):
    """Of --learn answer: what stands before it is given, with its log-probabilities, values and steps' rewards gone."""
    first = firsts[0]
    start = first.turn_start
    engine.script = {"0": [*SCRIPT["0"][:2], answer(3, "Paris")]}
    (end,) = engine.end_again([first], ["y"], retrieve)
    assert end.tokens[:start] == first.tokens[:start]
    assert end.action_mask == [False] * start + [True] * (len(end.tokens) - start)
    assert len(end.logprobs) == len(end.values) == len(end.tokens) - start
    assert end.steps[:2] == first.steps[:2]
    assert end.step_ends[:2] == first.step_ends[:2]
    assert (end.finish, end.episode().prediction, end.episode().search_count) == (ANSWERED, "Paris", 2)
    assert first.episode().prediction == "London"  # the one that was there is left alone


def test_the_same_last_turn_again_has_the_numbers_of_the_first(engine, firsts, model, tokenizer):
    """Those of the cache whose prefix was copied equal those of the first, and of one uncached pass of the trainer."""
    ends = engine.end_again([firsts[0]] * 3, ["x", "y", "z"], retrieve)
    turn_length = len(firsts[0].tokens) - firsts[0].turn_start
    for end in ends:
        assert end.tokens == firsts[0].tokens
        assert end.logprobs == pytest.approx(firsts[0].logprobs[-turn_length:], abs=1e-4)
        assert end.values == pytest.approx(firsts[0].values[-turn_length:], abs=1e-4)
    batch = Batch.of([Rollout(s, [], 0) for s in ends])
    logprobs = action_logprobs(model, batch, tokenizer.size, 1.0)
    assert logprobs.tolist() == pytest.approx([x for end in ends for x in end.logprobs], abs=1e-4)


def test_a_last_turn_that_searches_again_ends_there(engine, firsts):
    """New documents would make another context; nothing is asked of the retriever."""
    engine.script = {"0": [*SCRIPT["0"][:2], ask(3, "one more")]}
    (end,) = engine.end_again([firsts[0]], ["y"], None)
    assert (end.finish, end.pending, end.episode().prediction) == (SEARCHING, (), "")
    assert end.steps[2].queries == ("one more",)


def test_a_last_turn_at_the_hop_limit_gets_no_forced_answer(scripted):
    """The plan counts one turn for an end, and a search there counts as a search: it has no reward."""
    lengths = dataclasses.replace(LENGTHS, max_hops=1)
    engine = scripted({"0": [ask(1, "first"), answer(2, "London")]}, protocol=PROTOCOL, lengths=lengths)
    (first,) = engine.run(ASKED[:1], ["a"], retrieve)
    engine.script = {"0": [SCRIPT["0"][0], ask(2, "one too many")]}
    (end,) = engine.end_again([first], ["y"], None)
    assert (end.finish, end.pending, end.episode().prediction) == (SEARCHING, (), "")
    assert end.steps[1].queries == ("one too many",)
    assert all(end.action_mask[first.turn_start :])


def test_a_last_turn_that_is_cut_off_gets_no_forced_answer(scripted):
    engine = scripted({"0": [ask(1, "first"), answer(2, "London")]}, protocol=PROTOCOL, lengths=LENGTHS)
    (first,) = engine.run(ASKED[:1], ["a"], retrieve)
    engine.script = {"0": [SCRIPT["0"][0], "Step 2:\nThe problem analysis: " + "and so on " * 100]}
    (end,) = engine.end_again([first], ["y"], None)
    assert (end.finish, end.episode().prediction) == (CUT_OFF, "")
    assert end.steps[1].faults == ("cut_off",)
    assert sum(end.action_mask) == len(end.tokens) - first.turn_start == LENGTHS.max_new_tokens


def test_a_forced_answer_is_forced_again(scripted):
    """The last turn begins after the request for the answer, and its step keeps the analysis before the request."""
    lengths = dataclasses.replace(LENGTHS, max_hops=1)
    engine = scripted(
        {"0": [ask(1, "first"), ask(2, "one too many"), "unused"]}, " 42", protocol=PROTOCOL, lengths=lengths
    )
    (first,) = engine.run(ASKED[:1], ["a"], retrieve)
    assert first.steps[-1].faults == ("answer_was_forced",)
    engine.forced = " 43"
    (end,) = engine.end_again([first], ["b"], retrieve)
    assert (end.finish, end.episode().prediction) == (ANSWERED, "43")
    assert end.steps[-1] == dataclasses.replace(first.steps[-1], answer="43")
    assert engine.layout.tokenizer.decode(end.tokens[first.turn_start :]).startswith(" 43")


def test_the_context_of_several_ends_is_read_once(engine, firsts):
    passes = []
    engine.model.register_forward_pre_hook(lambda module, inputs: passes.append(tuple(inputs[0].shape)))
    engine.end_again([firsts[0]] * 4 + [firsts[1]] * 4, list("abcdefgh"), retrieve)
    prefill_lengths = [T for B, T in passes if T > 1]
    shared = common_prefix_length(firsts[0].tokens, firsts[1].tokens)
    assert sum(prefill_lengths) == firsts[0].turn_start - 1 + firsts[1].turn_start - 1 - shared


def common_prefix_length(first, second):
    return next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)
