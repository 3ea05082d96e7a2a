"""The page bench/results/kernels.md: the counts of bench.kernels, its goals, and predicted times on cards."""

from bench import records
from bench.contest import CAPTURED, OURS
from bench.counted import MODEL, RECOMPUTED
from r3lite.memory.duration import in_words

PAGE = """\
# Kernels and bytes

What `python -m bench.kernels` counted: on a card that is simulated on a CPU (`bench/stress/simulated_cuda.py`), by
models of the published widths with random weights, a vocabulary of 151,936 (a tokenizer of 151,665) and a LoRA adapter
(r=8, all projections) that is on. **No figure here is of a real card, and no time was measured: times are predicted.**
These are the newest runs; all are in `kernels-simulated.json`.

What a layer takes is what a model of two layers takes more than one of one; the rest of that one is "outside" (the
first layer makes no gradient of its input, which is subtracted there). A kernel is an operator that is no view and no
allocation; a norm of r3lite's is one, as on CUDA. How many kernels a library's operator launches (attention's backward
pass, an optimizer's step over all tensors) is not seen: each is one, for all contestants. Bytes are those that kernels
read and write, each operand once a kernel, so a cache that holds what the kernel before has written makes them fewer on
a card. MB are 10^6 bytes. Launches are the host's, of the whole model (24, 28 or 36 layers): a CUDA graph, which
r3lite decodes by, is one with all its kernels. Waits are of the host for the card, and copies between the two, in all.

- Decoding is a step of r3lite's rollout engine after 128 tokens, from ids on the host to sampled ids there, and a step
  of `generate` with a dynamic cache; "{model}" ends at the last norm and runs without a graph.
- Prefill fills a cache from one prompt; transformers also makes the logits of its last token.
- SFT is an optimizer step on one row with AdamW, on r3lite's side one of its command's, which also clips; with
  "{again}" all layers run again in the backward pass, as they do with activation checkpointing. "{graph}" is
  `sft --cuda-graphs`.
- transformers attends by `sdpa`, its default. peft keeps its adapters in fp32, its default, and casts x to it.
- A GRPO round samples 8 episodes of one question, scores them by the base and takes an optimizer step on them.
"""
REACH = """\
"Passes over the logits" are bytes outside the layers / (151,936 x tokens x 4), without what products read of the head's
weight, which is shown beside it ("the head's weight"): r3lite multiplies by the head for 128 rows at a time, so that
few logits exist at once, and reads it twice for each. All else outside is counted as if it were logits: the embedding,
the last norm, the optimizer. "Bytes a weight" are what NF4 adds to a layer's bytes, for each weight of its products,
and the weight as the product reads it; with `--compile`, what Inductor counts of the one kernel that it makes of the
dequantization, compiled for a CPU, and the same weight read.
"""
PREDICTED = """\
Predicted, from the peaks of data sheets: products take the time of their bytes or of their operations, whichever is
longer; then come the bytes of all other kernels, attention's operations, and 5 microseconds for each
kernel, in graphs too. Bytes are those of the tables above, so caches save none of them; that makes a time longer, the
peaks make it shorter. Bandwidth and operations are the peaks of data sheets, whose sources `docs/cards.md` names. It
is told whether or not the work fits into the card's memory."""
HALF = " Cards without bf16 run fp16, with as many bytes; training then has a few kernels more, which scale the loss."
BY_OPERATOR = (
    "decoding, batch 8",
    "prefill, 512 tokens",
    "SFT, 512 tokens",
    "decoding, batch 1, NF4",
)  # works that have a table of operators
COLUMNS = ("kernels_layer", "mb_layer", "kernels_outside", "mb_outside")  # the figures of an operator, in this order
TOP_OPERATORS = 6  # that are named if a goal is missed
SIZE = "0.5B"  # model whose operators are shown
# The goals: name in the table, first words of the name of the work (see `is_of`), contestant, column, largest value.
GOALS = (
    ("launches a layer, decoding", "decoding, batch", OURS, "kernels_layer", 24),
    ("launches outside the layers, decoding, up to the last norm", "decoding, batch", MODEL, "kernels_outside", 30),
    ("the same with head and sampling", "decoding, batch", OURS, "kernels_outside", 30),
    ("launches a layer, SFT, forward and backward", "SFT", OURS, "kernels_layer", 90),
    ("launches of the whole model, SFT as a CUDA graph", "SFT" + CAPTURED, OURS, "launches", 192),
    ("passes over the logits, SFT", "SFT", OURS, "passes", 8),
    ("launches a layer, decoding in NF4, each size", "NF4", OURS, "kernels_layer", 40),
    ("bytes a weight and product, decoding in NF4", "NF4", OURS, "bytes_a_weight", 6),
    ("the same with `--compile`", "NF4", OURS, "bytes_a_weight_compiled", 6),
)


