"""Operators of a profile are grouped by what they are for."""

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bench import parts
from bench.parts import ADAPTERS, ATTENTION, COPIES, ELEMENTWISE, FROZEN, HEAD, OPTIMIZER, OTHER, SAMPLING
from r3lite.models import lora
from r3lite.models.logprobs import cross_entropy, token_loss


def event(name, start, end, parent=None, sequence=-1, scope=0, shapes=()):
    """One event of the profiler; all run in thread 1."""
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), cpu_parent=parent, sequence_nr=sequence,
        scope=scope, thread=1, fwd_thread=1, input_shapes=shapes,
    )  # fmt: skip


def test_an_operator_belongs_to_the_innermost_range():
    outer = event(ATTENTION, 0, 100)
    inner = event(FROZEN, 10, 50, outer)
    operators = [event("aten::addmm", 20, 30, inner), event("aten::mul", 60, 70, outer), event("aten::add", 200, 210)]
    part_seconds = parts.seconds_by_part([*operators, inner, outer], lambda e: 1e6, rank=8)
    assert {part: s for part, s in part_seconds.items() if s} == {FROZEN: 1, ATTENTION: 1, OTHER: 1}


def test_a_gradient_belongs_to_the_operator_that_it_answers():
    # mul and neg have one number, as neg makes no node before mul does: the last of them counts.
    attention, rotary = event(ATTENTION, 0, 10), event(ELEMENTWISE, 20, 30)
    forward = [event("aten::neg", 1, 2, attention, sequence=5), event("aten::mul", 21, 22, rotary, sequence=5)]
    node = event("autograd::engine::evaluate_function: MulBackward0", 50, 60, sequence=5, scope=1)
    backward = event("aten::mul", 51, 52, node, sequence=5, scope=1)
    events = [attention, rotary, *forward, node, backward]
    part_seconds = parts.seconds_by_part(events, lambda e: 3e6 if e is backward else 0, rank=8)
    assert part_seconds[ELEMENTWISE] == 3 and sum(part_seconds.values()) == 3


@pytest.mark.parametrize(
    ("name", "shapes", "part"),
    [
        ("aten::mm", [[512, 896], [896, 4864]], FROZEN),  # grad @ W
        ("aten::mm", [[512, 896], [896, 8]], ADAPTERS),  # grad @ B
        ("aten::mm", [[512, 24], [24, 896]], ADAPTERS),  # of three layers that read the same x
        ("aten::addmm_", [[512, 896], [512, 8], [8, 896]], ADAPTERS),
        ("aten::copy_", [[512, 896], [512, 896], []], COPIES),
    ],
)
def test_products_with_frozen_weights_are_told_from_those_of_the_adapters(name, shapes, part):
    around = event(ADAPTERS, 0, 10)
    part_seconds = parts.seconds_by_part([around, event(name, 1, 2, around, shapes=shapes)], lambda e: 1e6, rank=8)
    assert part_seconds[part] == 1


def test_a_real_step_has_every_part_and_nearly_nothing_is_left_over(small_model):
    model = small_model()
    lora.add_adapter(model, "policy", 4, 8)
    lora.set_adapter(model, "policy")
    optimizer = torch.optim.AdamW(lora.adapter_parameters(model, "policy").values())
    ids = torch.randint(0, 300, (1, 32))  # [1, T]
    with parts.ranges(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        hidden = model(ids)[0, :-1]  # [T-1, C]
        token_loss(hidden, model.head_weight, ids[0, 1:], cross_entropy)[0].backward()
        optimizer.step()
    part_seconds = parts.seconds_by_part(profiler.events(), lambda e: 1e6, rank=4)  # counts operators
    assert all(part_seconds[part] for part in (FROZEN, ADAPTERS, ATTENTION, ELEMENTWISE, HEAD, COPIES, OPTIMIZER))
    assert part_seconds[SAMPLING] == 0 and part_seconds[OTHER] < 0.1 * sum(part_seconds.values())


@pytest.mark.parametrize("rows", [1, 16])
@torch.no_grad()
def test_an_adapter_counts_as_one_however_many_rows_it_reads(rows):
    """On a CPU a few rows of half precision take another way than many."""
    model = torch.nn.Sequential()
    model.add_module("q_proj", torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    lora.add_adapter(model, "policy", 4, 8, targets=["q_proj"])
    x = torch.zeros(rows, 64, dtype=torch.bfloat16)
    lora.set_adapter(model, "policy")
    with parts.ranges(), lora.cast_once(model, torch.bfloat16), profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(x)
    products = [e for e in profiler.events() if e.name in ("aten::linear", "aten::addmm_")]
    of_adapter = [e for e in products if e.cpu_parent and e.cpu_parent.name == ADAPTERS]
    assert len(products) == 3 and len(of_adapter) == 2


def test_ranges_are_gone_after_the_block():
    def functions() -> list:
        return [vars(owner)[name] for owner, names, _ in parts.RANGES for name in names]

    originals = functions()
    with parts.ranges():
        assert all(patched is not original for patched, original in zip(functions(), originals, strict=True))
    assert functions() == originals
