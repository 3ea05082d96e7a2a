"""What the planner chooses: it fits, more memory never makes it slower, and remedies work."""

import re
from dataclasses import replace

import pytest

from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError
from r3lite.core.grant import Memory
from r3lite.devices.live_tensors import MIB
from r3lite.memory import choice, planner
from r3lite.memory.choice import choose
from r3lite.memory.known_models import QWEN25, QWEN_TOKENS
from r3lite.memory.parameters import adapter_bytes
from r3lite.memory.planner import peak
from r3lite.memory.work import Workload
from r3lite.settings import LoraSettings
from r3lite.settings.common import budget_bytes
from tests.errors import raises

TARGETS = LoraSettings().lora_targets


def qwen(size: str, **changes) -> Workload:
    settings = {"row_tokens": 2048, "targets": TARGETS} | changes
    return Workload(QWEN25[f"Qwen/Qwen2.5-{size.upper()}"], QWEN_TOKENS, 2, **settings)


@pytest.mark.parametrize(("size", "quantized", "mib"), [("0.5b", False, 942), ("0.5b", True, 436), ("3b", True, 1959)])
def test_weights_of_qwen(size, quantized, mib):
    assert planner.weight_bytes(qwen(size), quantized) / MIB == pytest.approx(mib, abs=1)


ROUND = {"episodes": 64, "reads": 900, "rows": 4, "adapters": 2, "scores": True}
WORKLOADS = {
    "sft": {"rows": 2},
    "ppo": {**ROUND, "critic": True},
    "grpo": ROUND,
    "evaluate": {"trains": False, "episodes": 1000, "reads": 900},
}
GRID = [int(g * (1 << 30)) for g in (0.6, 1, 1.3, 1.6, 2, 2.5, 3, 4, 6, 8, 12, 24, 48)]


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("algorithm", WORKLOADS)
@pytest.mark.parametrize("size", ["0.5b", "1.5b", "3b"])
def test_what_is_chosen_fits_and_more_memory_never_makes_it_slower(size, algorithm, on_cuda):
    w = qwen(size, **WORKLOADS[algorithm], on_cuda=on_cuda)
    previous = None
    fitted = 0
    for budget in GRID:
        try:
            memory = choose(w, {}, budget)
        except R3LiteError:
            assert previous is None  # what fits fits in more memory too
            continue
        fitted += 1
        assert peak(w, memory) <= budget
        if memory.nf4:  # only where nothing else fits
            with raises(R3LiteError, "budget-too-small"):
                choose(w, {"nf4": False}, budget)
        if w.trains and previous:
            slowdowns = memory.nf4, memory.recompute_layers
            assert slowdowns <= (previous.nf4, previous.recompute_layers)
        previous = memory
    assert fitted >= 6
    assert not previous.nf4 and (previous.recompute_layers == 0 or not w.trains)


@pytest.mark.parametrize(
    "fixed",
    [
        {"recompute_layers": 5},
        {"nf4": False},
        {"nf4": True},
        {"micro_batch_tokens": 3000, "loss_chunk": 77},
        {"mlp_tile": 99, "rollout_batch_size": 3},
        {"offload": True},
        {"offload": False, "recompute_layers": 0, "rollout_batch_size": 200},
    ],
)
@pytest.mark.parametrize("algorithm", ["sft", "ppo"])
def test_what_was_given_is_never_overruled(algorithm, fixed):
    w = qwen("0.5b", **WORKLOADS[algorithm], on_cuda=True)
    fitted = 0
    for budget in GRID:
        try:
            memory = choose(w, fixed, budget)
        except R3LiteError:
            continue
        fitted += 1
        assert {name: getattr(memory, name) for name in fixed} == fixed
        assert peak(w, memory) <= budget
    assert fitted


def applied(remedy: str, w: Workload, fixed: dict, budget: int) -> tuple[Workload, dict, int]:
    """What is asked for when a user does what a remedy says."""
    if match := re.fullmatch(r"--vram-budget (\d+)MiB", remedy):
        return w, fixed, int(match[1]) * MIB
    if match := re.fullmatch(r"--max-length (\d+)", remedy):
        tokens = int(match[1])
        return replace(w, row_tokens=tokens, reads=min(w.reads, tokens)), fixed, budget
    if remedy == "--quantize nf4":
        return w, fixed | {"nf4": True}, budget
    if remedy == "--stream-layers":
        return w, {"nf4": True} | fixed | {"stream_layers": True}, budget
    if match := re.fullmatch(r"--model (\S+)", remedy):
        return replace(w, model=QWEN25[match[1]]), fixed, budget
    gone = {flag.replace("-", "_") for flag in re.findall(r"--(\S+) (?:none|auto)", remedy)}
    assert gone <= fixed.keys()
    return w, {k: v for k, v in fixed.items() if k not in gone}, budget


