"""Compares a model with real weights in r3lite and in transformers, in fp32 on the CPU: logits and greedy tokens.

    python -m bench.real_weights FOLDER --questions data/hotpotqa/train_100.json

Each of the first --count questions becomes the prompt of a chat. transformers continues the prompt greedily by up to 64
tokens. Both libraries then compute the logits of the prompt and its continuation. The run is added to
bench/results/real-weights.json.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench import records
from bench.options import RESULTS
from r3lite.devices.precision import Precision
from r3lite.models.causal_lm import CausalLM
from r3lite.models.weights import load_model
from r3lite.protocols.tokenizer import Tokenizer

TOKENS = 64  # the longest continuation


@dataclass
class Comparison:
    """The comparison of one prompt. The names of its fields are keys of the results."""

    difference: float  # the largest absolute difference between two logits
    largest: float  # the largest absolute logit of transformers
    written: int  # tokens of the continuation
    agreeing: int  # those of them that have r3lite's largest logit at their position


@torch.no_grad()
def compare(
    ours: CausalLM,
    theirs: torch.nn.Module,
    tokenizer: Tokenizer,
    prompt: list[int],
) -> Comparison:
    """Continues a prompt greedily with transformers' model `theirs`, and compares its logits with those of `ours`."""
    ids = theirs.generate(
        torch.tensor([prompt]),
        max_new_tokens=TOKENS,
        pad_token_id=tokenizer.pad_id,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=tokenizer.stop_id,
    )
    expected = theirs(ids).logits
    logits = ours.logits(ours(ids))
    greedy = logits[0, len(prompt) - 1 : -1].argmax(-1)
    return Comparison(
        difference=(logits - expected)[..., : tokenizer.size].abs().max().item(),
        largest=expected.abs().max().item(),
        written=len(greedy),
        agreeing=(greedy == ids[0, len(prompt) :]).sum().item(),
    )


def main(arguments: list[str] | None = None) -> None:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=Path, required=True, help="a JSON file of HotpotQA")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS)
    flags = parser.parse_args(arguments)
    run = records.provenance(Precision(torch.float32, torch.device("cpu")))
    ours = load_model(flags.folder, torch.float32, "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(flags.folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.load(flags.folder)
    questions = json.loads(flags.questions.read_text(encoding="utf-8"))[: flags.count]
    prompts = [tokenizer.open_chat(question["question"]) for question in questions]
    run |= {"section": flags.folder.name, "note": f"{TOKENS} tokens after each prompt", "records": []}
    for prompt in prompts:
        comparison = compare(ours=ours, theirs=theirs, tokenizer=tokenizer, prompt=prompt)
        run["records"].append(asdict(comparison))
        print(run["records"][-1], flush=True)
        records.add(flags.results / "real-weights.json", run)


if __name__ == "__main__":
    main()
