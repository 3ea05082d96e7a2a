"""Predicted times: operations and bytes against another formula and numbers worked by hand, and what was measured."""

import json
from dataclasses import replace

import pytest

from bench.limits import training_flops
from bench.options import HUB, RESULTS
from r3lite.core.grant import Memory
from r3lite.devices.cards import MEASURED, Speeds, card
from r3lite.memory import duration
from r3lite.memory.choice import choose
from r3lite.memory.duration import Cost, in_words, predict
from r3lite.memory.known_models import KNOWN, QWEN25, QWEN_TOKENS
from r3lite.memory.work import Workload
from r3lite.settings import LoraSettings
from r3lite.settings.common import budget_bytes

SMALL = QWEN25["Qwen/Qwen2.5-0.5B"]
BASE = 357_826_560  # weights of the 24 layers: 24 x 896 x (2 x 896 + 2 x 128 + 3 x 4864)
SFT = Workload(SMALL, QWEN_TOKENS, 2, 1024, targets=LoraSettings().lora_targets, dtype="fp16")
ROUND = replace(SFT, episodes=8, row_tokens=768, writes=512, shared=256, rows=8, step_rows=8, scored_rows=8)


def speeds(bandwidth: float = 192e9, flops: float = 1e13, launch: float = 0.0, link: float | None = None) -> Speeds:
    return Speeds("x", {"fp16": bandwidth}, {"fp16": flops}, launch, MEASURED, link=link)


def test_seconds_of_a_cost_worked_by_hand():
    cost = Cost(moved=20, operations=300, launches=4, copied=6)
    # Half of 10 bytes and of 100 operations a second; half a second a launch; half of 2 bytes over the link.
    assert cost.seconds(speeds(10.0, 100.0, 0.5, link=2.0), "fp16") == 4 + 6 + 2 + 6
    assert cost.seconds(speeds(10.0, 100.0, 0.5), "fp16") == pytest.approx(4 + 6 + 2 + 1.2)
    assert cost + cost == cost * 2 == Cost(40, 600, 8, 12)


def test_operations_of_a_training_step_are_those_of_the_other_formula():
    """bench.limits counts attention's backward pass twice, as here; products of adapters are not counted."""
    cost = duration.update(SFT, Memory())
    useful = training_flops(BASE, QWEN_TOKENS * 896, 0, layers=24, width=896, tokens=1024)
    assert cost.operations == pytest.approx(useful, rel=0.05)
    # Half as many more products of the layers if all run again; the head's stay.
    recomputing = duration.update(SFT, Memory(recompute_layers=24))
    layers = duration.forward(SFT, Memory(), 1, 1024, 512).operations
    assert recomputing.operations - cost.operations == layers == 1024 * (2 * BASE + 24 * 4 * 896 * 512)
    full = duration.update(replace(SFT, full_tuning=True), Memory())
    assert full.operations - cost.operations == layers + 2 * QWEN_TOKENS * 896 * 1024
    assert full.moved - cost.moved == pytest.approx(40 * 494e6 + 2 * QWEN_TOKENS * 896, rel=1e-2)


def test_decoding_is_bound_by_the_weights_as_computed_elsewhere():
    """At 192 GB/s and 512 tokens 0.5B in fp16 decodes 193 tokens/s at batch 1 and 1,479 at batch 8, at most."""
    for rows, limit in ((1, 193), (8, 1479)):
        assert rows / (duration.decode(ROUND, Memory(), rows, 512).moved / 192e9) == pytest.approx(limit, rel=0.05)


def test_a_graph_launches_sooner_than_a_host():
    plain, graph = (duration.decode(replace(ROUND, on_cuda=on), Memory(), 8, 512) for on in (False, True))
    assert plain.launches == 10 * (24 * 24 + 60) and graph.launches == 1.5 * (24 * 24 + 60)
    streamed = duration.decode(replace(ROUND, on_cuda=True), Memory(stream_layers=True), 8, 512)
    assert streamed.launches == plain.launches and streamed.copied == pytest.approx(2 * BASE, rel=1e-2)


