"""Rows of the cache: prompts read once, rows freed and taken again, and the same tokens whatever the rows."""

import dataclasses
import math
import time

import pytest
import torch

from r3lite.core.episode import Document, Question
from r3lite.models.carried import KeysValues
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.protocols.r3 import R3
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.scheduler import Scheduler
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms
from r3lite.settings import LengthSettings

PROTOCOL = R3("Instructions that all questions share. Q: {question}", "D: {documents}")
LENGTHS = LengthSettings(max_hops=2, max_new_tokens=40, max_length=600, max_document_tokens=30)
DOCUMENTS = [Document("1", "Rome", "Rome is in Italy.")]


def watched(engine):
    """An engine, and the shape of every pass through its model."""
    passes = []
    engine.model.register_forward_pre_hook(lambda module, inputs: passes.append(tuple(inputs[0].shape)))
    return engine, passes


def ask(number, query):
    return f"Step {number}:\nThe problem analysis: x\nThe retrieval query: {query}"


def answer(number):
    return f"Step {number}:\nThe problem analysis: x\nThe final answer: y"


def questions(n):
    return [Question(str(i), "long question " * (i + 1), ("a",)) for i in range(n)]


def nothing(pairs):
    return [[] for _ in pairs]


def tokens_and_logprobs(engine, batch, seeds):
    return [(s.tokens, s.logprobs) for s in engine.run(batch, seeds, nothing)]


def test_rollouts_of_one_question_read_its_prompt_once(engine_of):
    engine, passes = watched(engine_of(PROTOCOL, LENGTHS))
    (question,) = questions(1)
    sequences = engine.run([question] * 8, list("abcdefgh"), nothing)
    prompt = sequences[0].action_mask.index(True)
    assert len({tuple(s.tokens[:prompt]) for s in sequences}) == 1
    read = [(B, T) for B, T in passes if T > 1]
    assert read[0] == (1, prompt - 1) and sum(B * T for B, T in read[1:]) <= 8 * len("\nThe final answer:")
    assert max(B for B, T in passes) == 8


def test_rollouts_of_several_questions_read_each_prompt_once(engine_of):
    """Once a row had the instructions of another question copied, it counted as read, and its siblings did not wait."""
    engine, passes = watched(engine_of(PROTOCOL, LENGTHS))
    batch = questions(3)
    sequences = engine.run([q for q in batch for _ in range(4)], list("abcdefghijkl"), nothing)
    read = sum(B * T for B, T in passes if T > 1)
    prompts = [sequences[4 * i].action_mask.index(True) - 1 for i in range(3)]
    assert max(prompts) <= read <= sum(prompts) + 12 * len("\nThe final answer:")


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_questions_share_their_instructions(engine_of, tokenizer, rows):
    """With a single row too, in which the next question follows the one that is over."""
    lengths = dataclasses.replace(LENGTHS, max_new_tokens=4)
    engine, passes = watched(engine_of(PROTOCOL, lengths, rollout_batch_size=rows))
    batch = questions(3)
    sequences = engine.run(batch, list("abc"), nothing)
    read = sum(B * T for B, T in passes if T > 1)
    prompts = [s.action_mask.index(True) for s in sequences]
    assert max(prompts) <= read < sum(prompts) - 2 * len(tokenizer.encode("Instructions that all questions share."))


def test_what_is_said_does_not_depend_on_rows_or_passes(engine_of):
    """Fewer rows than episodes, so that rows are freed and taken again; and prompts read in pieces."""
    batch = [q for q in questions(3) for _ in range(3)]
    seeds = list("abcdefghi")
    together = tokens_and_logprobs(engine_of(PROTOCOL, LENGTHS, rollout_batch_size=9), batch, seeds)
    for rows, tokens in ((2, 4096), (9, 17), (1, 4096)):
        engine = engine_of(PROTOCOL, LENGTHS, rollout_batch_size=rows, micro_batch_tokens=tokens)
        chunked = tokens_and_logprobs(engine, batch, seeds)
        assert [tokens for tokens, _ in chunked] == [tokens for tokens, _ in together]
        for (_, ours), (_, theirs) in zip(chunked, together):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.fixture
