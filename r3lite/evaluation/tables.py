"""Scores and comparisons as text. Knows the numbers that scores.json and comparison.json hold; computes none."""

from collections.abc import Callable

from r3lite.core.titles import TITLES

GROUP_METRICS = ("em", "f1", "judge_accuracy", "retrieval_recall", "mean_searches")  # in the tables of groups
GROUPS = {"by_hops": "hops", "by_type": "type"}  # keys of scores.json with groups of questions, and their titles
LEAST_ADHERENCE = 0.5  # if a smaller share of steps follows the format, a warning is added


def scores_table(scores: dict, format_remedy: str) -> str:
    """Returns the content of scores.json as text: all metrics, the scores of groups of questions, and warnings.

    If few steps follow the format, the last warning ends with `format_remedy`, which says what to do.
    """
    lines = [f"\n{scores['n']} questions: {_counts(scores['finish'])}"]
    lines.append(f"{'':<18}{'value':>8}   95 % interval")
    for name, title in TITLES.items():
        entry = scores.get(name)
        if not entry:
            continue
        line = f"{title:<18}{_number(entry['value'])}  {_number(entry['low'])}{_number(entry['high'])}"
        if "n" in entry:
            line += f"   n = {entry['n']}"
        lines.append(line)
    if scores["retrieval_recall"]["value"] is None:
        lines.append("-: the questions have no gold paragraphs, by which recall is measured")
    if scores["retrieval_recall"]["value"] == 0 and scores["mean_searches"]["value"] > 0:
        lines.append(
            "\nNo gold paragraph was retrieved: is this the index or corpus of these questions? What it lacks:"
        )
        lines.append("python -m r3lite.retrieve --data QUESTIONS --index FOLDER --gap-report gaps.json")
    if scores["faults"]:
        lines.append(f"\nfaults of steps: {_counts(scores['faults'])}")
    copied = scores["faults"].get("copied_example")
    if copied:
        copies = f"{copied} of {scores['n']} answers repeat the prompt's worked example"
        lines.append(f"\n{copies}: the model does not know the format; pass --adapter, or --baseline rag")
    for key, title in GROUPS.items():
        if len(scores[key]) > 1:
            lines += ["", *_group_lines(title, scores[key])]
    missing = scores.get("judge", {}).get("judge/missing")
    if missing:
        lines.append(f"\n{missing} verdicts of the judge are missing; they are left out of the scores")
    failures = scores.get("retrieval_failures")
    if failures:
        lines.append(f"\nthe retriever failed on {failures} questions; they are left out of the scores")
    adherence = scores["format_adherence"]["value"] or 0.0
    if adherence < LEAST_ADHERENCE:
        lines.append(f"\nFew steps follow the format, so the other scores mean little: {format_remedy}")
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    """Returns a text such as `250 answered, 3 cut off`."""
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())


def _group_lines(title: str, groups: dict[str, dict]) -> list[str]:
    """Returns the lines of a table: one for each group, with the metrics of GROUP_METRICS that any group has."""
    metrics = [name for name in GROUP_METRICS if any(name in group for group in groups.values())]
    titles = "".join(f"{TITLES[name]:>23}" for name in metrics)
    lines = [f"{title:<18}{'n':>6}{titles}"]
    for label, group in groups.items():
        cells = [_with_interval(group.get(name)) for name in metrics]
        row = "".join(f"{cell:>23}" for cell in cells)
        lines.append(f"{label:<18}{group['n']:>6}{row}")
    return lines


def _number(value: float | None) -> str:
    """Returns a cell of 8 characters."""
    if value is None:
        return f"{'-':>8}"
    return f"{value:>8.3f}"


def _with_interval(entry: dict | None) -> str:
    if entry is None or entry["value"] is None:
        return "-"
    return f"{entry['value']:.3f} ({entry['low']:.3f}-{entry['high']:.3f})"


def comparison_table(comparison: dict) -> str:
    """Returns the content of comparison.json as text, and how to read it."""
    lines = [f"\n{comparison['n']} questions", f"A  {comparison['a']}", f"B  {comparison['b']}", ""]
    lines.append(_difference_head(""))
    for name, title in TITLES.items():
        if name in comparison["metrics"]:
            lines.append(_difference_line(title, comparison["metrics"][name]))
    failures = comparison.get("retrieval_failures")
    if failures:
        lines.append(f"\nthe retriever failed on {failures} other questions, in A or in B; they are left out")
    lines.append("\npaired bootstrap over questions; p is two-sided, without correction for several metrics")
    return "\n".join(lines)


def pooled_table(comparison: dict, name_of: Callable[[str], str]) -> str:
    """Returns the content of comparison.json for several pairs as text, and how to read it.

    `name_of` returns the name that is printed for the path of an evaluation.
    """
    lines = []
    for number, question_set in enumerate(comparison["sets"], 1):
        lines.append(f"\nset {number}: {question_set['n']} questions")
        failures = question_set.get("retrieval_failures")
        if failures:
            lines.append(f"the retriever failed on {failures} other questions, in A or in B; they are left out")
        for a, b in zip(question_set["a"], question_set["b"], strict=True):
            lines += [f"A  {name_of(a)}", f"B  {name_of(b)}"]
    for name, mean in comparison["metrics"].items():
        lines += ["", _difference_head(TITLES[name])]
        for number, question_set in enumerate(comparison["sets"], 1):
            lines.append(_difference_line(f"set {number}", question_set["metrics"][name]))
        if len(comparison["sets"]) > 1:
            lines.append(_difference_line("mean of sets", mean))
    lines.append("\npaired bootstrap over the questions of each set; the seeds of a set are averaged first, and sets")
    lines.append("weigh the same; p is two-sided, without correction for several metrics; variance between training")
    lines.append("seeds is not in the intervals")
    return "\n".join(lines)


def _difference_head(title: str) -> str:
    return f"{title:<18}{'A':>8}{'B':>8}{'B - A':>9}   {'95 % interval':<17}{'p':>7}"


def _difference_line(title: str, entry: dict) -> str:
    p = f"{entry['p']:.3f}"
    if entry["p"] < 0.001:
        p = "<0.001"
    change = f"{entry['difference']:>+9.3f}  {entry['low']:>+8.3f} {entry['high']:>+8.3f}"
    return f"{title:<18}{_number(entry['a'])}{_number(entry['b'])}{change} {p:>7}"
