"""Episodes of a model with short convolutions: what holds of keys and values holds of their state."""

import dataclasses

import pytest
import torch

from r3lite.models.carried import Ring
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.rollout.decoder import Decoder, GraphDecoder
from tests.lfm2_models import switches
from tests.rollout import test_decoder, test_drafts, test_scheduler


@pytest.fixture
def model(tokenizer):
    """Takes the place of the toy model of the other tests here."""
    torch.manual_seed(0)
    config = ModelConfig(tokenizer.size + 13, 32, 64, 3, 4, 2, rope_theta=10_000.0)
    model = CausalLM(dataclasses.replace(config, **switches(3))).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.3)
    return model


counted = test_drafts.counted
decoders = test_drafts.decoders
head = test_drafts.head
test_drafts_change_no_token = test_drafts.test_tokens_are_those_of_sampling_one_by_one
test_drafts_with_retrievals_and_a_critic = test_drafts.test_episodes_with_retrievals_forced_answers_and_a_critic
test_a_group_reads_its_prompt_once = test_scheduler.test_rollouts_of_one_question_read_its_prompt_once
test_what_is_said_does_not_depend_on_rows = test_scheduler.test_what_is_said_does_not_depend_on_rows_or_passes


@torch.no_grad()
def test_graphs_leave_the_rows_that_pad_them_as_they_are(model):
    """Rows that wait for documents fill a bucket up. They go on in the last steps of the comparison."""
    graphs, plain = test_decoder.compared(model, test_decoder.Replayed())
    assert graphs.uses_graphs
    rings = [pair for pair in zip(graphs.cache.layers, plain.cache.layers, strict=True) if isinstance(pair[0], Ring)]
    assert len(rings) == 2
    for graph_layer, plain_layer in rings:
        assert torch.allclose(
            graph_layer.values[:, : graph_layer.size], plain_layer.values[:, : plain_layer.size], atol=1e-5
        )
        assert not graph_layer.values[:, graph_layer.empty].any()


@torch.no_grad()
def test_a_row_that_padded_a_graph_goes_on_as_if_it_had_not(model):
    plain = test_decoder.filled(model, lambda cache: Decoder(model, cache))
    capture = test_decoder.Replayed()
    graphs = test_decoder.filled(model, lambda cache: GraphDecoder(model, cache, test_decoder.SLOTS, capture))
    for _ in range(3):  # the fourth row pads
        assert torch.allclose(graphs([1, 2, 3]), plain([1, 2, 3]), atol=1e-5)
    assert torch.allclose(graphs([1, 2, 3, 4]), plain([1, 2, 3, 4]), atol=1e-5)


@torch.no_grad()
def test_questions_share_their_instructions_up_to_what_is_saved(model, engine_of):
    """Of a prompt whose row has gone on, what was saved at a multiple of 64 tokens is copied."""
    engine, passes = test_scheduler.watched(
        engine_of(test_scheduler.PROTOCOL, test_scheduler.LENGTHS, rollout_batch_size=2)
    )
    (question,) = test_scheduler.questions(1)
    sequences = engine.run([question] * 6, list("abcdef"), test_scheduler.nothing)
    prompt = sequences[0].action_mask.index(True)
    forced = len("\nThe final answer:")
    read = [B * T for B, T in passes if T > 1]
    assert prompt - 1 <= sum(read) <= (prompt - 1) + 5 * ((prompt - 1) % 64) + 6 * forced
    alone = [engine.run([question], [seed], test_scheduler.nothing)[0].tokens for seed in "abcdef"]
    assert [sequence.tokens for sequence in sequences] == alone