def test_a_round_is_made_of_steps_of_decoding_passes_and_optimizer_steps():
    memory = Memory(rollout_batch_size=8, micro_batch_tokens=8192)
    prompt = duration.forward(ROUND, memory, 1, 256, 256 / 2)  # read once
    step = duration.decode(ROUND, memory, 8, 256 + 512 / 2)
    assert duration.sample(ROUND, memory, 8) == prompt + step * 512
    # In four rows at a time twice as many steps are taken, each as cheap as the weights' reading allows.
    halves = duration.sample(ROUND, replace(memory, rollout_batch_size=4), 8)
    assert halves.moved / duration.sample(ROUND, memory, 8).moved == pytest.approx(2, rel=0.05)
    # 256 + 8 x 512 tokens in one pass, the prompt not again in each; 8 x 512 logits.
    tokens = 256 + 8 * 512
    expected = tokens * (2 * BASE + 24 * 4 * 896 * 384) + 2 * 8 * 512 * QWEN_TOKENS * 896
    assert duration.score(ROUND, memory).operations == expected
    assert duration.count_packs(ROUND, memory, 8, 8).tokens == tokens
    assert duration.count_packs(ROUND, replace(memory, micro_batch_tokens=256 + 2 * 512), 8, 8).passes == 4
    for doubled in (replace(ROUND, epochs=2), replace(ROUND, episodes=16)):
        assert duration.update(doubled, memory) == duration.update(ROUND, memory) * 2


def test_nf4_is_counted_by_what_its_products_move_and_launch():
    dense, nf4 = (duration.forward(ROUND, Memory(nf4=quantized), 1, 1, 512) for quantized in (False, True))
    assert nf4.moved == 4 * dense.moved == 8 * BASE and nf4.operations == dense.operations
    assert nf4.launches - dense.launches == 24 * 16 * 10


def test_a_prediction_has_the_phases_of_the_run_or_is_none():
    memory = Memory(rollout_batch_size=8)
    assert predict(ROUND, memory) is None
    assert predict(replace(ROUND, speeds=speeds(), dtype="fp32"), memory) is None, "it was not measured in fp32"
    predicted = predict(replace(ROUND, speeds=speeds(), scores=True, steps=5), memory)
    assert list(predicted.phases) == ["sample", "score", "update"] and predicted.run_seconds == 5 * predicted.seconds
    line = predicted.line()
    assert line.startswith("at most about ") and " for a round (sample " in line and "up to" not in line
    assert "factor of two" not in line  # beside "at most" it contradicted it
    caveat = "Usually several times less: this is for episodes of 768 tokens, the most they may have"
    assert line.endswith(f" for the run of 5 rounds. {caveat}, from this device's speed just now")
    step = predict(replace(SFT, speeds=speeds(), mean_tokens=100.0, writes=40.0), memory)
    assert list(step.phases) == ["update"] and step.run_seconds is None
    passed = 1000 // SFT.step_rows
    assert (
        f" for a step; {in_words(passed * step.seconds)} for {passed:,} steps, a pass over 1,000 rows; " in step.line()
    )
    assert "; --data or --max-steps sets how many the run takes. Within a factor of two, from this " in step.line()
    assert "at most" not in step.line() and "sually" not in step.line()
    longest = predict(replace(SFT, speeds=speeds()), memory)
    assert (
        longest.seconds > 8 * step.seconds
        and "this is for rows of 1,024 tokens, the most they may have, " in longest.line()
    )
    ask_line = predict(replace(ROUND, trains=False, speeds=card("GTX 1650")), memory).line()
    assert (
        ask_line.startswith("at most about ")
        and " for sampling 8 answers. Usually several times less: " in ask_line
        and "--max-steps" not in ask_line
        and "the run" not in ask_line
    )
    assert ask_line.endswith("the most they may have, from half the peak speed of the GTX 1650")
    alone = predict(replace(ROUND, trains=False, episodes=1, speeds=card("GTX 1650")), memory).line()
    assert " for sampling an answer. " in alone


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0123, "12 ms"), (0.99, "990 ms"), (1.9, "1.9 s"), (2.04, "2.0 s"), (119, "119 s"), (121, "2.0 min"),
     (5000, "83 min"), (7300, "2.0 h"), (172_799, "48 h"), (200_000, "2.3 days"), (1e10, "115,741 days")],
)  # fmt: skip
def test_times_in_words(seconds, words):
    assert in_words(seconds) == words