def page(runs: list[dict]) -> str:
    """Returns the page: the newest run of each kind of work, by precision."""
    newest = {(run["precision"], run["section"]): run for run in runs}
    parts = [PAGE.format(model=MODEL, again=RECOMPUTED.removeprefix(", "), graph=CAPTURED.removeprefix(", "))]
    for precision in dict.fromkeys(precision for precision, _ in newest):
        precision_runs = [run for (name, _), run in newest.items() if name == precision]
        all_rows = [record for run in precision_runs for record in run["records"]]
        # Decoding at batch 1 is counted by two kinds of work; one row of it is shown.
        rows = list({(row["work"], row["size"], row["by"]): row for row in all_rows}.values())
        parts += [f"## {precision}", *dict.fromkeys(map(records.conditions, precision_runs))]
        parts += ["### What was to be reached", records.table(reached(rows)), REACH]
        parts += ["### Counts", counts(rows), "### Predicted times on cards"]
        parts += [PREDICTED + (HALF if precision != "fp32" else ""), times(rows), "### r3lite by operator"]
        for row in rows:
            if row["work"] in BY_OPERATOR and row["by"] == OURS and row["size"] == SIZE:
                parts += [f"{row['work']}, {row['size']}:", by_operator(row)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def is_of(record: dict, words: str) -> bool:
    """Returns whether a record is of the work that a goal names by its first words.

    Work in NF4 or as a CUDA graph is meant by names with that ending only. Work with recomputed layers is never meant.
    """
    for ending in ("NF4", CAPTURED):
        if words.endswith(ending) or record["work"].endswith(ending):
            return words.endswith(ending) and record["work"].endswith(ending)
    return record["work"].startswith(words) and not record["work"].endswith(RECOMPUTED)


def reached(rows: list[dict]) -> list[dict]:
    """Returns a row for each goal: its limit, the counted values of all works and sizes, and whether it is met.

    If it is not met, the row names the operators with the largest shares of the worst value.
    """
    goal_rows = []
    for title, words, by, column, limit in GOALS:
        goal_records = [row for row in rows if row["by"] == by and column in row and is_of(row, words)]
        if goal_records:
            worst = max(goal_records, key=lambda row: row[column])
            met = worst[column] <= limit
            values = " / ".join(map(str, dict.fromkeys(row[column] for row in goal_records)))
            goal_rows.append({"what": title, "at most": limit, "counted": values, "met": "yes" if met else "no"})
            goal_rows[-1]["of that"] = None if met else consists_of(worst, column)
    return goal_rows


def consists_of(row: dict, column: str) -> str:
    """Returns the TOP_OPERATORS operators with the largest shares of a column.

    Operators have the figures of COLUMNS only; for any other column their shares of a layer's MB are shown.
    """
    index = COLUMNS.index(column if column in COLUMNS else "mb_layer")
    pairs = [(figures[index], name) for name, figures in row["operators"].items()]
    top = sorted(pairs, reverse=True)[:TOP_OPERATORS]
    unit = " MB" if COLUMNS[index] == "mb_layer" else ""
    return ", ".join(f"{figure:g}{unit} {operator(name)}" for figure, name in top)


def operator(name: str) -> str:
    """Returns the name of an operator as the tables show it."""
    return f"`{name.removeprefix('r3lite.').removesuffix('_for_cpu')}`"


def counts(rows: list[dict]) -> str:
    """Returns the table of counts."""
    return records.table(
        [
            {
                "work": f"{row['work']}, {row['size']}",
                "by": row["by"],
                "kernels a layer": row["kernels_layer"],
                "outside": row["kernels_outside"],
                "launches": row["launches"],
                "MB a layer": f"{row['mb_layer']:,.1f}",
                "MB outside": f"{row['mb_outside']:,.1f}",
                "waits": row["waits"],
                "copies": row["copies"],
                "passes over the logits": row.get("passes"),
                "the head's weight": row.get("head_passes"),
                "bytes a weight": row.get("bytes_a_weight"),
            }
            for row in rows
        ]
    )


def times(rows: list[dict]) -> str:
    """Returns the table of predicted times, without steps that end at the last norm: no run does these alone."""
    whole_steps = [row for row in rows if row["by"] != MODEL]
    return records.table(
        [
            {"work": f"{row['work']}, {row['size']}", "by": row["by"]}
            | {card: in_words(seconds) for card, seconds in row["seconds"].items()}
            for row in whole_steps
        ]
    )


def by_operator(row: dict) -> str:
    """Returns the table of a record's operators; those that move the most bytes come first."""
    titles = ("kernels a layer", "MB a layer", "kernels outside", "MB outside")
    return records.table(
        [
            {"operator": operator(name)} | dict(zip(titles, figures, strict=True))
            for name, figures in row["operators"].items()
        ]
    )
