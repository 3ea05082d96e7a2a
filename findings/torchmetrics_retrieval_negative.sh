#!/usr/bin/env bash
# torchmetrics 1.9.0, Python 3.11: retrieval metrics do not count relevant documents whose score is not above 0
#
# Valid input: scores of a retrieval model, some or all negative: logits of a cross-encoder, cosines, log-probabilities.
# The classes take "a float tensor". Their check of the input calls it "scores/logits" and lets negative ones pass; the
# docstrings of the functions speak of "estimated probabilities".
#
# Expected: MRR, MAP, precision and recall depend on the order alone. The same number added to all scores changes
# nothing, as with the hit rate, the nDCG and the precision-recall curve of the same package.
#
# Seen: RetrievalMRR, RetrievalMAP, RetrievalPrecision and RetrievalRecall take a relevant document with a score of 0 or
# less as not relevant. With all scores below 0 all four are 0, while the hit rate and the nDCG are 1. With some, the
# MAP can rise, as its denominator loses these documents too: a relevant document at the top and another one, with a
# negative score, in the last place give 1. There is no warning, and the documentation does not mention it.
#
# Why it matters: a good reranker looks bad because its logits are low, and two models, or two steps of one training,
# are compared by where their scores lie. MAP rewards a model that gives the hard documents negative scores. The sigmoid
# of the scores, or scores minus the smallest plus 1, gives the right values.
#
# Output:
# one question; the relevant document is first
#                                MRR    MAP    P@1    R@1   HitRate@1   nDCG   PR curve, P@1
#   scores  1,  0.5,  0.2     1.000  1.000  1.000  1.000       1.000  1.000           1.000
#   scores -1, -1.5, -1.8     0.000  0.000  0.000  0.000       1.000  1.000           1.000
# relevant at 1 and 5 of 5, the last score is -0.1
#                                MAP
#   by hand                    0.700
#   RetrievalMAP               1.000
# 200 questions, the model's logits moved
#   moved by           0     -1     -2     -3
#   MRR by hand    0.815  0.815  0.815  0.815
#   RetrievalMRR   0.815  0.811  0.612  0.180
#   MAP by hand    0.654  0.654  0.654  0.654
#   RetrievalMAP   0.683  0.763  0.608  0.180
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import torch
from torchmetrics.retrieval import (
    RetrievalHitRate,
    RetrievalMAP,
    RetrievalMRR,
    RetrievalNormalizedDCG,
    RetrievalPrecision,
    RetrievalPrecisionRecallCurve,
    RetrievalRecall,
)


def value(metric, scores: torch.Tensor, relevant: torch.Tensor) -> float:
    """Over questions, one row each."""
    questions = torch.arange(len(scores))[:, None].expand(scores.shape)
    result = metric(scores, relevant, indexes=questions)
    return float(result[0][0] if isinstance(result, tuple) else result)


def by_hand(scores: torch.Tensor, relevant: torch.Tensor) -> tuple[float, float]:
    """MRR and MAP."""
    ranks, precisions = [], []
    for row, labels in zip(scores.tolist(), relevant.tolist()):
        found = []
        for rank, place in enumerate(sorted(range(len(row)), key=lambda p: -row[p]), start=1):
            if labels[place]:
                found.append((len(found) + 1) / rank)
                if len(found) == 1:
                    ranks.append(1 / rank)
        precisions.append(sum(found) / len(found))
    return sum(ranks) / len(scores), sum(precisions) / len(scores)


print("one question; the relevant document is first")
print("                               MRR    MAP    P@1    R@1   HitRate@1   nDCG   PR curve, P@1")
RELEVANT = torch.tensor([[True, False, False]])
POSITIVE = torch.tensor([[1.0, 0.5, 0.2]])
for scores, label in ((POSITIVE, " 1,  0.5,  0.2"), (POSITIVE - 2, "-1, -1.5, -1.8")):
    filtered = [
        value(metric, scores, RELEVANT)
        for metric in (RetrievalMRR(), RetrievalMAP(), RetrievalPrecision(top_k=1), RetrievalRecall(top_k=1))
    ]
    others = [
        value(metric, scores, RELEVANT)
        for metric in (RetrievalHitRate(top_k=1), RetrievalNormalizedDCG(), RetrievalPrecisionRecallCurve())
    ]
    print(f"  scores {label}   " + "".join(f"{number:7.3f}" for number in filtered), end="")
    print(f"{others[0]:12.3f}{others[1]:7.3f}{others[2]:16.3f}")
    assert by_hand(scores, RELEVANT) == (1, 1) and others == [1, 1, 1]
    assert filtered == ([1] * 4 if scores is POSITIVE else [0] * 4)

print("relevant at 1 and 5 of 5, the last score is -0.1")
scores, relevant = torch.tensor([[0.8, 0.6, 0.4, 0.2, -0.1]]), torch.tensor([[True, False, False, False, True]])
right, seen = by_hand(scores, relevant)[1], value(RetrievalMAP(), scores, relevant)
print("                               MAP")
print(f"  by hand                  {right:7.3f}")
print(f"  RetrievalMAP             {seen:7.3f}")
assert abs(right - 0.7) < 1e-6 and seen == 1

print("200 questions, the model's logits moved")
torch.manual_seed(0)
relevant = torch.zeros(200, 20, dtype=torch.bool)
relevant[:, :3] = True
logits = torch.randn(200, 20) + 1.5 * relevant
moves = (0, -1, -2, -3)
print("  moved by     " + "".join(f"{move:7}" for move in moves))
for number, (name, metric) in enumerate((("MRR", RetrievalMRR), ("MAP", RetrievalMAP))):
    right = [by_hand(logits + move, relevant)[number] for move in moves]
    seen = [value(metric(), logits + move, relevant) for move in moves]
    high = [value(metric(), torch.sigmoid(logits + move), relevant) for move in moves]
    print(f"  {name} by hand  " + "".join(f"{each:7.3f}" for each in right))
    print(f"  Retrieval{name} " + "".join(f"{each:7.3f}" for each in seen))
    assert max(right) - min(right) < 1e-6 and all(abs(a - b) < 1e-4 for a, b in zip(right, high))
    assert seen[-1] < 0.5 * right[-1]
PY
