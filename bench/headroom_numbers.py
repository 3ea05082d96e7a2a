"""The numbers of bench.headroom, from answers and gradients: pure functions. Knows no model and no files."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bench.records import table
from r3lite.core.answer_match import normalize
from r3lite.evaluation.intervals import interval, resampled_sums

# What a gain takes; see `decision`.
SHARPEN = 0.03
FILTER = 0.15
ROUNDING = 1e-9  # 0.59 - 0.56 is below 0.03 in floats
RESAMPLES = 2000


@dataclass(frozen=True)
class Answer:
    """The answer of an episode, blank if it gave none, with its exact match and the recall of gold paragraphs."""

    text: str
    em: float
    recall: float | None  # None if the question has no gold paragraphs


@dataclass(frozen=True)
class Row:
    """A question with the answer of greedy decoding and those of N samples."""

    id: str
    greedy: Answer
    samples: list[Answer]


def majority(answers: Sequence[Answer]) -> float:
    """Exact match of the most frequent answer after normalization, the first of those that are equally frequent.

    Blank answers have no vote. 0 if all are blank.
    """
    answers = [answer for answer in answers if answer.text.strip()]
    if not answers:
        return 0.0
    votes = Counter(normalize(answer.text) for answer in answers)
    winner = max(answers, key=lambda answer: votes[normalize(answer.text)])  # the first of the largest
    return winner.em


def mean_em(answers: Sequence[Answer]) -> float:
    return sum(answer.em for answer in answers) / len(answers)


def any_em(answers: Sequence[Answer]) -> float:
    return max(answer.em for answer in answers)


OF_SAMPLES = {"mean": mean_em, "majority": majority, "any": any_em}


def with_full_recall(answers: Sequence[Answer]) -> list[Answer]:
    """The answers of episodes that retrieved every gold paragraph."""
    return [answer for answer in answers if answer.recall == 1]


def summary(rows: Sequence[Row], seed: int = 0) -> dict:
    """Exact match of greedy decoding and of the mean, the majority and any of the samples, all means over questions.

    `full_recall` has the same of the episodes that retrieved every gold paragraph alone: other episodes have no vote,
    and questions without such an episode are left out. Greedy answers have their own number of questions there.
    `over_greedy` has the differences of majority and any from greedy decoding with 95 % intervals by paired bootstrap
    over the questions; `mixed_groups` the share of questions that have right and wrong samples, `by_right` the share
    of questions by their number of right samples.
    """
    right = Counter(round(sum(answer.em for answer in row.samples)) for row in rows)
    count = len(rows[0].samples)
    of_all = _shares([row.samples for row in rows])
    sampled_in_full = [with_full_recall(row.samples) for row in rows]
    greedy_in_full = with_full_recall([row.greedy for row in rows])
    full_recall = _shares([answers for answers in sampled_in_full if answers])
    greedy = mean_em([row.greedy for row in rows])
    greedy_of_full = mean_em(greedy_in_full) if greedy_in_full else None
    differences = np.array(
        [[OF_SAMPLES[name](row.samples) - row.greedy.em for row in rows] for name in ("majority", "any")]
    )  # [2, questions]
    sums = resampled_sums(differences[:, :, None], seed, RESAMPLES)[:, :, 0] / len(rows)  # [1 + resamples, 2]
    over_greedy = {"majority": interval(sums[:, 0]), "any": interval(sums[:, 1])}
    return {
        "all": {"questions": len(rows), "greedy": greedy, **of_all},
        "full_recall": {
            "questions": sum(bool(answers) for answers in sampled_in_full),
            "greedy_questions": len(greedy_in_full),
            "greedy": greedy_of_full,
            **full_recall,
        },
        "over_greedy": over_greedy,
        "mixed_groups": sum(0 < sum(answer.em for answer in row.samples) < count for row in rows) / len(rows),
        "by_right": {str(number): right[number] / len(rows) for number in range(count + 1)},
        "decision": decision(over_greedy["majority"]["value"], over_greedy["any"]["value"]),
    }


def _shares(groups: Sequence[Sequence[Answer]]) -> dict[str, float | None]:
    """The mean over groups of answers of each measure; None if there are no groups."""
    if not groups:
        return dict.fromkeys(OF_SAMPLES)
    return {name: sum(map(measure, groups)) / len(groups) for name, measure in OF_SAMPLES.items()}


def decision(sharper: float, best: float) -> str:
    """Where training can gain, by how much the majority (`sharper`) and any of the samples (`best`) are above greedy
    decoding."""
    differences = f"majority - greedy is {sharper:+.3f}, any - greedy {best:+.3f}"
    if sharper >= SHARPEN - ROUNDING:
        return f"{differences}: sampling can be sharpened (RL on answers)"
    if best >= FILTER - ROUNDING:
        return f"{differences}: filtering own samples, or pairs of right and wrong ones"
    return f"{differences}: reading is bound by capacity; neither RL on answers nor filtering has much to gain"


def noise_scale(small: float, large: float, sizes: tuple[int, int]) -> dict[str, float | None]:
    """The simple noise scale of a gradient (arXiv 1812.06162, appendix A.1), from the mean squared norms of the mean
    gradients of batches of two `sizes` b < B.

    signal  |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b), the squared norm of the true gradient
    noise   tr(S) = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B), the trace of the covariance of one group's gradient
    scale   tr(S) / |G|^2: in a step of so many groups, half is signal and half is noise

    Both estimates are unbiased, so that the signal may come out negative: then the gradient cannot be seen in so few
    groups, and the scale is None.
    """
    b, B = sizes
    signal = (B * large - b * small) / (B - b)
    noise = (small - large) / (1 / b - 1 / B)
    return {"signal": signal, "noise": noise, "scale": noise / signal if signal > 0 else None}


def cosine(a: Tensor, b: Tensor) -> float | None:
    """The cosine of two vectors; None if one of them is 0."""
    norms = float(a.norm()) * float(b.norm())
    return float(a @ b) / norms if norms else None


@dataclass
class GradientSums:
    """The gradients [P] of groups by one reward, summed up over each half of the groups."""

    halves: list[Tensor] = field(default_factory=list)  # two sums [P], in fp64
    counts: list[int] = field(default_factory=lambda: [0, 0])  # groups of each half
    squares: float = 0.0  # sum of the squared norms of all groups' gradients
    mixed: int = 0  # groups whose rewards differ

    def add(self, half: int, gradient: Tensor | None) -> None:
        """Adds the gradient of a group to a half, 0 or 1; None if its rewards are equal, which makes it 0."""
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
        return sum(self.counts)

    def summary(self) -> dict:
        """The share of groups whose rewards differ, the noise scale in groups, and the cosine of the two halves.

        The noise scale is estimated twice: from single groups and all of them, which is more exact, and from the two
        halves and all of them (`of_halves`).
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
    """The summary of the gradient of each reward, and the cosine between that of EM and that of recall.

    The cosine over the same episodes has their noise in common; `across_halves`, the mean of the cosines between one
    reward's gradient of a half and the other's of the other half, has not.
    """
    result: dict = {name: of_reward.summary() for name, of_reward in sums.items()}
    em, recall = sums["em"].halves, sums["recall"].halves
    if em and recall:
        across = [cosine(em[0], recall[1]), cosine(em[1], recall[0])]
        of_all = cosine(em[0] + em[1], recall[0] + recall[1])
        mean = None if None in across else sum(across) / 2
        result["cosine_em_recall"] = {"value": of_all, "across_halves": mean}
    return result


