"""What the page of bench.recipe tells: exact match of each model beside plain RAG's, other scores, and the cost."""

from collections.abc import Sequence

from bench.records import conditions, table
from r3lite.settings.commands import BASELINES

SHOWN = {
    "em": "EM",
    "f1": "F1",
    "format_adherence": "well-formed",
    "retrieval_recall": "recall",
    "mean_searches": "searches",
}
OWN = {
    "untrained": "r3lite's steps without training",
    "sft": "cold start",
    "rag-sft": "plain RAG, fine-tuned",
    "self": "self round",
    "self-control": "cold start, with the steps of the self round",
    "half1": "cold start on half 1",
    "half2": "cold start on half 2",
    "rl": "reinforcement learning",
    "mean": "mean of both halves",
}
ABOUT = """`python -m bench.recipe`: the way of [docs/recipe.md](../../docs/recipe.md), every run, newest first. Greedy
answers to dev questions that training never saw. In brackets intervals of 95 %: of a score by bootstrap over the
questions; of a difference from plain RAG by paired bootstrap over the same questions. They are of one run of each
model: another seed trains another. Tokens are those that a training processed, or that an evaluated model wrote; time
is of all starts of a stage, with loading; memory is the largest resident size of its process."""


def page(runs: Sequence[dict]) -> str:
    """All runs, newest first."""
    parts = ["# The whole way on real weights and real questions", ABOUT]
    for run in reversed(runs):
        parts += [f"## {run['section']}, {run['date']}", about(run), tables(run)]
    return "\n\n".join(parts) + "\n"


def about(run: dict) -> str:
    """The settings of a run, and whether it was completed."""
    whole = "Complete." if run["complete"] else f"**Not complete**: {run['stopped']}."
    flags = "; ".join(f"{kind}: `{words}`" for kind, words in run["flags"].items())
    sets = "; ".join(f"{name}: {' and '.join(files)}" for name, files in run["sets"].items())
    message = f"{whole} {run['model']}, encoder {run['encoder']}, preset `{run['preset']}`, seed {run['seed']}. {sets}."
    note = f" {run['note']}" if "note" in run else ""
    return f"{message}{f' Flags: {flags}.' if flags else ''} {conditions(run)}{note}"


def tables(run: dict) -> str:
    """The three tables of a run: exact match by set, other scores, and what each stage took."""
    return "\n\n".join(part for part in (table(exact_match(run)), table(others(run)), table(costs(run))) if part)


def exact_match(run: dict) -> list[dict]:
    """A row for each model, with its exact match on each set, its differences from plain RAG's and the cold start's,
    and the mean of sets."""
    rows = []
    for label in dict.fromkeys(score["model"] for score in run["scores"]):
        of_model = [score for score in run["scores"] if score["model"] == label]
        row = {"EM": title(label)}
        for score in of_model:
            row[f"{score['set']}, {score['n']} questions"] = spread(score["em"])
            if "em" in score.get("over_rag", {}):
                row[f"{score['set']}, over RAG"] = spread(score["over_rag"]["em"], "difference", "+")
            if "em" in score.get("over_sft", {}):
                row[f"{score['set']}, over cold start"] = spread(score["over_sft"]["em"], "difference", "+")
        if len(of_model) == len(run["sets"]) > 1:
            row["mean of sets"] = f"{sum(score['em']['value'] for score in of_model) / len(of_model):.3f}"
        rows.append(row)
    return rows


def others(run: dict) -> list[dict]:
    """A row for each model and set."""
    return [
        {"model": title(score["model"]), "set": score["set"]}
        | {name: spread(score[key]) for key, name in SHOWN.items() if key != "em"}
        for score in run["scores"]
    ]


def costs(run: dict) -> list[dict]:
    """A row for each stage; comparisons, which take seconds, are left out."""
    return [
        {"stage": stage["stage"], "minutes": f"{stage['seconds'] / 60:.1f}", "starts": stage["starts"]}
        | {"MiB": stage.get("peak_mib"), "tokens": stage.get("tokens"), "steps": stage.get("steps")}
        | {"trajectories": stage.get("trajectories")}
        for stage in run["stages"]
        if not stage["stage"].startswith(("compare-", "over-"))
    ]


def title(label: str) -> str:
    """What a reader calls a model."""
    return BASELINES.get(label) or OWN.get(label) or ", then ".join(OWN[part] for part in label.split("-"))


def spread(score: dict | None, key: str = "value", sign: str = "") -> str | None:
    """A score or a difference with its interval."""
    if score is None or score.get(key) is None:
        return None
    value, low, high = (f"{score[name]:{sign}.3f}" for name in (key, "low", "high"))
    return f"{value} ({low} to {high})"
