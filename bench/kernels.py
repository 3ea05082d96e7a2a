"""Kernels, bytes, copies and waits of r3lite's work on a card, counted by the simulated device; and predicted times.

    python -m bench.kernels --models DIR                 # all, in fp32; JSON and tables under bench/results
    python -m bench.kernels --models DIR --dtype bf16    # fp16 on a card moves as many bytes
    python -m bench.kernels --models DIR --only decode   # some of it

Counts depend on shapes alone, so models have random weights and few layers: what one with two layers does more than one
with one layer, each layer does; what that one does more than a layer is done outside the layers. The figures of the
whole model follow from its number of layers. Data lie in the host's memory (bench/simulated_cuda.py). Everywhere an
adapter (r=8, all projections) is on, no layer is recomputed, and r3lite's loss takes 128 rows at a time. Its decoding
step is a graph, which the host launches as one; transformers launches each kernel.

SFT's `logit_passes` are the bytes moved outside the layers, in tensors of all tokens' fp32 logits; in
`passes_without_head` those of the head's weights, which the loss's two products read, are left out. `bytes_a_weight`
are the bytes that a layer moves for each of its weights.

The roofline is the least time that the counts allow on a card of r3lite/devices/cards.py: what its memory or its
products take, whichever is longer, and the host's launches. It is predicted, not measured: it takes the makers' peaks,
and kernels in a graph to follow each other without delay.
"""

import argparse
import contextlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch

from bench import contests, options, peers, records
from bench.contest import OURS
from bench.contests import PROMPT, RL_EPISODES, RL_NEW, RL_PROMPT, Ours
from bench.full_length import full_prompts
from bench.simulated_cuda import SimulatedCuda
from bench.simulation.counts import Counts
from r3lite.devices.cards import Speeds, card
from r3lite.devices.precision import DTYPES, Precision
from r3lite.files import write_json
from r3lite.grant import Memory
from r3lite.memory.planner import linears
from r3lite.models.qwen2 import Qwen2, Qwen2Config
from r3lite.models.qwen2_config import config_record, read_config
from r3lite.models.tensor_files import write_tensors
from r3lite.models.weights import VERBATIM, resolve_folder
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rollout.engine import Engine

BATCHES, STEPS = (1, 8, 32), 3  # rows and steps of decoding
ROWS = (512, 2048)  # tokens of a row of SFT
KINDS = ("decode", "sft", "grpo", "nf4")  # prefill comes with decode
SIZES = ("0.5B", "1.5B", "3B")  # of NF4; the rest is counted at the first
MEMORY = Memory()
PEFT = "transformers + peft"
ROOM = 1 << 40  # bytes of the device: nothing is to run out
SHOWN = ("GTX 1650", "RTX 3050 Laptop", "RTX 4060 Laptop")  # cards of the roofline
FIGURES = ("kernels", "launches", "moved", "operations", "copies", "waits")
COUNTED = records.Bench(
    "kernels",
    "Kernels and bytes",
    keys=("work", "model", "contestant"),
    figures=("kernels_a_layer", "kernels_outside", "mb_a_layer", "mb_outside", "launches", "copies", "waits", *SHOWN),
)

Figures = dict[str, int]
Counted = Iterator[tuple[str, Counts]]  # kinds of work by name, and what they did


def figures(counts: Counts) -> Figures:
    return {
        "kernels": counts.kernels,
        "launches": counts.launches,
        "moved": counts.read + counts.written,  # bytes
        "operations": counts.operations,
        "copies": counts.uploads + counts.downloads,
        "waits": counts.waits.total(),
    }


