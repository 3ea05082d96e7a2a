"""Computes the numbers of bench.headroom from answers and gradients. Its functions use no model and no files."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bench.records import table
from r3lite.core.answer_match import normalize
from r3lite.evaluation.intervals import interval, resampled_sums

# Smallest differences of exact match with which `decision` recommends a training.
SHARPEN = 0.03  # majority - greedy
FILTER = 0.15  # any - greedy
ROUNDING = 1e-9  # tolerance: in floats, 0.59 - 0.56 is below 0.03
RESAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True)
class Answer:
    """The answer of an episode and its scores."""

    text: str  # blank if the episode has no answer
    em: float  # exact match
    recall: float | None  # of gold paragraphs; None if the question has no gold paragraphs


@dataclass(frozen=True)
class Row:
    """A question with its greedy answer and the answers of N samples."""

    id: str
    greedy: Answer
    samples: list[Answer]


def majority(answers: Sequence[Answer]) -> float:
    """Returns the exact match of the most frequent answer after normalization; of a tie, that of the first answer.

    Blank answers have no vote. The result is 0 if all are blank.
    """
    voters = [answer for answer in answers if answer.text.strip()]
    if not voters:
        return 0.0
    votes = Counter(normalize(answer.text) for answer in voters)
    winner = max(voters, key=lambda answer: votes[normalize(answer.text)])  # max returns the first of a tie
    return winner.em


def mean_em(answers: Sequence[Answer]) -> float:
    """Returns the mean exact match of the answers."""
    return sum(answer.em for answer in answers) / len(answers)


def any_em(answers: Sequence[Answer]) -> float:
    """Returns the exact match of the best answer."""
    return max(answer.em for answer in answers)


SAMPLE_MEASURES = {"mean": mean_em, "majority": majority, "any": any_em}


def with_full_recall(answers: Sequence[Answer]) -> list[Answer]:
    """Returns the answers whose episodes retrieved every gold paragraph."""
    return [answer for answer in answers if answer.recall == 1]


def summary(rows: Sequence[Row], seed: int = 0) -> dict:
    """Returns the summary of the questions' answers. Exact matches are means over questions.

    all: exact match of greedy decoding, and of the mean, the majority and any of the samples
    full_recall: the same for episodes that retrieved every gold paragraph. Other episodes have no vote. The figures of
        samples leave out questions without such a sample; that of greedy decoding leaves out questions whose greedy
        episode is not such an episode. Hence there are two numbers of questions.
    over_greedy: the differences of majority and any from greedy decoding, with 95 % intervals by paired bootstrap over
        the questions
    mixed_groups: the share of questions that have right and wrong samples
    by_right: the share of questions by their number of right samples
    decision: a sentence on what training can gain
    """
    right = Counter(round(sum(answer.em for answer in row.samples)) for row in rows)
    count = len(rows[0].samples)
    all_shares = _shares([row.samples for row in rows])
    samples_with_full_recall = [with_full_recall(row.samples) for row in rows]
    greedy_with_full_recall = with_full_recall([row.greedy for row in rows])
    full_recall = _shares([answers for answers in samples_with_full_recall if answers])
    greedy = mean_em([row.greedy for row in rows])
    full_recall_greedy = mean_em(greedy_with_full_recall) if greedy_with_full_recall else None
    differences = np.array(
        [[SAMPLE_MEASURES[name](row.samples) - row.greedy.em for row in rows] for name in ("majority", "any")]
    )  # [2, questions]
    means = resampled_sums(differences[:, :, None], seed, RESAMPLES)[:, :, 0] / len(rows)  # [1 + resamples, 2]
    over_greedy = {"majority": interval(means[:, 0]), "any": interval(means[:, 1])}
    return {
        "all": {"questions": len(rows), "greedy": greedy, **all_shares},
        "full_recall": {
            "questions": sum(bool(answers) for answers in samples_with_full_recall),
            "greedy_questions": len(greedy_with_full_recall),
            "greedy": full_recall_greedy,
            **full_recall,
        },
        "over_greedy": over_greedy,
        "mixed_groups": sum(0 < sum(answer.em for answer in row.samples) < count for row in rows) / len(rows),
        "by_right": {str(number): right[number] / len(rows) for number in range(count + 1)},
        "decision": decision(over_greedy["majority"]["value"], over_greedy["any"]["value"]),
    }


def _shares(groups: Sequence[Sequence[Answer]]) -> dict[str, float | None]:
    """Returns the mean of each measure over groups of answers; None for each if there are no groups."""
    if not groups:
        return dict.fromkeys(SAMPLE_MEASURES)
    return {name: sum(map(measure, groups)) / len(groups) for name, measure in SAMPLE_MEASURES.items()}


def decision(majority_gain: float, any_gain: float) -> str:
    """Returns a sentence on what training can gain.

    The gains are the differences in exact match of the majority and of any of the samples from greedy decoding.
    """
    differences = f"majority - greedy is {majority_gain:+.3f}, any - greedy {any_gain:+.3f}"
    if majority_gain >= SHARPEN - ROUNDING:
        return f"{differences}: sampling can be sharpened (RL on answers)"
    if any_gain >= FILTER - ROUNDING:
        return f"{differences}: filtering own samples, or pairs of right and wrong ones"
    return f"{differences}: reading is bound by capacity; neither RL on answers nor filtering has much to gain"


def noise_scale(small: float, large: float, sizes: tuple[int, int]) -> dict[str, float | None]:
    """Returns the simple noise scale of a gradient (arXiv 1812.06162, appendix A.1), in groups.

    G_b and G_B are the mean gradients of batches of `sizes` b < B groups; `small` and `large` are the means of their
    squared norms.

    signal  |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b), the squared norm of the true gradient
    noise   tr(S) = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B), the trace of the covariance of one group's gradient
    scale   tr(S) / |G|^2, the number of groups with which a step is half signal and half noise

    The estimates of signal and noise are unbiased, so the signal may come out negative. Then these groups are too few
    to see the gradient, and the scale is None.
    """
    b, B = sizes
    signal = (B * large - b * small) / (B - b)
    noise = (small - large) / (1 / b - 1 / B)
    return {"signal": signal, "noise": noise, "scale": noise / signal if signal > 0 else None}


def cosine(a: Tensor, b: Tensor) -> float | None:
    """Returns the cosine of two vectors; None if one of them is 0."""
    norms = float(a.norm()) * float(b.norm())
    return float(a @ b) / norms if norms else None


@dataclass
class GradientSums:
    """Sums of the gradients [P] of groups for one kind of reward, over each half of the groups."""

    halves: list[Tensor] = field(default_factory=list)  # two sums [P], in fp64
    counts: list[int] = field(default_factory=lambda: [0, 0])  # groups of each half
    squares: float = 0.0  # sum of the squared norms of all groups' gradients
    mixed: int = 0  # groups whose rewards differ

    def add(self, half: int, gradient: Tensor | None) -> None:
        """Adds the gradient of a group to a half, 0 or 1.

        None stands for a gradient of 0: that of a group with equal rewards.
        """
        self.counts[half] += 1
        if gradient is None:
            return
        if not self.halves:
            self.halves = [torch.zeros_like(gradient), torch.zeros_like(gradient)]
        self.halves[half] += gradient
        self.squares += float(gradient @ gradient)
        self.mixed += 1

    @property
    def groups(self) -> int:
        """The number of groups so far."""
        return sum(self.counts)

    def summary(self) -> dict:
        """Returns the share of groups whose rewards differ, the noise scale, and the cosine of the two halves.

        The noise scale is estimated twice: `noise_scale` compares single groups with all groups and is more exact;
        `of_halves` compares the halves with all groups.
        """
        share = {"mixed_groups": self.mixed / self.groups}
        if not self.halves:
            return share | {"noise_scale": None, "of_halves": None, "cosine_of_halves": None}
        assert self.counts[0] == self.counts[1], "halves are equally large"
        first = self.halves[0] / self.counts[0]
        second = self.halves[1] / self.counts[1]
        mean = (first + second) / 2
        large = float(mean @ mean)
        of_halves = (float(first @ first) + float(second @ second)) / 2
        return share | {
            "noise_scale": noise_scale(self.squares / self.groups, large, (1, self.groups)),
            "of_halves": noise_scale(of_halves, large, (self.counts[0], self.groups)),
            "cosine_of_halves": cosine(first, second),
        }


def gradient_summary(sums: dict[str, GradientSums]) -> dict:
    """Returns the summary of each reward's gradient, and the cosine of the gradients by EM and by recall.

    `value` is the cosine over all groups: both gradients are of the same episodes, so they share noise, which
    raises it. `across_halves` shares no noise: it is the mean of the cosines between the gradient by one reward of one
    half and the gradient by the other reward of the other half.
    """
    result: dict = {name: reward_sums.summary() for name, reward_sums in sums.items()}
    em = sums["em"].halves
    recall = sums["recall"].halves
    if em and recall:
        across = [cosine(em[0], recall[1]), cosine(em[1], recall[0])]
        same_episodes = cosine(em[0] + em[1], recall[0] + recall[1])
        mean = None if None in across else sum(across) / 2
        result["cosine_em_recall"] = {"value": same_episodes, "across_halves": mean}
    return result


def tables(run: dict) -> str:
    """Returns the text that bench.headroom prints: exact match, groups by right samples, gradients, the decision."""
    count = run["num_generations"]
    titles = {"mean": f"mean of {count}", "majority": f"majority of {count}", "any": f"any of {count}"}
    rows = []
    for key, title in (("all", "all"), ("full_recall", "full recall")):
        shares = run["summary"][key]
        row = {"EM": title, "questions": shares["questions"], "greedy": _cell(shares["greedy"])}
        rows.append(row | {titles[name]: _cell(shares[name]) for name in SAMPLE_MEASURES})
    differences = {"EM": "over greedy"}
    for name, entry in run["summary"]["over_greedy"].items():
        differences[titles[name]] = f"{entry['value']:+.3f} ({entry['low']:+.3f} to {entry['high']:+.3f})"
    rows.append(differences)
    right = {f"right of {count}": "share of questions"}
    right |= {number: f"{share:.2f}" for number, share in run["summary"]["by_right"].items()}
    mixed = f"Groups with right and wrong samples: {run['summary']['mixed_groups']:.2f}"
    parts = [table(rows), f"Greedy answers with full recall: {run['summary']['full_recall']['greedy_questions']}"]
    parts += [table([right]), mixed]
    if "gradient" in run:
        parts += _gradient_tables(run["gradient"], count)
    return "\n\n".join([*parts, run["summary"]["decision"]])


def _gradient_tables(gradient: dict, count: int) -> list[str]:
    """Returns the table of gradients, and a sentence on their cosine if there is one; groups have `count` samples."""
    rows = []
    for name in ("em", "recall"):
        reward_summary = gradient[name]
        row = {"gradient of": name, "groups that differ": f"{reward_summary['mixed_groups']:.2f}"}
        for key, title in (("noise_scale", f"noise scale in groups of {count}"), ("of_halves", "from halves")):
            estimate = reward_summary[key]
            row[title] = "-" if estimate is None else _cell(estimate["scale"], 1, "not seen")
        rows.append(row | {"cosine of halves": _cell(reward_summary["cosine_of_halves"])})
    parts = [table(rows)]
    if cosines := gradient.get("cosine_em_recall"):
        across = _cell(cosines["across_halves"])
        parts.append(f"Cosine of the gradients of EM and recall: {_cell(cosines['value'])}; across halves {across}")
    return parts


def _cell(value: float | None, digits: int = 3, missing: str = "-") -> str:
    """Returns a number with `digits` decimal places, or `missing` for None."""
    return missing if value is None else f"{value:.{digits}f}"
