"""Predicted times: operations and bytes against other formulas and numbers worked by hand, and what they grow with."""

from dataclasses import replace

import pytest

from bench.limits import training_flops
from r3lite.core.grant import Memory
from r3lite.devices.cards import MEASURED, Speeds, card
from r3lite.memory import duration
from r3lite.memory.duration import CARD, Cost, Efficiency, in_words, predict
from r3lite.memory.known_models import QWEN25, QWEN_TOKENS
from r3lite.memory.planner import adapter_bytes
from r3lite.memory.work import Workload
from r3lite.settings import LoraSettings

SMALL = QWEN25["Qwen/Qwen2.5-0.5B"]
BASE = 357_826_560  # weights of the 24 layers: 24 x 896 x (2 x 896 + 2 x 128 + 3 x 4864)
FREE = {"launch": 0.0, "source": MEASURED}


def total(costs: list[Cost]) -> Cost:
    return sum(costs, Cost())


SFT = Workload(SMALL, QWEN_TOKENS, 2, 1024, targets=LoraSettings().lora_targets, dtype="fp16")
ROUND = replace(SFT, episodes=8, row_tokens=768, writes=512, shared=256, rows=8, step_rows=8, scored_rows=8)


def test_seconds_of_a_cost_worked_by_hand():
    speeds = Speeds("x", 10.0, {"fp16": 100.0}, 0.5, MEASURED)
    cost = Cost(weights=20, products=300, attention=50, activations=5, kernels=4)
    # 20 / 10 + 300 / 100, then 5 / (10 x 0.5) + 50 / (100 x 0.25) and 4 x 3 x 0.5
    assert cost.seconds(speeds, "fp16", Efficiency(0.5, 0.25, 3.0, overlaps=False)) == 2 + 3 + 1 + 2 + 6
    assert cost.seconds(speeds, "fp16", Efficiency(0.5, 0.25, 3.0, overlaps=True)) == 3 + 1 + 2 + 6
    assert cost + cost == cost * 2 == Cost(40, 600, 100, 10, 8)


def test_operations_of_a_training_step_are_those_of_the_other_formula():
    """bench.limits counts what is of use: attention's scores are made once there, twice in a fused backward pass."""
    found = total(duration.update(SFT, Memory()))
    adapters = adapter_bytes(SFT) // 4
    useful = training_flops(BASE, QWEN_TOKENS * 896, adapters, layers=24, width=896, tokens=1024)
    assert found.products + found.attention * 6 / 7 == pytest.approx(useful, rel=1e-9)
    # A third more products of the layers if all run again, attention once more beside 1 + 2.5 times; the head's stay.
    again = total(duration.update(SFT, Memory(recompute_layers=24)))
    assert again.products - found.products == 2 * 1024 * (BASE + adapters)
    assert again.attention / found.attention == pytest.approx(4.5 / 3.5)


def test_decoding_is_bound_by_the_weights_as_computed_elsewhere():
    """At 192 GB/s and 512 tokens 0.5B in fp16 decodes 193 tokens/s at batch 1 and 1,479 at batch 8, at most.

    Those are of weights, embedding and KV cache alone; here adapters, activations and logits come on top.
    """
    speeds = Speeds("x", 192e9, {"fp16": 1e18}, **FREE)
    for rows, most in ((1, 193), (8, 1479)):
        costs = duration.decode(ROUND, Memory(), rows, 512)
        assert rows / (total(costs).weights / speeds.bandwidth) == pytest.approx(most, rel=0.05)
        assert 0.9 * most < rows / sum(cost.seconds(speeds, "fp16", CARD) for cost in costs) < most


def test_weights_are_read_at_the_speed_of_their_dtype_where_it_was_measured():
    cost, speeds = duration.Cost(weights=6e9), Speeds("x", 3e9, {"fp32": 1.0, "bf16": 1.0}, reads={"bf16": 2e9}, **FREE)
    assert cost.seconds(speeds, "bf16", CARD) == 3 and cost.seconds(speeds, "fp32", CARD) == 2


def test_a_round_is_made_of_steps_of_decoding_passes_and_optimizer_steps():
    memory = Memory(rollout_batch_size=8, micro_batch_tokens=8192)
    reading, *steps = duration.sample(ROUND, memory)
    assert steps == [cost * 512 for cost in duration.decode(ROUND, memory, 8, 256 + 512 / 2)]
    assert reading == duration.forward(ROUND, memory, 256, 256 / 2)  # the prompt, once
    # In four rows at a time twice as many steps are taken, each as cheap as the weights' reading allows.
    halves = duration.sample(ROUND, replace(memory, rollout_batch_size=4))
    assert total(halves).weights / total([reading, *steps]).weights == pytest.approx(2, rel=0.05)
    # 256 + 8 x 512 tokens in one pass, the prompt not again in each; 8 x 512 logits.
    tokens = 256 + 8 * 512
    expected = 2 * tokens * (BASE + adapter_bytes(ROUND) / 4) + 2 * 8 * 512 * QWEN_TOKENS * 896
    assert total(duration.score(ROUND, memory)).products == pytest.approx(expected)
    assert duration.packs(ROUND, memory, 8, 8).tokens == tokens
    assert duration.packs(ROUND, replace(memory, micro_batch_tokens=256 + 2 * 512), 8, 8).count == 4
    for twice in (replace(ROUND, epochs=2), replace(ROUND, episodes=16)):
        assert duration.update(twice, memory) == [cost * 2 for cost in duration.update(ROUND, memory)]