def talkative(scripted):
    """Four episodes whose turns end at different times, in two rows."""
    script = {
        str(i): [ask(1, "q" * (5 * i + 1)), ask(2, "again" + "!" * (9 - 2 * i)), answer(3)] if i % 2 else [answer(1)]
        for i in range(4)
    }

    def run(retrieve, rows=4):
        lengths = dataclasses.replace(LENGTHS, max_new_tokens=120)
        engine = scripted(script, protocol=PROTOCOL, lengths=lengths, rollout_batch_size=rows)
        passes = []
        handle = engine.model.register_forward_pre_hook(lambda m, inputs: passes.append(tuple(inputs[0].shape)))
        sequences = engine.run(questions(4), list("abcd"), retrieve)
        handle.remove()
        return [(s.tokens, s.logprobs) for s in sequences], passes

    return run


def test_a_slow_retriever_changes_no_batch(talkative):
    """Documents are taken at a step that is counted, not when they happen to be there: every bit is the same."""

    def slow(pairs):
        time.sleep(0.05)
        return [DOCUMENTS for _ in pairs]

    assert talkative(lambda pairs: [DOCUMENTS for _ in pairs]) == talkative(slow)


def test_the_others_go_on_while_documents_are_fetched(talkative):
    _, passes = talkative(lambda pairs: [DOCUMENTS for _ in pairs])
    decoded = [B for B, T in passes if T == 1]
    assert max(decoded) == 4 and 1 in decoded  # rows that wait cost nothing
    assert 2 in decoded[decoded.index(1) :]  # it was not alone because the others were over
    in_two_rows, _ = talkative(lambda pairs: [DOCUMENTS for _ in pairs], rows=2)
    in_four_rows, _ = talkative(lambda pairs: [DOCUMENTS for _ in pairs], rows=4)
    assert [tokens for tokens, _ in in_two_rows] == [tokens for tokens, _ in in_four_rows]


def test_a_retriever_that_fails_stops_the_rollout(talkative):
    def fails(pairs):
        raise ValueError("no index")

    with pytest.raises(ValueError, match="no index"):
        talkative(fails)


def test_copied_and_exchanged_rows():
    cpu = torch.device("cpu")
    layers = [KeysValues(3, 2, 4, torch.float32, cpu) for _ in range(2)]
    cache = KVCache(layers, 3, torch.float32, cpu)
    torch.manual_seed(0)
    prefill = Prefill(cache, [(row, [0] * count) for row, count in enumerate((5, 9, 2))])
    for layer in range(2):
        prefill.attend(layer, torch.randn(1, 2, 16, 4), torch.randn(1, 4, 16, 4))
    blocks_before = [layer.block.clone() for layer in layers]
    cache.swap(0, 1)
    assert cache.lengths == [9, 5, 2]
    cache.copy(0, 2, 7)
    assert cache.lengths == [9, 5, 7]
    for layer, old in zip(layers, blocks_before):
        assert torch.equal(layer.block[0, :, :9], old[1, :, :9]) and torch.equal(layer.block[1, :, :5], old[0, :, :5])
        assert torch.equal(layer.block[2, :, :7], old[1, :, :7])


def test_a_discarded_sequence_clears_its_row_when_no_other_shares_it():
    """With a shared row, a free row was cleared in its place: of a full cache, one that does not exist."""
    cpu = torch.device("cpu")
    cache = KVCache([KeysValues(1, 2, 4, torch.float32, cpu)], 1, torch.float32, cpu)
    (question,) = questions(1)
    first, second = (Sequence(question, tokens=[1, 2, 3], stream=Uniforms(0)) for _ in range(2))
    scheduler = Scheduler([], cache, rows=[[first, second]], running_count=1)
    prefill = Prefill(cache, [(0, [1, 2])])
    prefill.attend(0, torch.full((1, 2, 2, 4), math.nan), torch.full((1, 4, 2, 4), math.nan))
    scheduler.discard(first)
    assert scheduler.rows == [[second]] and cache.lengths == [2] and cache.layers[0].block[0, :, :2].isnan().all()
    scheduler.discard(second)
    assert scheduler.rows == [] and cache.lengths == [0] and not cache.layers[0].block.isnan().any()


def test_the_block_wise_inverse_cdf_equals_the_plain_one():
    """The running sum of a whole row is never written down, and no token is drawn that has no probability."""
    torch.manual_seed(0)
    logits = torch.randn(50, 2000) * 3
    logits[:, 1500:] = -float("inf")
    uniforms = torch.rand(50, dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, 1 - 2**-53
    tokens, logprobs = (drawn.tolist() for drawn in Sampler()(logits, uniforms.tolist()))
    cumulative = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    assert tokens[2:] == expected[2:].tolist() and max(tokens) < 1500
    assert logprobs == pytest.approx(logits.log_softmax(-1)[range(50), tokens].tolist(), abs=1e-5)
