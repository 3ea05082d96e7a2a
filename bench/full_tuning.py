"""Full fine-tuning in bf16 with 8-bit moments (`sft --no-lora`) beside AdamW in fp32: the loss of each step.

    python -m bench.full_tuning --model FOLDER --data ROWS.jsonl --adamw A.jsonl    # transformers, all in fp32
    python -m bench.full_tuning --model FOLDER --data ROWS.jsonl --compare RUN A.jsonl --output RESULT.json

Both take the same rows in the same order; the second line compares the run folder of `sft --no-lora` with the flags
that `flags` lists. AdamW clips all gradients together to a norm of 1, as its users do.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from bench import records
from r3lite.core import run_files
from r3lite.core.invocation import resolve
from r3lite.datasets.order import rows_of_step
from r3lite.datasets.sources import encode_fitting, encode_rows_of, read_data
from r3lite.devices.precision import Precision
from r3lite.models.weights import resolve_folder
from r3lite.protocols.layout import Layout
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import LengthSettings, SftConfig
from r3lite.training import metrics, optim

STEPS, TOKENS, DOCUMENT, RATE = 200, 256, 24, 2e-5


def flags(model: str, data: str, prompts: Path) -> list[str]:
    """Those of the compared run but --no-lora, --dtype and --output; its prompts are short, as its rows are."""
    init, step = prompts / "init.txt", prompts / "step.txt"
    init.write_text("{question}")
    step.write_text("{documents}")
    chosen = ["--model", model, "--data", data, "--max-steps", str(STEPS), "--max-length", str(TOKENS)]
    chosen += ["--max-document-tokens", str(DOCUMENT)]
    chosen += ["--batch-size", "1", "--gradient-accumulation", "1", "--learning-rate", str(RATE)]
    chosen += ["--init-prompt", str(init), "--step-prompt", str(step)]
    return [*chosen, "--validation-rows", "24", "--validate-every", str(STEPS), "--save-every", "0"]


def adamw(model: str, data: str, output: Path) -> None:
    """Writes a line of JSON for each step of AdamW in fp32."""
    from transformers import AutoModelForCausalLM

    config = resolve("sft", SftConfig(), flags(model, data, output.parent))
    protocols, rows, validation = read_data(config)
    tokenizer = Tokenizer.load(resolve_folder(model), "auto")
    lengths = LengthSettings(max_length=TOKENS, max_document_tokens=config.sft.max_document_tokens)
    layouts = {name: Layout(tokenizer, protocol, lengths) for name, protocol in protocols.items()}
    trained, held_out = encode_rows_of(rows, layouts), encode_fitting(validation, layouts)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=0.0)

    def loss_of(row) -> tuple[torch.Tensor, int]:
        ids, mask = torch.tensor([row.tokens]), torch.tensor(row.action_mask)[1:].bool()
        logits = network(input_ids=ids).logits[0, :-1][mask, : tokenizer.size]
        return F.cross_entropy(logits, ids[0, 1:][mask], reduction="sum"), int(mask.sum())

    output.write_text("")
    for step in range(1, STEPS + 1):
        start = time.process_time()
        (chosen,) = rows_of_step(step, len(trained), 1, config.common.seed, None)
        loss, count = loss_of(trained[chosen])
        (loss / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        shape = config.optimizer.warmup, config.optimizer.min_learning_rate, config.optimizer.learning_rate_schedule
        optimizer.param_groups[0]["lr"] = RATE * optim.rate_share(step, STEPS, *shape)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        record = {"step": step, "loss": loss.item() / count, "grad_norm": float(norm)}
        record["seconds"] = round(time.process_time() - start, 2)
        if step == STEPS:
            network.eval()
            with torch.no_grad():
                found = [loss_of(row) for row in held_out]
            record["eval_loss"] = sum(x.item() for x, _ in found) / sum(n for _, n in found)
        with open(output, "a") as file:
            file.write(json.dumps(record) + "\n")


def compare(run: Path, other: Path, output: Path) -> None:
    """Writes the mean losses of both and how far they are from each other."""
    ours, theirs = metrics.read(run / run_files.METRICS), metrics.read(other)
    assert len(ours) == len(theirs) == STEPS, (len(ours), len(theirs))

    def mean(found: list[dict], first: int) -> float:
        return sum(record["loss"] for record in found[first:]) / (STEPS - first)

    pairs = {"mean_loss": (mean(ours, 0), mean(theirs, 0)), "mean_loss_last_50": (mean(ours, 150), mean(theirs, 150))}
    pairs["eval_loss"] = ours[-1]["eval_loss"], theirs[-1]["eval_loss"]
    result = {name: {"r3lite": a, "adamw_fp32": b, "off_percent": 100 * (a - b) / b} for name, (a, b) in pairs.items()}
    about = records.provenance(Precision(torch.bfloat16, torch.device("cpu")))
    result = {**about, **result, "losses": [[a["loss"], b["loss"]] for a, b in zip(ours, theirs, strict=True)]}
    output.write_text(json.dumps(result, indent=1) + "\n")
    print({name: value for name, value in result.items() if name in pairs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--adamw", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.adamw:
        adamw(given.model, given.data, given.adamw)
    else:
        compare(*given.compare, given.output)


if __name__ == "__main__":
    main()