def test_nf4_is_counted_by_its_codes_and_takes_longer():
    dense, nf4 = (duration.forward(ROUND, Memory(nf4=quantized), 1, 512) for quantized in (False, True))
    assert nf4.activations - dense.activations == 6 * BASE
    on_card = duration.forward(replace(ROUND, on_cuda=True), Memory(nf4=True), 1, 512)
    assert on_card.activations - dense.activations == pytest.approx(12.6 * BASE)  # 4.6, and 2 bytes four times
    assert dense.weights - nf4.weights == 2 * BASE and nf4.products == dense.products
    assert nf4.kernels - dense.kernels == 24 * duration.LAYER_NF4


def test_a_prediction_has_the_phases_of_the_run_or_is_none():
    memory = Memory(rollout_batch_size=8)
    assert predict(ROUND, memory) is None
    speeds = Speeds("x", 192e9, {"fp32": 1e12}, **FREE)
    assert predict(replace(ROUND, speeds=speeds), memory) is None, "it was not measured in fp16"
    speeds = replace(speeds, flops={"fp16": 1e12})
    found = predict(replace(ROUND, speeds=speeds, scores=True, steps=5), memory)
    assert list(found.phases) == ["sample", "score", "update"] and found.run == 5 * found.seconds
    assert found.line().endswith(" for 5; predicted from this device's speed, measured")
    assert found.line().startswith("up to ") and "for a round (sample " in found.line()
    step = predict(replace(SFT, speeds=speeds, mean_tokens=100.0, writes=40.0), memory)
    assert list(step.phases) == ["update"] and step.run is None
    assert step.line().startswith("about ") and " for a step; " in step.line()
    short = predict(replace(SFT, speeds=speeds), memory)
    assert short.seconds > 9 * step.seconds and short.line().startswith("up to ")
    asked = predict(replace(ROUND, trains=False, speeds=card("GTX 1650")), memory)
    assert " for sampling 8 episodes; predicted from the peak speed of the GTX 1650, so" in asked.line()


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0123, "12 ms"), (0.99, "990 ms"), (1.9, "1.9 s"), (2.04, "2.0 s"), (119, "119 s"), (121, "2.0 min"),
     (5000, "83 min"), (7300, "2.0 h"), (172_799, "48 h"), (200_000, "2.3 days"), (1e10, "115,741 days")],
)  # fmt: skip
def test_times_in_words(seconds, told):
    assert in_words(seconds) == told


def test_expanded_episodes_are_sampled_without_their_beginnings_and_learned_from_whole():
    """Four of 8 episodes get another end of 256 tokens after a turn of 256, whose tokens are read."""
    memory = Memory(rollout_batch_size=8, micro_batch_tokens=8192)
    more = replace(ROUND, expanded=4, expanded_writes=256)
    reading, *steps = duration.expand(more, memory)
    assert steps == [cost * 256 for cost in duration.decode(more, memory, 4, (256 + 768) / 2)]
    assert reading.products == duration.forward(more, memory, 256 + 4 * 256, 0).products  # the prompt once
    for phase in (duration.score, duration.update):
        assert total(phase(more, memory)).products == pytest.approx(
            total(phase(replace(ROUND, episodes=12, rows=12, step_rows=12, scored_rows=12), memory)).products, rel=0.2
        )
        assert total(phase(more, memory)).products > 1.3 * total(phase(ROUND, memory)).products


def test_the_ratios_of_whole_episodes_take_the_head_once_more():
    """8 episodes of 512 tokens: a product of the head's 151,665 x 896 weights with each of them."""
    one, twice = (total(duration.update(replace(ROUND, ratios_first=first), Memory())) for first in (False, True))
    assert twice.products - one.products == 2 * 8 * 512 * QWEN_TOKENS * 896 and twice.activations > one.activations


def test_validations_are_counted_and_refills_are_named():
    known = replace(ROUND, steps=25, speeds=Speeds("x", 192e9, {"fp16": 1e13}, **FREE))
    plain = predict(known, Memory(rollout_batch_size=8))
    assert plain.validation == 0 and "validation" not in plain.line() + str(plain.report())
    found = predict(replace(known, held_out=16, validate_every=10, refills=3), Memory(rollout_batch_size=8))
    # Twice as many answers as a round has: before the first round, after rounds 10, 20 and 25.
    assert found.validation == pytest.approx(2 * plain.phases["sample"]) and found.validations == 4
    assert found.run == pytest.approx(25 * plain.seconds + 4 * found.validation) and found.seconds == plain.seconds
    assert f"for 25 and 4 validations of {in_words(found.validation)}; without up to 3 refills" in found.line()
    assert found.report()["validation"] == round(found.validation, 4)
    unknown = replace(found, workload=replace(found.workload, steps=None))
    assert unknown.run is None and f", a validation of {in_words(found.validation)};" in unknown.line()