@pytest.mark.parametrize(
    ("size", "algorithm", "fixed", "gib", "flag"),
    [
        ("0.5b", "sft", {"nf4": False}, 1.0, "--quantize nf4"),
        ("3b", "ppo", {"nf4": False}, 4.0, "--quantize nf4"),
        ("0.5b", "sft", {"recompute_layers": 0}, 1.5, "--recompute-layers none"),
        ("0.5b", "grpo", {"rollout_batch_size": 64, "micro_batch_tokens": 65536}, 1.6, "--rollout-batch-size none"),
        ("3b", "sft", {}, 2.4, "--max-length"),
        ("0.5b", "sft", {"recompute_layers": 0, "nf4": False}, 2.0, "--max-length"),
        ("3b", "sft", {}, 1.0, "--model Qwen/Qwen2.5-0.5B-Instruct"),
        ("3b", "sft", {}, 2.0, "--model Qwen/Qwen2.5-1.5B-Instruct"),
        ("0.5b", "sft", {}, 0.1, "--vram-budget"),
    ],
)
def test_what_cannot_fit_is_refused_with_remedies_that_work(size, algorithm, fixed, gib, flag):
    w, budget = qwen(size, **WORKLOADS[algorithm]), int(gib * (1 << 30))
    with raises(R3LiteError, "budget-too-small", f"{budget / (1 << 20):,.0f} MiB") as error:
        choose(w, fixed, budget, list(QWEN25.items()))
    remedy, _, elsewhere = error.value.remedy.partition(". ")
    assert elsewhere == "More processes do not help: each needs as much."
    remedies = remedy.removeprefix("It would fit with ").split("; or ")
    assert 1 <= len(remedies) <= 3
    assert any(remedy.startswith(flag) for remedy in remedies)
    for remedy in remedies:
        changed = applied(remedy, w, fixed, budget)
        assert peak(changed[0], choose(*changed)) <= changed[2]


def test_a_shorter_length_is_proposed_only_where_rows_with_a_shared_beginning_fit():
    """Passes were of fewer than no tokens if rows shared more than the length that was tried, and seemed to fit."""
    shared = qwen("3b", **ROUND | {"row_tokens": 4096, "rows": 16, "step_rows": 16, "shared": 600, "writes": 1792})
    answers = replace(shared, shared=3840, reads=3840, writes=256, contexts=qwen("3b", episodes=8, trains=False))
    for w, length, beginning in ((shared, 512, 512), (shared, 1024, 600), (answers, 2048, 1792), (answers, 256, 0)):
        shorter = choice._shorter(w, length)
        assert (shorter.row_tokens, shorter.shared) == (length, beginning)
        assert planner.allocated(shorter, Memory(nf4=True)) > planner.weight_bytes(shorter, True)
    with raises(R3LiteError, "budget-too-small", "2,500 MiB") as error:
        choose(answers, {}, 2500 * MIB)
    assert "--stream-layers" in error.value.remedy and "--max-length 1024" not in error.value.remedy


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("1300MiB", 1300 << 20), ("3.5 GB", 3_500_000_000), ("800 mb", 8 * 10**8), ("1.5gib", 3 << 29)],
)
def test_a_budget_is_read(text, size):
    assert budget_bytes(text) == size


@pytest.mark.parametrize("text", ["4", "GiB", "four GiB", "-1GiB", "0MiB", "4GiBs", "4 KiB", "nanGiB", "infGiB", ""])
def test_a_budget_that_is_no_amount_of_memory_is_refused(text):
    with raises(UsageError, "bad-memory-size"):
        budget_bytes(text)


def test_on_a_cpu_offload_is_not_counted_on():
    w = qwen("0.5b", **WORKLOADS["sft"])
    offloaded, resident = Memory(offload=True, recompute_layers=24), Memory(recompute_layers=24)
    assert peak(w, offloaded) == peak(w, resident)
    card = replace(w, on_cuda=True)
    assert peak(card, offloaded) < peak(card, resident)


def test_streaming_is_named_where_a_base_would_fit_with_it():
    with raises(R3LiteError, "budget-too-small", "--stream-layers"):
        choose(qwen("3B"), {}, budget_bytes("2600MiB"))


@pytest.mark.parametrize("gib", [4.0, 8.0])
def test_full_fine_tuning_recomputes_dense_layers_whatever_a_preset_has(gib):
    """The preset tiny, of no recomputed layers, made `sft --no-lora` fail, and NF4 weights cannot change."""
    w = replace(qwen("0.5b", **WORKLOADS["sft"]), full_tuning=True, lora_r=0)
    memory = choose(w, {"recompute_layers": 0, "nf4": True}, int(gib * (1 << 30)))
    assert (memory.nf4, memory.recompute_layers) == (False, w.model.num_hidden_layers)


def test_lora_as_a_remedy_is_counted_with_its_adapters(monkeypatch):
    """It was counted without any, and proposed for budgets in which it does not fit."""
    tried = []
    monkeypatch.setattr(choice, "_fits", lambda w, fixed, budget: tried.append(w))
    full_tuning = replace(qwen("0.5b", **WORKLOADS["sft"]), full_tuning=True, lora_r=0, targets=())
    assert not list(choice._remedies(full_tuning, {}, 0, []))
    assert adapter_bytes(tried[0]) == adapter_bytes(qwen("0.5b", **WORKLOADS["sft"]))
