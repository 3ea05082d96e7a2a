"""Prints the page docs/cards.md: which runs are predicted to fit on a card of each class, and how fast they are.

    python -m bench.cards > docs/cards.md

Nothing is run: every figure is a prediction of `python -m r3lite.plan --card`. A test fails if the page differs from
what this prints.
"""

from bench import records
from bench.options import HUB
from r3lite import plan
from r3lite.core.errors import R3LiteError
from r3lite.core.invocation import resolve
from r3lite.devices.cards import GIB, LAUNCH, Speeds, card
from r3lite.memory import duration
from r3lite.memory.duration import in_words
from r3lite.memory.plan import Plan
from r3lite.memory.work import Workload

CLASSES = {  # class of cards, and the card that stands for it
    "2 GB": "MX450",
    "4 GB, Turing": "GTX 1650",
    "4 GB, Ampere": "RTX 3050 Laptop",
    "6 GB, Ampere": "RTX 3060 Laptop",
    "8 GB, Ada": "RTX 4060 Laptop",
}
SFT = {tokens: ["--max-length", str(tokens)] for tokens in (1024, 2048)}  # flags by the length of a row
ROUND = ["--algorithm", "ppo", "--adapter", "runs/sft"]
SIZES = ("0.5B", "1.5B")
DEFAULT_BUDGET = 4 * GIB  # the default --vram-budget is at most this
MICROSECONDS = 1e6  # in a second
UNFIT = "does not fit"
PAGE = """\
# Laptop GPUs: what fits, and how fast

**Predicted, not measured.** r3lite has run on an H100 and an H200 only ([figures.md](figures.md#speed)). The times
below are computed from half the peak speeds in data sheets. Expect them to be right within a factor of two.

To predict a run on your GPU: `python -m r3lite.plan --card "GTX 1650"`; an unknown name lists the known ones. On the
GPU itself, leave `--card` out: the GPU's speed is then measured in a second. Once a run has taken two steps, the "ETA"
of its progress line comes from the measured steps instead. For other models see [models.md](models.md).

{tables}

- "NF4": the 4-bit base, chosen only if nothing else fits.
- "recomputed": layers whose activations are recomputed in the backward pass.
- "offload": layer inputs are kept in host memory.
- "at a time": episodes sampled together.

Each GPU stands for its class. SFT is `python -m r3lite.plan --card CARD --model MODEL --max-length 1024` (or `2048`), a
round of PPO is `python -m r3lite.plan --card CARD --model MODEL --algorithm ppo --adapter runs/sft`.

Other settings are the defaults. GPUs with more than 4 GB get a `--vram-budget` of one GiB less than their memory,
because the default budget is at most 4 GiB. All tokens of a row are trained on. A round has 64 episodes of the maximum
length: 4,096 tokens, 1,536 of them sampled. Real episodes are shorter. A round of GRPO, which has no critic, takes as
long.

## Method

A time is the time to read the weights and to compute the matrix products, both at half of the peak speed, and
{launch:g} microseconds per kernel, or {graph:g} in a CUDA graph (`r3lite/memory/duration.py`). Not included: loading,
retrieval on the CPU, offload to host memory, judges, validation and checkpoints. `python -m bench.memory` compares
predicted and measured times ([figures.md](figures.md#memory)). `r3lite/devices/cards.py` has the GPUs' figures with
their sources; `python -m bench.cards` prints this page.
"""


def flags(speeds: Speeds, size: str, run_flags: list[str]) -> list[str]:
    """Returns the flags of `python -m r3lite.plan` for a run on a card.

    A card with more than DEFAULT_BUDGET gets a budget of 1 GiB less than its memory.
    """
    assert speeds.memory
    budget = []
    if speeds.memory > DEFAULT_BUDGET:
        budget = ["--vram-budget", f"{speeds.memory // GIB - 1}GiB"]
    return ["--card", speeds.name, "--model", HUB[size], *run_flags, *budget]


def planned(arguments: list[str]) -> Plan | None:
    """Returns the plan that `python -m r3lite.plan` makes for its flags; None if the run does not fit."""
    is_rl = plan.is_rl(arguments)
    config = plan.PlanRlConfig() if is_rl else plan.PlanSftConfig()
    try:
        return plan.make(resolve("plan", config, arguments, table="ppo" if is_rl else "sft"))
    except R3LiteError:
        return None


def seconds(fitting: Plan, workload: Workload) -> float:
    """Returns the predicted seconds of a step or a round with the memory settings of a plan."""
    predicted = duration.predict(workload, fitting.memory)
    assert predicted
    return predicted.seconds


def settings(fitting: Plan) -> str:
    """Returns the memory settings that a plan had to choose, as words; empty if it needs none."""
    memory = fitting.memory
    layers = fitting.workload.model.num_hidden_layers
    parts = ["NF4"] if memory.nf4 else []
    parts += [f"{memory.recompute_layers} of {layers} recomputed"] if memory.recompute_layers else []
    return ", ".join(parts + (["offload"] if memory.offload else []))


def training(fitting: Plan | None) -> str:
    """Returns the table cell of an SFT plan: tokens per second and memory settings; UNFIT without a plan."""
    if fitting is None:
        return UNFIT
    workload = fitting.workload
    words = settings(fitting)
    speed = workload.step_rows * workload.row_tokens / seconds(fitting, workload)
    return f"{speed:,.0f} tokens/s" + (f" ({words})" if words else "")


def learning(fitting: Plan | None) -> str:
    """Returns the table cell of an RL plan: a round's time, episodes sampled together, memory settings; else UNFIT."""
    if fitting is None:
        return UNFIT
    workload = fitting.workload
    together = min(fitting.memory.rollout_batch_size, workload.episodes)
    words = [f"{together} at a time", settings(fitting)]
    return f"{in_words(seconds(fitting, workload))} ({', '.join(filter(None, words))})"


def card_rows(size: str) -> list[dict]:
    """Returns the rows of the table of a model size: one for each class of cards."""
    rows = []
    for card_class, name in CLASSES.items():
        speeds = card(name)
        assert speeds
        row = {"GPU": f"{card_class}: {name}"}
        for tokens, run_flags in SFT.items():
            row[f"SFT, {tokens:,} tokens"] = training(planned(flags(speeds, size, run_flags)))
        row["a round of PPO"] = learning(planned(flags(speeds, size, ROUND)))
        rows.append(row)
    return rows


def page() -> str:
    """Returns the text of docs/cards.md."""
    tables = [f"## {size}\n\n{records.table(card_rows(size))}" for size in SIZES]
    return PAGE.format(
        launch=LAUNCH * MICROSECONDS * duration.LAUNCHES,
        graph=LAUNCH * MICROSECONDS * duration.LAUNCHES_IN_GRAPH,
        tables="\n\n".join(tables),
    )


if __name__ == "__main__":
    print(page(), end="")
