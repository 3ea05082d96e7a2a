"""What `doctor` finds out on a card, as tests: none of its checks may fail, and none that is about cards be skipped."""

import pytest
import torch

from r3lite.checks import card
from r3lite.checks.registry import CHECKS
from r3lite.devices.precision import DTYPES, Precision, resolve_device

# A card's kernels may add does not repeat runs exactly: then a resumed run cannot be equal to the bit.
MAY_BE_SKIPPED = {("logits in 16 bits", "fp32"), ("training in fp16", "fp16"), *(("resume", name) for name in DTYPES)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_on_a_card_no_check_fails(check, dtype):
    if dtype == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this card has no bf16")
    finding = check.run(Precision(DTYPES[dtype], resolve_device("cuda")))
    assert finding.state == "ok" or (finding.state == "skipped" and (check.name, dtype) in MAY_BE_SKIPPED), finding


@pytest.mark.gpu
def test_on_a_card_what_is_beside_the_tensors_is_as_planned():
    """Without what other programs held before: in a test CUDA has been used already."""
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    finding = card.beside_tensors(Precision(torch.float32, torch.device("cuda")), {}, {})
    assert finding.state == "ok", finding
