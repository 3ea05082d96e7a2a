"""The plan of a run: the budget that it is given by default."""

import types

import torch

from r3lite.core.grant import Memory
from r3lite.devices.live_tensors import MIB
from r3lite.devices.precision import resolve_device
from r3lite.memory import plan
from r3lite.memory.cuda_parts import LAPTOP
from r3lite.memory.known_models import QWEN25, QWEN_TOKENS
from r3lite.memory.work import Workload
from r3lite.settings import MemorySettings


def test_the_default_budget_has_our_own_context_in_it(monkeypatch):
    """What a card says is free no longer has the context in it; it was taken from the budget once more."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3000 * MIB, 4000 * MIB))
    granted = plan._budget(MemorySettings(), Workload(QWEN25["Qwen/Qwen2.5-0.5B"], QWEN_TOKENS, 2, 1024, on_cuda=True))
    assert granted - LAPTOP.context == 3000 * MIB - plan.MARGIN


def test_a_budget_is_enforced_on_the_device_that_a_run_is_given(monkeypatch):
    """PyTorch's own function refuses a `cuda` without a number: every run on a card would have ended at its start."""
    shares = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(
        torch._C, "_cuda_setMemoryFraction", lambda share, number: shares.append((share, number)), raising=False
    )
    card = types.SimpleNamespace(total_memory=4000 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    workload = Workload(QWEN25["Qwen/Qwen2.5-0.5B"], QWEN_TOKENS, 2, 1024, on_cuda=True)
    plan.enforce(plan.Plan(workload, Memory(), LAPTOP.context + 1000 * MIB, {}), resolve_device("cuda"))
    assert shares == [(0.25, 0)]
