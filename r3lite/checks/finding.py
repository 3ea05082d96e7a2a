"""What a check found, and what the checks of this room have in common: the shipped model and sentences to run it on."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from r3lite.core.episode import Question
from r3lite.core.files import shipped
from r3lite.datasets.qa import read_questions
from r3lite.devices.precision import Precision, dtype_name
from r3lite.models import lora
from r3lite.models.causal_lm import CausalLM
from r3lite.models.weights import load_model, resolve_folder
from r3lite.protocols.tokenizer import Tokenizer

# Bounds of the mean difference between log-probabilities that should be equal. A CPU was off by 1e-6 in fp32, by 0.002
# in fp16 and by 0.017 in bf16. A mistake may cost less, decoding steps that see empty slots 0.002: so checks of logic
# are made in fp32, too.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
REPORT = "An error of r3lite or of this PyTorch: please send doctor.json with a bug report."
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Finding:
    """The result of a check: a line for people, what to do if it failed, and the figures that it was judged by."""

    state: Literal["ok", "failed", "skipped"]
    message: str
    remedy: str = ""
    measured: dict[str, float] = field(default_factory=dict)


def skipped(reason: str) -> Finding:
    """The check does not apply here."""
    return Finding("skipped", reason)


def judged(sound: bool, message: str, remedy: str = REPORT, **measured: float) -> Finding:
    """Ok if `sound`, else failed."""
    return Finding("ok", message, "", measured) if sound else Finding("failed", message, remedy, measured)


def closeness(pairs: dict[torch.dtype, tuple[Tensor, Tensor]]) -> Finding:
    """Ok if log-probabilities that should be equal differ on average by no more than BOUNDS has for their dtype."""
    parts, figures, sound = [], {}, True
    for dtype, (ours, theirs) in pairs.items():
        name, difference = dtype_name(dtype), (ours.float().cpu() - theirs.float().cpu()).abs()
        mean = float(difference.mean())
        sound &= mean <= BOUNDS[dtype]  # a nan is not
        parts.append(f"{mean:.1e} in {name} ({BOUNDS[dtype]:g} allowed)")
        figures |= {f"mean_difference_{name}": mean, f"largest_difference_{name}": float(difference.max())}
    return judged(sound, f"log-probabilities differ by {', '.join(parts)}", **figures)


def largest(values: Iterable[float]) -> float:
    """The greatest of some numbers, or nan if one of them is, which Python's `max` may pass over."""
    return float(torch.tensor(list(values)).max())


def tiny(precision: Precision, adapted: bool = False) -> CausalLM:
    """The shipped model in a precision and on its device; if `adapted`, with an adapter on that changes its output."""
    model = load_model(resolve_folder("tiny"), precision.dtype, precision.device)
    if adapted:
        lora.add_adapter(model, "policy", r=4, alpha=8)
        lora.set_adapter(model, "policy")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in lora.adapter_parameters(model, "policy").items():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def questions(count: int) -> list[Question]:
    """The first questions of the sample world that training does not see."""
    return read_questions(shipped("data", "world", "test.jsonl"), count)


def sentences(count: int = 4) -> list[list[int]]:
    """Tokens of what the sample world says around as many questions, 125 to 191 a row."""
    tokenizer = Tokenizer.load(resolve_folder("tiny"))
    texts = (" ".join([*(document.text for document in q.documents), q.text, *q.answers]) for q in questions(count))
    return [tokenizer.encode(text) for text in texts]


def padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """Rows [B, T] on a device, padded on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)


def predicted(logits: Tensor, row: list[int]) -> Tensor:
    """Log-probabilities [n - 1] on the host of the tokens of a row of n after its first, from its logits [>= n, V]."""
    targets = torch.tensor(row[1:], device=logits.device)[:, None]
    return logits[: len(row) - 1].float().log_softmax(-1).gather(-1, targets)[:, 0].cpu()


@torch.no_grad()
def logprobs(model: CausalLM, rows: list[list[int]], precision: Precision) -> Tensor:
    """Log-probabilities of all tokens of rows but their first ones, end to end, on the host."""
    with precision.autocast():
        logits = model.logits(model(padded(rows, precision.device)))
    return torch.cat([predicted(own, row) for own, row in zip(logits, rows, strict=True)])


@contextlib.contextmanager
def whole_card(device: torch.device):
    """At the end of the `with` block the process may use all of the card again, whatever budget a run enforced."""
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
