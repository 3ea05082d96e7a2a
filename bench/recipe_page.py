"""The page of bench.recipe: exact match of each model beside plain RAG's, the other scores, and the costs."""

from collections.abc import Sequence

from bench.records import conditions, table
from r3lite.settings.commands import BASELINES

SCORE_TITLES = {  # key of a score -> title of its column
    "em": "EM",
    "f1": "F1",
    "format_adherence": "well-formed",
    "retrieval_recall": "recall",
    "mean_searches": "searches",
}
MODEL_TITLES = {  # label of a trained model, or a part of one -> its name on the page
    "untrained": "r3lite's steps without training",
    "sft": "cold start",
    "rag-sft": "plain RAG, fine-tuned",
    "self": "self round",
    "self-control": "cold start, with the steps of the self round",
    "half1": "cold start on half 1",
    "half2": "cold start on half 2",
    "rl": "reinforcement learning",
    "longer": "more steps of SFT",
    "sft585": "cold start of 585 steps",
    "copies": "SFT with copies of comparisons",
    "turned": "copies with turned questions, too",
    "few": "few copies",
    "mean": "mean of both halves",
    "sft-mean": "mean of the cold starts of two seeds",
    "sft-rl-mean": "mean of two seeds after reinforcement learning",
    "stages-mean": "mean of seven stages",
}
ABOUT = """`python -m bench.recipe`: the way of [docs/recipe.md](../../docs/recipe.md), every run, newest first. Greedy
answers to dev questions that training never saw. In brackets intervals of 95 %: of a score by bootstrap over the
questions; of a difference from plain RAG by paired bootstrap over the same questions. They are of one run of each
model: another seed trains another. Tokens are those that a training processed, or that an evaluated model wrote; time
is of all starts of a stage, with loading; memory is the largest resident size of its process."""


def page(runs: Sequence[dict]) -> str:
    """Returns the page in Markdown, with all runs, newest first."""
    parts = ["# The whole way on real weights and real questions", ABOUT]
    for run in reversed(runs):
        parts += [f"## {run['section']}, {run['date']}", about(run), tables(run)]
    return "\n\n".join(parts) + "\n"


def about(run: dict) -> str:
    """Returns a paragraph with the settings and conditions of a run, and whether it is complete."""
    status = "Complete." if run["complete"] else f"**Not complete**: {run['stopped']}."
    flag_list = "; ".join(f"{kind}: `{words}`" for kind, words in run["flags"].items())
    sets = "; ".join(f"{name}: {' and '.join(files)}" for name, files in run["sets"].items())
    message = (
        f"{status} {run['model']}, encoder {run['encoder']}, preset `{run['preset']}`, seed {run['seed']}. {sets}."
    )
    note = f" {run['note']}" if "note" in run else ""
    return f"{message}{f' Flags: {flag_list}.' if flag_list else ''} {conditions(run)}{note}"


def tables(run: dict) -> str:
    """Returns the three tables of a run: exact match by set, other scores, and the costs of the stages.

    A table without rows is left out.
    """
    all_tables = [table(rows) for rows in (exact_match(run), other_scores(run), costs(run))]
    return "\n\n".join(text for text in all_tables if text)


def exact_match(run: dict) -> list[dict]:
    """Returns a row for each model: its exact match on each set, the differences from plain RAG's and the cold start's,
    and the mean over the sets, if there are several and the model was evaluated on all."""
    rows = []
    for label in dict.fromkeys(score["model"] for score in run["scores"]):
        model_scores = [score for score in run["scores"] if score["model"] == label]
        row = {"EM": title(label)}
        for score in model_scores:
            row[f"{score['set']}, {score['n']} questions"] = spread(score["em"])
            if "em" in score.get("over_rag", {}):
                row[f"{score['set']}, over RAG"] = spread(score["over_rag"]["em"], "difference", "+")
            if "em" in score.get("over_sft", {}):
                row[f"{score['set']}, over cold start"] = spread(score["over_sft"]["em"], "difference", "+")
        if len(model_scores) == len(run["sets"]) > 1:
            mean = sum(score["em"]["value"] for score in model_scores) / len(model_scores)
            row["mean of sets"] = f"{mean:.3f}"
        rows.append(row)
    return rows


def other_scores(run: dict) -> list[dict]:
    """Returns a row for each model and set, with the scores other than exact match."""
    return [
        {"model": title(score["model"]), "set": score["set"]}
        | {name: spread(score[key]) for key, name in SCORE_TITLES.items() if key != "em"}
        for score in run["scores"]
    ]


def costs(run: dict) -> list[dict]:
    """Returns a row for each stage, without the comparisons, which take only seconds."""
    return [
        {"stage": stage["stage"], "minutes": f"{stage['seconds'] / 60:.1f}", "starts": stage["starts"]}
        | {"MiB": stage.get("peak_mib"), "tokens": stage.get("tokens"), "steps": stage.get("steps")}
        | {"trajectories": stage.get("trajectories")}
        for stage in run["stages"]
        if not stage["stage"].startswith(("compare-", "over-"))
    ]


def title(label: str) -> str:
    """Returns the name of a baseline or a trained model on the page.

    The name for a label such as "half1-rl" joins the names of its two parts.
    """
    single_title = BASELINES.get(label) or MODEL_TITLES.get(label)
    return single_title or ", then ".join(MODEL_TITLES[part] for part in label.split("-"))


def spread(score: dict | None, key: str = "value", sign: str = "") -> str | None:
    """Returns a number with the ends of its interval, or None if it is missing.

    `key` is "value" for a score and "difference" for a difference. `sign` is "+" to show plus signs, or "".
    """
    if score is None or score.get(key) is None:
        return None
    value, low, high = (f"{score[name]:{sign}.3f}" for name in (key, "low", "high"))
    return f"{value} ({low} to {high})"