def tables(run: dict) -> str:
    """What a probe prints: exact match, the groups by their right samples, gradients, and the decision."""
    count = run["num_generations"]
    titles = {"mean": f"mean of {count}", "majority": f"majority of {count}", "any": f"any of {count}"}
    rows = []
    for key, title in (("all", "all"), ("full_recall", "full recall")):
        shares = run["summary"][key]
        row = {"EM": title, "questions": shares["questions"], "greedy": _shown(shares["greedy"])}
        rows.append(row | {titles[name]: _shown(shares[name]) for name in OF_SAMPLES})
    over = {"EM": "over greedy"}
    for name, entry in run["summary"]["over_greedy"].items():
        over[titles[name]] = f"{entry['value']:+.3f} ({entry['low']:+.3f} to {entry['high']:+.3f})"
    rows.append(over)
    right = {f"right of {count}": "share of questions"}
    right |= {number: f"{share:.2f}" for number, share in run["summary"]["by_right"].items()}
    mixed = f"Groups with right and wrong samples: {run['summary']['mixed_groups']:.2f}"
    parts = [table(rows), f"Greedy answers with full recall: {run['summary']['full_recall']['greedy_questions']}"]
    parts += [table([right]), mixed]
    if "gradient" in run:
        parts += _gradient_tables(run["gradient"], count)
    return "\n\n".join([*parts, run["summary"]["decision"]])


def _gradient_tables(gradient: dict, count: int) -> list[str]:
    rows = []
    for name in ("em", "recall"):
        of_reward = gradient[name]
        row = {"gradient of": name, "groups that differ": f"{of_reward['mixed_groups']:.2f}"}
        for key, title in (("noise_scale", f"noise scale in groups of {count}"), ("of_halves", "from halves")):
            estimate = of_reward[key]
            row[title] = "-" if estimate is None else _shown(estimate["scale"], 1, "not seen")
        rows.append(row | {"cosine of halves": _shown(of_reward["cosine_of_halves"])})
    parts = [table(rows)]
    if cosines := gradient.get("cosine_em_recall"):
        across = _shown(cosines["across_halves"])
        parts.append(f"Cosine of the gradients of EM and recall: {_shown(cosines['value'])}; across halves {across}")
    return parts


def _shown(value: float | None, digits: int = 3, without: str = "-") -> str:
    return without if value is None else f"{value:.{digits}f}"
