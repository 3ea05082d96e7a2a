"""The plan of a run: the budget that it is given by default."""

import torch

from r3lite.memory import plan
from r3lite.memory.cuda_parts import CONTEXT, MIB
from r3lite.settings import MemorySettings


def test_the_default_budget_has_our_own_context_in_it(monkeypatch):
    """What a card says is free no longer has the context in it; it was taken from the budget once more."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3000 * MIB, 4000 * MIB))
    granted = plan._budget(MemorySettings(), on_cuda=True)
    assert granted - CONTEXT == 3000 * MIB - plan.MARGIN
