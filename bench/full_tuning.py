"""Compares the losses of full fine-tuning in bf16 with 8-bit moments (`sft --no-lora`) and of AdamW in fp32.

    python -m bench.full_tuning --model FOLDER --data ROWS.jsonl --adamw A.jsonl    # transformers, all in fp32
    python -m bench.full_tuning --model FOLDER --data ROWS.jsonl --compare RUN A.jsonl --output RESULT.json

The first command trains with AdamW in fp32. The second compares its log with RUN, the folder of a run of
`sft --no-lora` with the flags that the function `flags` returns. Both train on the same rows in the same order. AdamW
clips all gradients together to a norm of 1, as is usual.
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

STEPS = 200
TOKENS = 256  # of a row at most
DOCUMENT_TOKENS = 24  # of a document at most
RATE = 2e-5  # learning rate
LAST_STEPS = 50  # whose mean loss is compared, too
MAX_NORM = 1.0  # to which AdamW clips the gradients


def flags(model: str, data: str, prompts: Path) -> list[str]:
    """Returns the flags of the compared run, without --no-lora, --dtype and --output.

    Writes two short prompts into the folder `prompts`, because long ones would not fit into the short rows.
    """
    init = prompts / "init.txt"
    step = prompts / "step.txt"
    init.write_text("{question}")
    step.write_text("{documents}")
    words = ["--model", model, "--data", data, "--max-steps", str(STEPS), "--max-length", str(TOKENS)]
    words += ["--max-document-tokens", str(DOCUMENT_TOKENS)]
    words += ["--batch-size", "1", "--gradient-accumulation", "1", "--learning-rate", str(RATE)]
    words += ["--init-prompt", str(init), "--step-prompt", str(step)]
    return [*words, "--validation-rows", "24", "--validate-every", str(STEPS), "--save-every", "0"]


def adamw(model: str, data: str, output: Path) -> None:
    """Trains with AdamW in fp32, and writes a line of JSON for each step."""
    from transformers import AutoModelForCausalLM

    config = resolve("sft", SftConfig(), flags(model, data, output.parent))
    protocols, rows, validation = read_data(config)
    tokenizer = Tokenizer.load(resolve_folder(model), "auto")
    lengths = LengthSettings(max_length=TOKENS, max_document_tokens=config.sft.max_document_tokens)
    layouts = {name: Layout(tokenizer, protocol, lengths) for name, protocol in protocols.items()}
    training_rows = encode_rows_of(rows, layouts)
    held_out = encode_fitting(validation, layouts)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=0.0)

    def loss_of(row) -> tuple[torch.Tensor, int]:
        """Returns the sum of the losses of a row's trained tokens, and their number."""
        ids = torch.tensor([row.tokens])
        mask = torch.tensor(row.action_mask)[1:].bool()
        logits = network(input_ids=ids).logits[0, :-1][mask, : tokenizer.size]
        return F.cross_entropy(logits, ids[0, 1:][mask], reduction="sum"), int(mask.sum())

    output.write_text("")
    for step in range(1, STEPS + 1):
        start = time.process_time()
        (index,) = rows_of_step(step, len(training_rows), per_step=1, seed=config.common.seed, row_limit=None)
        loss, count = loss_of(training_rows[index])
        (loss / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM)
        share = optim.rate_share(
            step,
            STEPS,
            warmup=config.optimizer.warmup,
            floor=config.optimizer.min_learning_rate,
            schedule=config.optimizer.learning_rate_schedule,
        )
        optimizer.param_groups[0]["lr"] = RATE * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        record = {"step": step, "loss": loss.item() / count, "grad_norm": float(norm)}
        record["seconds"] = round(time.process_time() - start, 2)
        if step == STEPS:
            network.eval()
            with torch.no_grad():
                losses = [loss_of(row) for row in held_out]
            record["eval_loss"] = sum(total.item() for total, _ in losses) / sum(tokens for _, tokens in losses)
        with open(output, "a") as file:
            file.write(json.dumps(record) + "\n")


def compare(run: Path, adamw_log: Path, output: Path) -> None:
    """Writes the mean losses of r3lite's run and of AdamW's log, and their differences in percent of AdamW's."""
    ours = metrics.read(run / run_files.METRICS)
    theirs = metrics.read(adamw_log)
    assert len(ours) == len(theirs) == STEPS, (len(ours), len(theirs))

    def mean(step_records: list[dict], first: int) -> float:
        """Returns the mean loss of the steps from index `first` on."""
        return sum(record["loss"] for record in step_records[first:]) / (STEPS - first)

    last = STEPS - LAST_STEPS
    pairs = {"mean_loss": (mean(ours, 0), mean(theirs, 0))}
    pairs[f"mean_loss_last_{LAST_STEPS}"] = (mean(ours, last), mean(theirs, last))
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
    options = parser.parse_args()
    if options.adamw:
        adamw(options.model, options.data, options.adamw)
    else:
        run, adamw_log = options.compare
        compare(run, adamw_log, options.output)


if __name__ == "__main__":
    main()
