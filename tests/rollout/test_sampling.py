import numpy as np
import torch

from r3lite.rollout.sampling import Sampler
from r3lite.settings.rollout import TRUNCATED_ROWS


def drawn(sampler, logits, uniforms):
    """What a sampler draws, as lists."""
    return tuple(drawn.tolist() for drawn in sampler(logits, uniforms))


def test_the_inverse_cdf_by_hand():
    # probabilities 0.1, 0.2, 0.7: u in [0, .1) -> 0, [.1, .3) -> 1, [.3, 1) -> 2
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log().repeat(5, 1)
    tokens, logprobs = drawn(Sampler(), logits, [0.0, 0.0999, 0.1001, 0.2999, 0.9999])
    assert tokens == [0, 0, 1, 1, 2]
    assert np.allclose(np.exp(logprobs), [0.1, 0.1, 0.2, 0.2, 0.7], atol=1e-6)


def test_frequencies_follow_the_distribution():
    rng = np.random.default_rng(0)
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0])
    tokens, _ = Sampler()(logits.repeat(20_000, 1), list(rng.random(20_000)))
    assert np.allclose(np.bincount(tokens, minlength=4) / 20_000, logits.softmax(0).numpy(), atol=0.015)


def test_temperature_scales_what_is_recorded():
    logits = torch.tensor([[1.0, 3.0, 0.0]])
    tokens, logprobs = drawn(Sampler(temperature=0.5), logits, [0.5])
    assert np.isclose(logprobs[0], (logits / 0.5).log_softmax(-1)[0, tokens[0]].item())


def test_greedy_takes_the_likeliest_and_records_it_at_temperature_one():
    logits = torch.tensor([[1.0, 3.0, 0.0]])
    tokens, logprobs = drawn(Sampler(temperature=0), logits, [0.999])
    assert tokens == [1] and np.isclose(logprobs[0], logits.log_softmax(-1)[0, 1].item())


def test_truncation_changes_the_choice_but_not_the_recorded_probability():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(3, 1)
    uniforms = [0.0, 0.7, 0.999]
    # top-k 2: 0.5 and 0.3, so u = 0.7 falls at 0.56 of 0.8
    tokens, logprobs = drawn(Sampler(top_k=2), logits, uniforms)
    assert tokens == [0, 1, 1] and np.isclose(np.exp(logprobs[1]), 0.3)
    # top-p 0.9 keeps 0.5, 0.3 and 0.15 (what is likelier than the third sums to 0.8); top-p 0.8 keeps two
    assert drawn(Sampler(top_p=0.9), logits, uniforms)[0] == [0, 1, 2]
    assert drawn(Sampler(top_p=0.8), logits, uniforms)[0] == [0, 1, 1]
    assert drawn(Sampler(top_p=0.01), logits, uniforms)[0] == [0, 0, 0]


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([[-float("inf"), 0.0, -float("inf")]]).repeat(2, 1)
    assert drawn(Sampler(), logits, [0.0, 1 - 2**-53])[0] == [1, 1]


def test_rows_do_not_depend_on_each_other():
    torch.manual_seed(0)
    logits, uniforms = torch.randn(6, 50_000), list(np.random.default_rng(1).random(6))
    together = drawn(Sampler(), logits, uniforms)
    alone = [drawn(Sampler(), logits[i : i + 1], uniforms[i : i + 1]) for i in range(6)]
    assert together[0] == [a[0][0] for a in alone]


def test_truncated_rows_do_not_depend_on_each_other():
    """More rows than are sorted at once, and not a multiple of them."""
    torch.manual_seed(0)
    count = 2 * TRUNCATED_ROWS + 3
    logits, uniforms = torch.randn(count, 1000), list(np.random.default_rng(1).random(count))
    for sampler in (Sampler(top_p=0.7), Sampler(top_k=5), Sampler(0.8, 50, 0.9)):
        together = drawn(sampler, logits, uniforms)
        alone = [drawn(sampler, logits[i : i + 1], uniforms[i : i + 1]) for i in range(count)]
        assert together == ([a[0][0] for a in alone], [a[1][0] for a in alone])


def test_at_the_edge_of_a_block_no_token_without_probability_is_drawn():
    """Where a block's sum and its running sum differ in rounding, and the tokens on both sides of its end have none."""
    logits = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)) * 8
    logits[:, 100:140] = -float("inf")
    blocks = logits.softmax(-1).double().unflatten(-1, (2, 128))
    running = blocks[:, 0].cumsum(-1)[:, -1]
    first, total = (blocks.sum(-1).cumsum(-1)[:, i] for i in (0, 1))
    assert (running < first).any() and (running > first).any()
    for step in range(-4, 5):
        uniforms = ((first / total) * (1 + step * 2**-53)).clamp(max=1 - 2**-53).tolist()
        tokens, logprobs = Sampler()(logits, uniforms)
        assert ((tokens < 100) | (tokens >= 140)).all() and logprobs.isfinite().all()


def test_what_is_not_a_number_shows_in_the_log_probability_of_its_row():
    """Also under truncation, which made a row of zeros of it, in which sampling read out of bounds."""
    samplers = (Sampler(), Sampler(0.5), Sampler(0.0), Sampler(top_k=20), Sampler(top_p=0.9), Sampler(1.0, 2, 0.9))
    sound = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    infinite = sound.clone()
    infinite[0, 7] = float("inf")
    for bad in (torch.full((1, 300), float("nan")), infinite, torch.full((1, 300), -float("inf"))):
        for sampler in samplers:
            tokens, logprobs = drawn(sampler, torch.cat((sound, bad, sound)), [0.5, 0.5, 0.5])
            assert 0 <= tokens[1] < 300 and np.isnan(logprobs[1])
            (token,), (logprob,) = drawn(sampler, sound, [0.5])
            assert tokens[0] == tokens[2] == token and logprobs[0] == logprobs[2] == logprob


def test_a_temperature_next_to_0_is_greedy():
    """Logits over 1e-38 are infinite in float32, and over 1e-300 over 0: sampling read out of bounds."""
    logits = torch.randn(2, 1024, generator=torch.Generator().manual_seed(0)) * 10
    greedy = drawn(Sampler(0.0), logits, [0.3, 0.7])
    for temperature in (9e-6, 1e-38, 1e-40, 5e-324):
        for truncation in ({}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.1}):
            assert drawn(Sampler(temperature, **truncation), logits, [0.3, 0.7]) == greedy
    # The lowest temperature that is sampled has finite numbers for logits of any size that a model has.
    logits = torch.tensor([[3e4, 3e4 + 1, -6e4]])
    assert drawn(Sampler(1e-5), logits, [0.0]) == ([1], [0.0])


def test_every_row_with_numbers_has_a_token_however_few_are_left():
    """A top-p that is 0 in float32 excluded the likeliest token, too."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for truncation in ({"top_p": 1e-300}, {"top_k": 1, "top_p": 1e-300}, {"top_k": 2**62}):
        (token,), (logprob,) = drawn(Sampler(1.0, **truncation), logits, [0.0])
        assert token == 0 and np.isclose(np.exp(logprob), 0.5)
