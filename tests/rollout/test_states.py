"""Rollouts of a model whose layers carry states: drafts, groups that share prompts, rows that wait, and no graphs."""

import dataclasses

import pytest
import torch

from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.rl.batch import Batch, Rollout, action_logprobs
from r3lite.rollout import engine as engine_module
from r3lite.rollout.decoder import Decoder, GraphDecoder
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from tests.models.test_delta_rows import LIKE_QWEN35
from tests.rollout.conftest import maker, scripting
from tests.rollout.test_drafts import LENGTHS, PROTOCOL, SCRIPT, assert_same, documents, nothing, questions, with_drafts


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(tokenizer.size + 13, 32, 64, 3, 4, 2, **LIKE_QWEN35)).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.2)
    return model


def test_tokens_are_those_of_sampling_one_by_one(model, tokenizer, monkeypatch):
    lengths = dataclasses.replace(LENGTHS, max_new_tokens=60)
    plain = maker(Engine, model, tokenizer)(PROTOCOL, lengths, Sampler(0.0))
    group = [questions(1)[0]] * 2
    expected = plain.run(group, ["a", "b"], nothing)
    verified = []
    run_drafts = Decoder.run_drafts
    monkeypatch.setattr(Decoder, "run_drafts", lambda *args: verified.append(args) or run_drafts(*args))
    assert_same(with_drafts(plain).run(group, ["a", "b"], nothing), expected)
    assert verified


def test_episodes_with_retrievals_have_the_logprobs_of_one_uncached_pass(model, tokenizer):
    """Rows are parked with tokens in their windows, and go on with documents."""
    plain = scripting(model, tokenizer)(SCRIPT, protocol=PROTOCOL, lengths=LENGTHS, rollout_batch_size=2)
    expected = plain.run(questions(3), ["a", "b", "c"], documents)
    drafted = with_drafts(plain).run(questions(3), ["a", "b", "c"], documents)
    assert_same(drafted, expected)
    logprobs = action_logprobs(model, Batch.of([Rollout(s, [], 0) for s in drafted]), tokenizer.size, 1.0)
    sampled = torch.tensor([logprob for sequence in drafted for logprob in sequence.logprobs])
    assert (logprobs - sampled).abs().max() < 1e-3


def test_a_group_reads_its_prompt_once_and_no_question_waits_for_another(model, tokenizer, monkeypatch):
    """Episodes share a row until they differ; then it is copied as a whole. Beginnings alone cannot be copied."""
    passes = []

    def noted(cache: KVCache, additions) -> Prefill:
        passes.append([len(tokens) for _, tokens in additions])
        return Prefill(cache, additions)

    monkeypatch.setattr(engine_module, "Prefill", noted)
    first, second = questions(2)
    lengths = dataclasses.replace(LENGTHS, max_new_tokens=12)
    group = [first, second, first, second, first]
    seeds = ["a", "b", "c", "d", "e"]
    make = maker(Engine, model, tokenizer)
    together = make(PROTOCOL, lengths, Sampler(0.2), rollout_batch_size=5).run(group, seeds, nothing)
    assert passes[0] == [together[i].action_mask.index(True) - 1 for i in (0, 1)]
    assert passes[1:] and all(max(counts) <= len("\nThe final answer:") for counts in passes[1:])
    alone = make(PROTOCOL, lengths, Sampler(0.2), rollout_batch_size=1).run(group, seeds, nothing)
    assert_same(together, alone)


def test_a_graph_is_not_captured(model):
    """It would run a step on rows that wait, whose states would change."""
    decoder = GraphDecoder(model, KVCache.of(model, 3), 100, capture=lambda step: pytest.fail("captured"))
    cache = decoder.cache
    assert cache.capacity == 0  # only graphs need all slots from the start, and the plan counts them with graphs alone
    prefill = Prefill(cache, [(row, [5, 6, 7]) for row in range(3)])
    with torch.no_grad():
        model(prefill.tokens, prefill)
        waiting_states = cache.layers[0].states[1:].clone()
        hidden = decoder([8])
        expected = model(torch.tensor([[5, 6, 7, 8]]))[:, -1]
    assert (hidden - expected).abs().max() < 1e-4
    assert torch.equal(cache.layers[0].states[1:], waiting_states)
