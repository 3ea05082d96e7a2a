"""What checks run on: the shipped tiny model, and sentences of the sample world."""

import contextlib

import torch
from torch import Tensor

from r3lite.core.episode import Question
from r3lite.core.files import shipped
from r3lite.datasets.qa import read_questions
from r3lite.devices.precision import Precision
from r3lite.models import lora
from r3lite.models.causal_lm import CausalLM
from r3lite.models.weights import load_model, resolve_folder
from r3lite.protocols.tokenizer import Tokenizer

CPU = torch.device("cpu")


def tiny(precision: Precision, adapted: bool = False) -> CausalLM:
    """Returns the shipped model in a precision; if `adapted`, with a random adapter that changes its output."""
    model = load_model(resolve_folder("tiny"), precision.dtype, precision.device)
    if adapted:
        lora.add_adapter(model, "policy", r=4, alpha=8)
        lora.set_adapter(model, "policy")
        generator = torch.Generator().manual_seed(1)
        parameters = lora.adapter_parameters(model, "policy")
        with torch.no_grad():
            for name, parameter in parameters.items():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def questions(count: int) -> list[Question]:
    """Returns the first `count` test questions of the sample world."""
    return read_questions(shipped("data", "world", "test.jsonl"), count)


def sentences(count: int = 4) -> list[list[int]]:
    """Returns a row of tokens for each of `count` questions of the sample world: documents, question and answers.

    Each of the first four rows has 125 to 191 tokens.
    """
    tokenizer = Tokenizer.load(resolve_folder("tiny"))
    rows = []
    for question in questions(count):
        documents = [document.text for document in question.documents]
        text = " ".join([*documents, question.text, *question.answers])
        rows.append(tokenizer.encode(text))
    return rows


def padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """Returns rows [B, T] on a device, padded on the right."""
    longest = max(map(len, rows))
    padded_rows = [row + [0] * (longest - len(row)) for row in rows]
    return torch.tensor(padded_rows, device=device)


def predicted(logits: Tensor, row: list[int]) -> Tensor:
    """Returns log-probabilities [n - 1], on the host, of a row's tokens except the first.

    The row has n tokens; its logits [T, V] may be padded: T >= n.
    """
    targets = torch.tensor(row[1:], device=logits.device)[:, None]
    logprobs_of_all = logits[: len(row) - 1].float().log_softmax(-1)
    return logprobs_of_all.gather(-1, targets)[:, 0].cpu()


@torch.no_grad()
def logprobs(model: CausalLM, rows: list[list[int]], precision: Precision) -> Tensor:
    """Returns log-probabilities, on the host, of all tokens of rows except each row's first, rows end to end."""
    with precision.autocast():
        logits = model.logits(model(padded(rows, precision.device)))
    of_rows = [predicted(logits_of_row, row) for logits_of_row, row in zip(logits, rows, strict=True)]
    return torch.cat(of_rows)


@contextlib.contextmanager
def whole_card(device: torch.device):
    """Lifts, at the end of its block, the limit that a run in the block may have set on the card's memory."""
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
