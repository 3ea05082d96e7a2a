"""What classes of cards are predicted to do, as the page docs/cards.md: what fits, and how fast, for each model size.

    python -m bench.cards > docs/cards.md

Nothing is run: every figure is one of `python -m r3lite.plan --card`, or of the same formulas with rows and episodes as
long as trajectories of HotpotQA are. A test holds the page to what this prints.
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

CLASSES = {
    "2 GB": "MX450",
    "4 GB, Turing": "GTX 1650",
    "4 GB, Ampere": "RTX 3050 Laptop",
    "6 GB, Ampere": "RTX 3060 Laptop",
    "8 GB, Ada": "RTX 4060 Laptop",
}
SFT = {tokens: ["--max-length", str(tokens)] for tokens in (1024, 2048)}
ROUND = ["--algorithm", "ppo", "--adapter", "runs/sft"]
SIZES = ("0.5B", "1.5B")
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


def flags(known: Speeds, size: str, more: list[str]) -> list[str]:
    """What `python -m r3lite.plan` is given."""
    assert known.memory
    budget = ["--vram-budget", f"{known.memory // GIB - 1}GiB"] if known.memory > 4 * GIB else []
    return ["--card", known.name, "--model", HUB[size], *more, *budget]


def planned(given: list[str]) -> Plan | None:
    """The plan that `python -m r3lite.plan` makes of flags; None if the run does not fit."""
    learns = plan.is_rl(given)
    config = plan.PlanRlConfig() if learns else plan.PlanSftConfig()
    try:
        return plan.make(resolve("plan", config, given, table="ppo" if learns else "sft"))
    except R3LiteError:
        return None


def seconds(found: Plan, workload: Workload) -> float:
    predicted = duration.predict(workload, found.memory)
    assert predicted
    return predicted.seconds


def settings(found: Plan) -> str:
    memory, layers = found.memory, found.workload.model.num_hidden_layers
    parts = ["NF4"] if memory.nf4 else []
    parts += [f"{memory.recompute_layers} of {layers} recomputed"] if memory.recompute_layers else []
    return ", ".join(parts + (["offload"] if memory.offload else []))


def training(found: Plan | None) -> str:
    """A cell of SFT."""
    if found is None:
        return UNFIT
    w, more = found.workload, settings(found)
    speed = w.step_rows * w.row_tokens / seconds(found, w)
    return f"{speed:,.0f} tokens/s" + (f" ({more})" if more else "")


def learning(found: Plan | None) -> str:
    """A cell of a round."""
    if found is None:
        return UNFIT
    w = found.workload
    more = [f"{min(found.memory.rollout_batch_size, w.episodes)} at a time", settings(found)]
    return f"{in_words(seconds(found, w))} ({', '.join(filter(None, more))})"


def fits(size: str) -> list[dict]:
    rows = []
    for kind, name in CLASSES.items():
        known = card(name)
        assert known
        row = {"GPU": f"{kind}: {name}"}
        row |= {f"SFT, {tokens:,} tokens": training(planned(flags(known, size, more))) for tokens, more in SFT.items()}
        rows.append(row | {"a round of PPO": learning(planned(flags(known, size, ROUND)))})
    return rows


def page() -> str:
    tables = [f"## {size}\n\n{records.table(fits(size))}" for size in SIZES]
    return PAGE.format(
        launch=LAUNCH * 1e6 * duration.LAUNCHES,
        graph=LAUNCH * 1e6 * duration.LAUNCHES_IN_GRAPH,
        tables="\n\n".join(tables),
    )


if __name__ == "__main__":
    print(page(), end="")
