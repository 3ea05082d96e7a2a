"""Scores and comparisons as text. Knows the numbers that scores.json and comparison.json hold; computes none."""

from collections.abc import Callable

from r3lite.core.titles import TITLES

OF_GROUPS = ("em", "f1", "judge_accuracy", "retrieval_recall", "mean_searches")
GROUPS = {"by_hops": "hops", "by_type": "type"}
LEAST_ADHERENCE = 0.5  # below it, scores say little about anything else


def scores_table(found: dict) -> str:
    """What scores.json holds: all metrics, those of each group of questions, and what to beware of."""
    ends = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in found["finish"].items())
    lines = [f"\n{found['n']} questions: {ends}", f"{'':<18}{'value':>8}   95 % interval"]
    for name in (name for name in TITLES if found.get(name)):
        entry = found[name]
        line = f"{TITLES[name]:<18}{_number(entry['value'])}  {_number(entry['low'])}{_number(entry['high'])}"
        lines.append(f"{line}   n = {entry['n']}" if "n" in entry else line)
    if found["faults"]:
        faults = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in found["faults"].items())
        lines.append(f"\nfaults of steps: {faults}")
    for key, title in GROUPS.items():
        if len(found[key]) > 1:
            lines += ["", *_group_lines(title, found[key])]
    if missing := found.get("judge", {}).get("judge/missing"):
        lines.append(f"\n{missing} verdicts of the judge are missing; they are left out of the scores")
    if failed := found.get("retrieval_failures"):
        lines.append(f"\nthe retriever failed on {failed} questions; they are left out of the scores")
    if (found["format_adherence"]["value"] or 0.0) < LEAST_ADHERENCE:
        why = "is --adapter missing, or was it trained with other prompt files?"
        lines.append(f"\nFew steps follow the format, so the other scores mean little: {why}")
    return "\n".join(lines)


def _group_lines(title: str, groups: dict[str, dict]) -> list[str]:
    shown = [name for name in OF_GROUPS if any(name in group for group in groups.values())]
    lines = [f"{title:<18}{'n':>6}" + "".join(f"{TITLES[name]:>23}" for name in shown)]
    for label, group in groups.items():
        cells = (_with_interval(group[name]) if name in group else "-" for name in shown)
        lines.append(f"{label:<18}{group['n']:>6}" + "".join(f"{cell:>23}" for cell in cells))
    return lines


def _number(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:>8.3f}"


def _with_interval(entry: dict) -> str:
    return "-" if entry["value"] is None else f"{entry['value']:.3f} ({entry['low']:.3f}-{entry['high']:.3f})"


def comparison_table(found: dict) -> str:
    """What comparison.json holds, and how to read it."""
    lines = [f"\n{found['n']} questions", f"A  {found['a']}", f"B  {found['b']}", ""]
    lines.append(_difference_head(""))
    lines += [_difference_line(TITLES[name], found["metrics"][name]) for name in TITLES if name in found["metrics"]]
    if failed := found.get("retrieval_failures"):
        lines.append(f"\nthe retriever failed on {failed} other questions, in A or in B; they are left out")
    lines.append("\npaired bootstrap over questions; p is two-sided, without correction for several metrics")
    return "\n".join(lines)


def pooled_table(found: dict, named: Callable[[str], str]) -> str:
    """What comparison.json holds of several pairs, and how to read it; `named` makes of a path what is printed."""
    lines = []
    for number, of_set in enumerate(found["sets"], 1):
        lines.append(f"\nset {number}: {of_set['n']} questions")
        if failed := of_set.get("retrieval_failures"):
            lines.append(f"the retriever failed on {failed} other questions, in A or in B; they are left out")
        for a, b in zip(of_set["a"], of_set["b"], strict=True):
            lines += [f"A  {named(a)}", f"B  {named(b)}"]
    for name, mean in found["metrics"].items():
        lines += ["", _difference_head(TITLES[name])]
        for number, of_set in enumerate(found["sets"], 1):
            lines.append(_difference_line(f"set {number}", of_set["metrics"][name]))
        if len(found["sets"]) > 1:
            lines.append(_difference_line("mean of sets", mean))
    lines.append("\npaired bootstrap over the questions of each set; the seeds of a set are averaged first, and sets")
    lines.append("weigh the same; p is two-sided, without correction for several metrics; variance between training")
    lines.append("seeds is not in the intervals")
    return "\n".join(lines)


def _difference_head(title: str) -> str:
    return f"{title:<18}{'A':>8}{'B':>8}{'B - A':>9}   {'95 % interval':<17}{'p':>7}"


def _difference_line(title: str, entry: dict) -> str:
    p = "<0.001" if entry["p"] < 0.001 else f"{entry['p']:.3f}"
    change = f"{entry['difference']:>+9.3f}  {entry['low']:>+8.3f} {entry['high']:>+8.3f}"
    return f"{title:<18}{_number(entry['a'])}{_number(entry['b'])}{change} {p:>7}"
