"""What the plan adds to the tensors on a card, by hand; on a CPU it adds nothing."""

from dataclasses import replace

import pytest
import torch

from r3lite.core.grant import Memory
from r3lite.devices.live_tensors import MIB
from r3lite.memory import choice, planner
from r3lite.memory.cuda_parts import HOPPER, LAPTOP, NOT_TENSORS, beside_tensors
from r3lite.memory.known_models import QWEN25, QWEN_TOKENS
from r3lite.memory.work import Workload
from r3lite.memory.workloads import on_card, sft_workload
from r3lite.settings import LoraSettings, ModelSettings, SftConfig

SFT = Workload(QWEN25["Qwen/Qwen2.5-0.5B"], QWEN_TOKENS, 2, 2048, targets=LoraSettings().lora_targets)
RL = replace(SFT, episodes=64, reads=880, retrieves=True)


def test_the_parts_by_hand():
    """1,000 MiB of tensors: 6 % of fragments. cuBLAS: 2 x 4,096 + 8 x 16 = 8,320 KiB in each of two threads."""
    expected = {"context": 434 * MIB, "cuBLAS workspace": 2 * 8320 * 1024, "fragmentation": 60 * MIB}
    assert beside_tensors(1000 * MIB) == expected


@pytest.mark.parametrize(("capability", "card"), [((7, 5), LAPTOP), ((8, 9), LAPTOP), ((9, 0), HOPPER)])
def test_a_plan_has_the_parts_of_the_card_in_use(monkeypatch, capability, card):
    """An H200 ran out of memory under budgets that its plans fitted into: they had the parts of smaller cards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    here = sft_workload(SftConfig(model=ModelSettings(model="Qwen/Qwen2.5-0.5B", device="cuda", dtype="fp16")))
    parts = planner.phases(here, Memory())["update"]
    assert (parts["context"], parts["cuBLAS workspace"]) == (card.context, 2 * card.workspace)
    elsewhere = on_card(here, "GTX 1650", "fp16")
    assert planner.phases(elsewhere, Memory())["update"]["context"] == LAPTOP.context


@pytest.mark.parametrize(
    ("name", "beside"), [("RTX 4090", LAPTOP), ("T4", LAPTOP), ("NVIDIA H100 80GB HBM3", HOPPER), ("rtx 5060", HOPPER)]
)
def test_a_plan_for_a_card_elsewhere_has_the_parts_that_a_plan_on_it_has(name, beside):
    """A plan for an RTX 5060 (compute capability 12) reserved 446 MiB less than the run on it then did."""
    elsewhere = on_card(replace(SFT, device="cuda"), name, "fp16")
    assert elsewhere.beside == beside
    assert elsewhere.device is None  # the memory of this machine's host does not limit --stream-layers there


@pytest.mark.parametrize(
    ("captured", "pool"),
    [
        (1, 22),  # 8.1 MiB of workspace in one piece of 20, small tensors in one of 2
        (11 * MIB, 22),  # 19.1
        (12 * MIB, 24),  # 20.1, so 22
        (60 * MIB, 72),  # 68.1, so 70
    ],
)
def test_the_pool_of_graphs_by_hand(captured, pool):
    assert beside_tensors(0, captured)["graph pools"] == pool * MIB


@pytest.mark.parametrize("workload", [SFT, RL])
def test_a_card_has_them_in_every_phase_and_a_cpu_in_none(workload):
    memory = Memory(rollout_batch_size=8, offload=False)
    names = beside_tensors(0, 1).keys()
    for parts in planner.phases(workload, memory).values():
        assert not names & parts.keys()
    assert planner.allocated(workload, memory) == planner.peak(workload, memory)
    card = replace(workload, on_cuda=True)
    for name, parts in planner.phases(card, memory).items():
        assert names - parts.keys() == (set() if name == "sample" else {"graph pools"})
        tensors = sum(size for part, size in parts.items() if part not in names)
        assert parts["fragmentation"] == pytest.approx(0.06 * tensors, abs=1)
    beside = max(sum(parts[n] for n in NOT_TENSORS if n in parts) for parts in planner.phases(card, memory).values())
    assert LAPTOP.context < planner.peak(card, memory) - planner.allocated(card, memory) <= beside


@pytest.mark.parametrize(("tokens", "padded"), [(1000, 1024), (1025, 1536), (4500, 4096)])
def test_captured_passes_have_a_pool_for_the_largest(tokens, padded):
    """It has the tensors of a pass over one padded row, and a mask in fp16; longer rows are not captured."""
    memory = Memory(recompute_layers=10, micro_batch_tokens=1)
    captured = replace(SFT, row_tokens=tokens, on_cuda=True, captures=True)
    parts = planner.phases(captured, memory)["update"]
    of_one_row = planner.phases(replace(captured, row_tokens=padded, captures=False), memory)["update"]
    names = ("layer inputs", "kept layers", "loss chunk", "live layer", "gradients")
    tensors = sum(of_one_row.get(name, 0) for name in names)
    assert parts["graph pools"] == beside_tensors(0, tensors + 2 * padded**2)["graph pools"]
    assert parts["compared gradients"] == 2 * parts["adapters"]
    assert "graph pools" not in planner.phases(captured, replace(memory, offload=True))["update"]


def test_what_is_left_for_tensors_of_4_gib():
    """450 MiB are for context and workspaces; of the rest, 6 % of the tensors are for fragments."""
    room = 4096 * MIB * (1 - choice.SLACK)
    tensors = 3368 * MIB
    assert tensors + sum(beside_tensors(tensors).values()) == pytest.approx(room, rel=0.002)
