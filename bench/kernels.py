"""Counts the kernels that a card runs and the bytes that they move, for r3lite and for transformers + peft.

    python -m bench.kernels                        # in bf16; JSON and a page under bench/results
    python -m bench.kernels --dtype fp32 --only decode sft nf4

All counts are of a simulated card (bench/stress/simulated_cuda.py) and of models with the published widths, one and two
layers and random weights, so no model files are needed. Counting takes minutes on one core. SFT of 2,048 tokens needs
5 GB of host memory, because transformers holds all logits at once. The counts then give predicted times on the cards of
r3lite/devices/cards.py (bench/by_layer.py). bench/counted.py does the work, bench/kernels_page.py makes the page.
"""

import argparse
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench import counted, kernels_page, records
from bench.by_layer import Split, bytes_moved, on_cards, split
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

BATCHES = (1, 8, 32)  # rows of decoding
PROMPT = 512  # tokens of prefill
ROW = 512  # tokens of an SFT row
LONG_ROW = 2048  # tokens of a long SFT row
# For each kind of work the function that does and counts it, and the sizes of the models that it is counted for.
KINDS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "decode": (partial(counted.decode, batches=BATCHES), ("0.5B",)),
    "prefill": (partial(counted.prefill, tokens=PROMPT), ("0.5B",)),
    "sft": (partial(counted.training, tokens=ROW), ("0.5B",)),
    "nf4": (partial(counted.decode_nf4, batch=1), ("0.5B", "1.5B", "3B")),
    "grpo": (counted.grpo, ("0.5B",)),
    "sft-long": (partial(counted.training, tokens=LONG_ROW), ("0.5B",)),
}
MB = 1e6


def weights_of(shape: ModelConfig) -> int:
    """Returns the number of a layer's weights that can be in NF4: those of its linear projections."""
    return sum(outputs * inputs for outputs, inputs in layer_tensors(shape, taps=0).linears.values())


def record(piece: Work, split: Split, size: str, dtype: torch.dtype) -> dict:
    """Returns the record of a piece of work by a model of a size, from its split counts.

    launches, waits and copies are of the whole model. passes are the bytes outside the layers, without those of the
    head's weight, as a multiple of the bytes of the logits; head_passes are those of the head's weight.
    """
    layer = split.layer
    outside = split.outside
    layers = SHAPES[size].num_hidden_layers
    row = {"size": size, "work": piece.name, "by": piece.by}
    for name, counts in (("layer", layer), ("outside", outside)):
        row |= {f"kernels_{name}": counts.kernels, f"mb_{name}": round(bytes_moved(counts) / MB, 3)}
    row["launches"] = outside.launches + layers * layer.launches
    row["waits"] = outside.waits.total() + layers * layer.waits.total()
    row["copies"] = outside.uploads + outside.downloads + layers * (layer.uploads + layer.downloads)
    if piece.logits:
        row["passes"] = round((bytes_moved(outside) - piece.head) / piece.logits, 2)
        row["head_passes"] = round(piece.head / piece.logits, 2)
    row["seconds"] = on_cards(split, layers, dtype)
    row["operators"] = operators(split) if piece.by == OURS else {}
    return row


def operators(split: Split) -> dict[str, list[float]]:
    """Returns the counts of each operator: kernels and MB of a layer, kernels and MB outside the layers.

    The operators that move the most bytes come first.
    """
    layer = split.layer
    outside = split.outside
    moved_bytes = layer.moved + outside.moved
    names = [name for name, _ in moved_bytes.most_common()]
    names += [name for name in {**layer.operators, **outside.operators} if name not in moved_bytes]
    figures = {}
    for name in names:
        figures[name] = []
        for counts in (layer, outside):
            figures[name] += [counts.operators[name], round(counts.moved[name] / MB, 3)]
    return figures


def measure(kind: str, size: str, dtype: torch.dtype) -> list[dict]:
    """Counts one kind of work by a model of one size, and returns a record of each piece of it."""
    work, _ = KINDS[kind]
    splits = split(work, SHAPES[size], vocabulary=QWEN_TOKENS, dtype=dtype)
    rows = [record(piece, counts, size=size, dtype=dtype) for piece, counts in splits.items()]
    if kind == "nf4":
        nf4, dense = splits.values()
        rows[0]["bytes_a_weight"] = round(bytes_a_weight(nf4, dense, shape=SHAPES[size], dtype=dtype), 2)
        if reason := missing_compiler(torch.device("cpu")):
            print(f"not counted with --compile: {reason}", flush=True)
        else:
            rows[0]["bytes_a_weight_compiled"] = round(compiled_bytes_a_weight(SHAPES[size], dtype), 2)
    return rows


def bytes_a_weight(nf4: Split, dense: Split, shape: ModelConfig, dtype: torch.dtype) -> float:
    """Returns the bytes that are moved for each weight of a layer when a product uses it.

    They are the bytes that NF4 adds to a layer with dense weights, and the dense weight that the product reads.
    """
    return (bytes_moved(nf4.layer) - bytes_moved(dense.layer)) / weights_of(shape) + dtype.itemsize


def compiled_bytes_a_weight(shape: ModelConfig, dtype: torch.dtype) -> float:
    """Returns the bytes of `bytes_a_weight` with --compile.

    They are the bytes that the kernels which dequantize the weights move, and those of the dense weight that a product
    reads. Inductor writes these kernels and counts what each reads and writes. They are compiled for the CPU, because a
    card's compiler needs a card.
    """
    from torch._inductor import compile_fx, config, metrics

    sizes = layer_tensors(shape, taps=0).linears  # rows and columns by name
    total = 0
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # at other levels nothing is counted
    for stack in stacks(sizes):
        rows = sum(sizes[name][0] for name in stack)
        columns = sizes[stack[0]][1]
        weight = quantize(torch.randn(rows, columns))
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
        counted_records: list[dict] = []
        provenance = records.provenance(Precision(dtype, torch.device("cpu")))
        run = {"section": kind, **provenance, "note": "", "records": counted_records}
        for size in KINDS[kind][1]:
            size_records = measure(kind, size, dtype)
            print(kernels_page.counts(size_records), flush=True)
            counted_records += size_records
            runs = records.add(flags.results / "kernels-simulated.json", run)
            write_text(flags.results / "kernels.md", kernels_page.page(runs))


if __name__ == "__main__":
    main()
