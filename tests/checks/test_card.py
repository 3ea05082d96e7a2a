"""The checks of a card: what they make of cards that are not here, and of kernels that should not run."""

import shutil

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from r3lite.checks import card, numbers
from r3lite.checks.sample import CPU
from r3lite.devices import precision
from r3lite.devices.live_tensors import MIB
from r3lite.devices.precision import Precision

EXACT = Precision(torch.float32, CPU)
CUDA = Precision(torch.float32, torch.device("cuda"))


@pytest.fixture
def no_card(monkeypatch):
    """A machine whose NVIDIA card, if there is one, PyTorch cannot use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision.Path, "exists", lambda self: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_without_a_card_there_is_nothing_to_use(no_card):
    assert card.usable(EXACT).state == "skipped"


@pytest.mark.parametrize(("build", "remedy"), [(None, "https://pytorch.org"), ("13.0", "Update the GPU driver")])
def test_a_card_that_pytorch_cannot_use_is_a_failure(no_card, monkeypatch, build, remedy):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", build)
    finding = card.usable(EXACT)
    assert finding.state == "failed" and remedy in finding.remedy


def test_a_card_beside_a_run_on_the_cpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    finding = card.usable(EXACT)
    assert finding.state == "skipped" and "there is also an NVIDIA GPU" in finding.message


@pytest.mark.parametrize(
    ("capability", "kernels", "state"),
    [
        ((7, 5), ["sm_75", "sm_80", "sm_90"], "ok"),
        ((8, 9), ["sm_75", "sm_80", "sm_86"], "ok"),  # of the same major version
        ((12, 0), ["sm_80", "compute_90"], "ok"),  # the driver compiles it
        ((9, 0), ["sm_75", "sm_90a"], "ok"),
        ((6, 1), ["sm_75", "sm_80", "sm_90"], "failed"),  # a GTX 10xx
        ((8, 0), ["sm_75", "sm_86"], "failed"),
        ((12, 0), ["sm_80", "sm_90"], "failed"),
        ((6, 1), ["sm_75", "compute_75"], "failed"),
    ],
)
def test_a_card_without_kernels_in_the_build_is_a_failure(monkeypatch, capability, kernels, state):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert card.usable(CUDA).state == state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_runs_a_fused_kernel_under_every_mask(dtype):
    finding = card.attention_kernels(Precision(dtype, CPU))
    assert finding.state == "ok" and "all 7 masks use the fused kernel `cpu`" in finding.message


def test_attention_by_the_math_kernel_is_a_failure():
    with sdpa_kernel([SDPBackend.MATH]):
        finding = card.attention_kernels(EXACT)
    assert finding.state == "failed" and finding.message.count("math") == 7 and "T^2" in finding.remedy


@pytest.mark.parametrize(
    ("capability", "kernels", "unsound"),
    [
        ((7, 5), {"causal": "efficient", "decoding": "efficient"}, None),
        ((7, 5), {"causal": "efficient", "decoding": "flash"}, "decoding: flash"),
        ((8, 6), {"causal": "flash", "decoding": "efficient"}, None),
        ((8, 6), {"shared prefix": "efficient+flash"}, None),  # the prefix itself has no mask
        ((7, 5), {"shared prefix": "efficient+flash"}, "shared prefix: efficient+flash"),
        ((8, 6), {"causal": "flash", "decoding": "math"}, "decoding: math"),
        ((8, 6), {"causal": "efficient+math"}, "causal: efficient+math"),
        ((8, 6), {"causal": "none"}, "causal: none"),
    ],
)
def test_which_kernels_are_sound_depends_on_the_card(monkeypatch, capability, kernels, unsound):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    finding = card._judged_kernels(kernels, CUDA.device)
    if unsound is None:
        assert finding.state == "ok"
    else:
        assert (finding.state, finding.message) == ("failed", unsound)  # the sound masks are not named


@pytest.fixture
def pretended(monkeypatch):
    """A card of 4,096 MiB of which 3,300 are free; PyTorch's allocator has 300, and others had 100 before."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 300 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3300 * MIB, 4096 * MIB))
    monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 8320 << 10, raising=False)
    return {"used_mib": "100"}


def test_what_is_beside_the_tensors_by_hand(pretended):
    """The context is 4,096 - 3,300 - 300 - 100 = 396 MiB; two workspaces are 16."""
    finding = card.beside_tensors(CUDA, pretended, {"graph_pools_mib": 22, "fragmentation": 0.034})
    assert finding.state == "ok"
    shares = finding.message.removeprefix("MiB, measured of planned: ")
    assert shares == "context 396 of 434, cuBLAS workspace 16 of 16, graph pools 22 of 22, fragmentation 3% of 6%"


def test_more_than_is_planned_for_is_a_failure(pretended):
    finding = card.beside_tensors(CUDA, pretended | {"used_mib": "0"}, {})
    assert finding.state == "failed" and "--vram-budget" in finding.remedy
    assert finding.measured["context MiB"] == 496


def test_what_no_one_tells_is_left_out(pretended, monkeypatch):
    monkeypatch.delattr(torch.backends.cuda, "cublas_workspace_size")  # before PyTorch 2.13
    finding = card.beside_tensors(CUDA, {}, {"graph_pools_mib": 22})
    assert finding.message == "MiB, measured of planned: graph pools 22 of 22"
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    assert card.beside_tensors(CUDA, {}, {}).state == "skipped"
    assert card.beside_tensors(EXACT, {}, {}).state == "skipped"


def test_the_pools_of_graphs_are_counted_and_other_memory_is_not(monkeypatch):
    pieces = [((0, 0), 20), ((0, 1), 2), ((0, 1), 20), ((3, 0), 5)]
    described = [{"segment_pool_id": pool, "total_size": size * MIB} for pool, size in pieces]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: described)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 47 * MIB)
    assert numbers._pools_mib() == 27
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    assert numbers._pools_mib() == 0