def test_expanded_episodes_are_sampled_and_learned_from():
    memory = Memory(rollout_batch_size=8, micro_batch_tokens=8192)
    timed = replace(ROUND, speeds=speeds())
    plain, expanded = (predict(replace(timed, expanded=count), memory).phases for count in (0, 4))
    assert expanded["sample"] == plain["sample"] and 0 < expanded["expand"] <= expanded["sample"]
    assert duration.score(replace(ROUND, expanded=4), memory).operations == pytest.approx(
        duration.score(ROUND, memory).operations * 1.5, rel=0.05
    )
    assert expanded["update"] > 1.3 * plain["update"]


def test_validations_are_counted_and_refills_are_named():
    timed = replace(ROUND, steps=25, speeds=speeds())
    plain = predict(timed, Memory(rollout_batch_size=8))
    assert plain.validation_seconds == 0 and "validation" not in plain.line() + str(plain.report())
    validated = predict(replace(timed, held_out=16, validate_every=10, refills=3), Memory(rollout_batch_size=8))
    # Twice as many answers as a round has: before the first round, after rounds 10, 20 and 25.
    assert validated.validation_seconds == pytest.approx(2 * plain.phases["sample"], rel=0.01)
    assert validated.validation_count == 4
    assert validated.run_seconds == pytest.approx(25 * plain.seconds + 4 * validated.validation_seconds)
    assert validated.seconds == plain.seconds
    assert f", without up to 3 refills; {in_words(validated.validation_seconds)} for a validation; " in validated.line()
    assert validated.report()["validation"] == round(validated.validation_seconds, 4)
    # With --learn answer, a round samples last turns of 64 tokens only, and a validation whole episodes all the same.
    answers = replace(timed, writes=64, shared=704, contexts=replace(ROUND, episodes=2), held_out=16)
    learned = predict(answers, Memory(rollout_batch_size=8))
    assert learned.phases["sample"] < plain.phases["sample"] / 4
    assert learned.validation_seconds == pytest.approx(validated.validation_seconds)
    unknown = replace(validated, workload=replace(validated.workload, steps=None))
    assert unknown.run_seconds is None
    assert f"; {in_words(validated.validation_seconds)} for a validation; --data or --max-steps sets" in unknown.line()


# Beside what was measured

EPYC = Speeds("AMD EPYC", {"bf16": 13e9}, {"bf16": 4.1e11}, 1e-6, MEASURED)  # as bench/results/throughput-cpu.json


def measured(device: str) -> list[dict]:
    runs = json.loads((RESULTS / f"memory-{device}.json").read_text(encoding="utf-8"))["runs"]
    return [record for run in runs for record in run["records"] if "step_s" in record]


def of_case(record: dict, speeds: Speeds) -> duration.Duration:
    """What is predicted of a case of bench/memory.py: rows, or 8 episodes of 256 tokens and more, by 4 an update."""
    name = HUB.get(record["size"]) or next(name for name in KNOWN if name.endswith("/" + record["size"]))
    model, vocabulary = KNOWN[name]
    work = Workload(model, vocabulary, 2, record["tokens"], targets=LoraSettings().lora_targets, dtype="bf16")
    work = replace(work, speeds=speeds, on_cuda=speeds is not EPYC)
    if record["algorithm"] != "sft":
        length = 256 + record["tokens"]
        work = replace(work, row_tokens=length, writes=record["tokens"], shared=256, reads=256, episodes=8)
        work = replace(work, rows=4, step_rows=4, scored_rows=8, scores=1, critic=record["algorithm"] == "ppo")
    quantized = {"nf4": record["quantize"] == "nf4"}
    return predict(work, choose(work, quantized, budget_bytes(record["budget"])))


@pytest.mark.parametrize(("device", "speeds"), [("cpu", EPYC), ("cuda", card("H100 80GB HBM3"))])
def test_predictions_are_right_within_a_factor_of_two(device, speeds):
    records = measured(device)
    assert len(records) >= 7
    for record in records:
        predicted = of_case(record, speeds)
        assert 0.5 < predicted.seconds / record["step_s"] < 2, record
        if "sample_s" in record:
            assert 0.5 < predicted.phases["sample"] / record["sample_s"] < 2, record