@dataclass(frozen=True)
class Row:
    """One kind of work by one contestant."""

    work: str
    contestant: str
    layer: Figures  # of each layer
    outside: Figures  # the layers

    @staticmethod
    def of(work: str, contestant: str, one: Figures, two: Figures) -> "Row":
        """From what models of one layer and of two do."""
        layer = {name: two[name] - one[name] for name in FIGURES}
        return Row(work, contestant, layer, {name: one[name] - layer[name] for name in FIGURES})

    def whole(self, layers: int) -> Figures:
        return {name: self.outside[name] + layers * self.layer[name] for name in FIGURES}

    def record(self, size: str, config: Qwen2Config, vocabulary: int, itemsize: int) -> dict:
        """A row of the table of counts; the last columns are those of SFT and of NF4 alone."""
        whole = self.whole(config.num_hidden_layers)
        found = {
            "work": self.work,
            "model": size,
            "contestant": self.contestant,
            "kernels_a_layer": self.layer["kernels"],
            "kernels_outside": self.outside["kernels"],
            "mb_a_layer": round(self.layer["moved"] / 1e6, 1),
            "mb_outside": round(self.outside["moved"] / 1e6, 1),
            **{name: whole[name] for name in ("kernels", "launches", "copies", "waits")},
        }
        for tokens in (n for n in ROWS if self.work == sft_of(n)):
            chunk = MEMORY.loss_chunk if self.contestant == OURS else tokens
            head = 2 * -(-(tokens - 1) // chunk) * vocabulary * config.hidden_size * itemsize
            logits = vocabulary * tokens * 4
            found["logit_passes"] = round(self.outside["moved"] / logits, 1)
            found["passes_without_head"] = round((self.outside["moved"] - head) / logits, 1)
        if self.work == decode_of(1, nf4=True):
            weights = sum(out * into for out, into in linears(config).values())
            found["bytes_a_weight"] = round(self.layer["moved"] / weights, 2)
        return found

    def predicted(self, size: str, layers: int, cards: Iterable[Speeds], dtype: str) -> dict:
        """A row of the roofline: milliseconds on each card."""
        named = {"work": self.work, "model": size, "contestant": self.contestant}
        times = {f"{c.name}, ms": float(f"{1000 * least_seconds(self.whole(layers), c, dtype):.3g}") for c in cards}
        return named | times


def least_seconds(work: Figures, speeds: Speeds, dtype: str) -> float:
    """What the memory or the products of a card take at the least, and the launches. bf16 counts as 16 bits."""
    flops = speeds.flops["fp32" if dtype == "fp32" else "fp16"]
    return max(work["moved"] / speeds.bandwidth, work["operations"] / flops) + work["launches"] * speeds.launch


def decode_of(rows: int, nf4: bool = False) -> str:
    return f"decode{' in NF4' if nf4 else ''}, {rows} {'row' if rows == 1 else 'rows'}"


def sft_of(tokens: int) -> str:
    return f"SFT of {tokens:,} tokens"


PREFILL = f"prefill of {PROMPT} tokens, first token"


def counted(device: SimulatedCuda, work: Callable[[], object]) -> Counts:
    before = device.so_far()
    work()
    return device.so_far() - before


@contextlib.contextmanager
def calls_of_engine(device: SimulatedCuda) -> Iterator[dict[str, list[Counts]]]:
    """What each prefill and each decoding step within the block does; a prefill of nothing is left out."""
    calls: dict[str, list[Counts]] = defaultdict(list)

    def watched(name: str) -> Callable:
        method = getattr(Engine, name)

        def call(*arguments) -> None:
            found = counted(device, lambda: method(*arguments))
            if found.kernels:
                calls[name].append(found)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("_prefill", "_decode"):
            stack.enter_context(mock.patch.object(Engine, name, watched(name)))
        yield calls


def decoding(device: SimulatedCuda, model: Ours, batches: Iterable[int], nf4: bool = False) -> Counted:
    """A step in which nothing is captured any more; of one row also its prompt."""
    for batch in batches:
        with calls_of_engine(device) as calls:
            model.decode(batch, STEPS)()
        step = calls["_decode"][-1]
        if batch == 1 and not nf4:
            yield PREFILL, calls["_prefill"][0] + step
        yield decode_of(batch, nf4), step


def of_r3lite(device: SimulatedCuda, folder: str, precision: Precision, kinds: Iterable[str], new: int) -> Counted:
    """What r3lite does; `new` are the tokens that a round of GRPO samples in each episode."""
    if "decode" in kinds:
        yield from decoding(device, Ours(folder, precision), BATCHES)
    if "sft" in kinds:
        model = Ours(folder, precision)
        for tokens in ROWS:
            work = model.sft(tokens, memory=MEMORY)
            work()  # makes the optimizer's moments
            yield sft_of(tokens), counted(device, work)
    if "grpo" in kinds:
        names = ("recompute_layers", "loss_chunk", "mlp_tile", "micro_batch_tokens")
        flags = " ".join(f"--{name.replace('_', '-')} {getattr(MEMORY, name)}" for name in names)
        play = contests.rl_round(folder, precision, "grpo", RL_EPISODES, RL_PROMPT, new, flags=flags)
        play(2)
        yield f"GRPO round of {RL_EPISODES} x ({RL_PROMPT} + {new}) tokens", counted(device, play)
    if "nf4" in kinds:
        yield from decoding(device, Ours(folder, precision, quantize=True), (1,), nf4=True)


def of_peft(device: SimulatedCuda, folder: str, precision: Precision, kinds: Iterable[str], new: int) -> Counted:
    """What transformers and peft do of the same: a step of decoding is what one more token takes."""
    for batch in BATCHES if "decode" in kinds else ():
        prompts, found = full_prompts(batch, PROMPT), []
        for tokens in (1, STEPS - 1, STEPS):
            found.append(counted(device, peers.generate(folder, prompts, tokens, precision)))
        if batch == 1:
            yield PREFILL, found[0]
        yield decode_of(batch), found[2] - found[1]
    for tokens in ROWS if "sft" in kinds else ():
        _, keeping = peers.sft(folder, tokens, precision)
        keeping()
        yield sft_of(tokens), counted(device, keeping)


CONTESTANTS = {OURS: of_r3lite, PEFT: of_peft}


def small_folder(source: Path, layers: int, where: Path) -> str:
    """Makes a model folder with the sizes and the tokenizer of another, so many layers and random weights."""
    folder = where / f"{source.name}, {layers} layers"
    folder.mkdir()
    for name in VERBATIM:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    changes = {"num_hidden_layers": layers, "max_window_layers": layers, "layer_types": ["full_attention"] * layers}
    kept = config_record(source).values
    write_json(folder / "config.json", kept | {name: value for name, value in changes.items() if name in kept})
    model = Qwen2(read_config(folder)).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    write_tensors(folder / "model.safetensors", dict(model.named_parameters()))
    return str(folder)


def measure(folders: list[str], dtype: str, contestant: str, kinds: Iterable[str], new: int) -> list[Row]:
    """What a contestant does, from folders of models with one layer and with two."""
    precision, found = Precision(DTYPES[dtype], torch.device("cuda")), []
    for folder in folders:
        with SimulatedCuda(ROOM, ROOM, bf16=True) as device:
            work = CONTESTANTS[contestant](device, folder, precision, kinds, new)
            found.append({name: figures(counts) for name, counts in work})
    one, two = found
    return [Row.of(name, contestant, one[name], two[name]) for name in one]


def rows_of(flags: argparse.Namespace, dtype: str) -> Iterator[tuple[list[Row], str, Qwen2Config, int]]:
    """The rows of each contestant at each size, with the size, the whole model's config and its vocabulary."""
    for size in SIZES:
        kinds = [kind for kind in flags.only if kind == "nf4" or size == SIZES[0]]
        source = resolve_folder(options.folder(flags, size)) if kinds else None
        with tempfile.TemporaryDirectory() as where:
            folders = [small_folder(source, layers, Path(where)) for layers in (1, 2)] if source else []
            for contestant in CONTESTANTS if source else ():
                if contestant == OURS or find_spec("peft"):
                    rows = measure(folders, dtype, contestant, kinds, flags.new)
                    yield rows, size, read_config(source), Tokenizer.load(source).size


def main() -> None:
    parser = options.parser(__doc__)
    parser.set_defaults(device="cpu", dtype="fp32")
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--new", type=int, default=RL_NEW, help="tokens sampled in an episode of GRPO")
    flags = parser.parse_args()
    precision = options.precision(flags)
    dtype, cards = records.name_of(precision.dtype), [known for name in SHOWN if (known := card(name))]
    counts, roofline = (
        {"section": section, **records.provenance(precision), "note": note, "records": []}
        for section, note in (("counts", ""), ("roofline", "Predicted, not measured."))
    )
    print(f"{records.conditions(counts)}\n", flush=True)
    for rows, size, config, vocabulary in rows_of(flags, dtype):
        new = [row.record(size, config, vocabulary, precision.dtype.itemsize) for row in rows]
        counts["records"] += new
        roofline["records"] += [row.predicted(size, config.num_hidden_layers, cards, dtype) for row in rows]
        print(records.table(new), flush=True)
        for run in (counts, roofline):
            records.keep(flags.results, None, COUNTED, run)
    print(f"\nPredicted:\n\n{records.table(roofline['records'])}")


if __name__ == "__main__":
    main()
