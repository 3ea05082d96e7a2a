"""Kernels that a card is asked to launch and bytes that it is asked to move, by r3lite and by transformers + peft.

    python -m bench.kernels                        # in bf16; JSON and a page under bench/results
    python -m bench.kernels --dtype fp32 --only decode sft nf4

Everything is counted on the simulated card (bench/stress/simulated_cuda.py) with the published widths, one and two
layers and random weights; no model is needed. It takes minutes of a core, and 5 GB of the host's memory for SFT of
2,048 tokens: all logits of transformers exist at once. Then each piece of work is predicted for the cards of
r3lite/devices/cards.py, by the rule of r3lite/memory/duration.py. bench/counted.py says what work is done,
bench/kernels_page.py what the page tells.
"""

import argparse
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench import counted, kernels_page, records
from bench.by_layer import Split, moved, on_cards, split
from bench.contest import OURS
from bench.counted import Work
from bench.options import RESULTS
from bench.shapes import SHAPES
from r3lite.core.files import write_text
from r3lite.devices.precision import DTYPES, Precision
from r3lite.memory.known_models import QWEN_TOKENS
from r3lite.memory.layer_tensors import layer_tensors
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.compiled import missing_compiler
from r3lite.models.nf4 import code_points, dense_blocks, quantize
from r3lite.models.stacks import stacks

BATCHES, PROMPT, ROW, LONG_ROW = (1, 8, 32), 512, 512, 2048
KINDS: dict[str, tuple[Callable, tuple[str, ...]]] = {  # what counts the work, and the sizes of the model
    "decode": (partial(counted.decode, batches=BATCHES), ("0.5B",)),
    "prefill": (partial(counted.prefill, tokens=PROMPT), ("0.5B",)),
    "sft": (partial(counted.training, tokens=ROW), ("0.5B",)),
    "nf4": (partial(counted.decode_nf4, batch=1), ("0.5B", "1.5B", "3B")),
    "grpo": (counted.grpo, ("0.5B",)),
    "sft-long": (partial(counted.training, tokens=LONG_ROW), ("0.5B",)),
}
MB = 1e6


def weights_of(shape: ModelConfig) -> int:
    """Weights of a layer that can be in NF4: those of its linear layers."""
    return sum(out * into for out, into in layer_tensors(shape, taps=0).linears.values())


def record(piece: Work, found: Split, size: str, dtype: torch.dtype) -> dict:
    """A row of the results."""
    layer, outside, layers = found.layer, found.outside, SHAPES[size].num_hidden_layers
    row = {"size": size, "work": piece.name, "by": piece.by}
    for name, counts in (("layer", layer), ("outside", outside)):
        row |= {f"kernels_{name}": counts.kernels, f"mb_{name}": round(moved(counts) / MB, 3)}
    row["launches"] = outside.launches + layers * layer.launches
    row["waits"] = outside.waits.total() + layers * layer.waits.total()
    row["copies"] = outside.uploads + outside.downloads + layers * (layer.uploads + layer.downloads)
    if piece.logits:
        row["passes"] = round((moved(outside) - piece.head) / piece.logits, 2)
        row["head_passes"] = round(piece.head / piece.logits, 2)
    return row | {"seconds": on_cards(found, layers, dtype), "operators": operators(found) if piece.by == OURS else {}}


def operators(found: Split) -> dict[str, list[float]]:
    """By operator, those that move most first: kernels and MB of a layer, and outside."""
    both = found.layer.moved + found.outside.moved
    names = [name for name, _ in both.most_common()]
    names += [n for n in {**found.layer.operators, **found.outside.operators} if n not in both]
    return {
        name: [x for c in (found.layer, found.outside) for x in (c.operators[name], round(c.moved[name] / MB, 3))]
        for name in names
    }


def measure(kind: str, size: str, dtype: torch.dtype) -> list[dict]:
    """The records of one kind of work on a model of one size."""
    work, _ = KINDS[kind]
    found = split(work, SHAPES[size], QWEN_TOKENS, dtype)
    rows = [record(piece, counts, size, dtype) for piece, counts in found.items()]
    if kind == "nf4":
        rows[0]["bytes_a_weight"] = round(bytes_a_weight(*found.values(), SHAPES[size], dtype), 2)
        if reason := missing_compiler(torch.device("cpu")):
            print(f"not counted with --compile: {reason}", flush=True)
        else:
            rows[0]["bytes_a_weight_compiled"] = round(compiled_bytes_a_weight(SHAPES[size], dtype), 2)
    return rows


def bytes_a_weight(nf4: Split, dense: Split, shape: ModelConfig, dtype: torch.dtype) -> float:
    """Bytes moved for each weight of a layer and product: what NF4 adds, and the weight that the product reads."""
    return (moved(nf4.layer) - moved(dense.layer)) / weights_of(shape) + dtype.itemsize


def compiled_bytes_a_weight(shape: ModelConfig, dtype: torch.dtype) -> float:
    """The same with --compile: what the kernels that make the weights dense move, and the weight that a product reads.

    As Inductor, which writes these kernels, counts what each of them reads and writes. They are compiled for the CPU,
    because a card's compiler needs a card.
    """
    from torch._inductor import compile_fx, config, metrics

    sizes, total = layer_tensors(shape, taps=0).linears, 0
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # or nothing is counted
    for stack in stacks(sizes):
        weight = quantize(torch.randn(sum(sizes[name][0] for name in stack), sizes[stack[0]][1]))
        torch._dynamo.reset()
        metrics.reset()
        with torch.no_grad(), config.patch(force_disable_caches=True):
            torch.compile(dense_blocks, fullgraph=True)(weight, code_points(weight.device), dtype)
        assert metrics.generated_kernel_count == 1, "NF4 weights are made dense by one kernel"
        total += metrics.num_bytes_accessed
    return total / weights_of(shape) + dtype.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to which this run is added")
    flags = parser.parse_args()
    dtype = DTYPES[flags.dtype]
    counted.import_peers()
    for kind in flags.only:
        found: list[dict] = []
        provenance = records.provenance(Precision(dtype, torch.device("cpu")))
        run = {"section": kind, **provenance, "note": "", "records": found}
        for size in KINDS[kind][1]:
            new = measure(kind, size, dtype)
            print(kernels_page.counts(new), flush=True)
            found += new
            runs = records.add(flags.results / "kernels-simulated.json", run)
            write_text(flags.results / "kernels.md", kernels_page.page(runs))


if __name__ == "__main__":
    main()
