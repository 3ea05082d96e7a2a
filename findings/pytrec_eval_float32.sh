#!/usr/bin/env bash
# pytrec_eval-terrier 0.5.11, Python 3.11: scores that differ are ties, and ties are won by the higher document name
#
# Valid input: a run with two documents, scored 0.99999999 (relevant) and 0.99999998. Python's floats hold both, and
# the probability of "yes" from a reranker's softmax can come this close to 1.
#
# Expected: the relevant document has rank 1: reciprocal rank and nDCG are 1.
#
# Seen: the scores become 32-bit floats, where both are 1.0, and of equal scores the document whose name sorts last
# comes first. The measures change with the names: 0.5 or 1 for the same scores. The order of the dictionary never
# counts. The same happens to scores above 2^24 (16,777,217 against 16,777,216).
#
# Why it matters: measured rerankers look worse or better than they are, depending on how the passages are named.
# Ranks (1, 1/2, 1/3, ...) or logits should be given as scores, not probabilities.
#
# Output:
#   relevant 0.99999999 'a', other 0.99999998 'b': reciprocal rank 0.5, nDCG 0.631
#   relevant 0.99999999 'b', other 0.99999998 'a': reciprocal rank 1.0, nDCG 1.000
#   relevant 16777217.0 'a', other 16777216.0 'b': reciprocal rank 0.5, nDCG 0.631
#   relevant 18.42 'a', other 17.73 'b': reciprocal rank 1.0, nDCG 1.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet pytrec_eval-terrier==0.5.11 numpy==2.4.6 scipy==1.17.1 || exit 2
"$work/venv/bin/python" - <<'PY'
import pytrec_eval


def ranked(relevant: tuple[str, float], other: tuple[str, float]) -> float:
    """The reciprocal rank of the relevant document."""
    evaluator = pytrec_eval.RelevanceEvaluator({"question": {relevant[0]: 1}}, {"recip_rank", "ndcg"})
    measures = evaluator.evaluate({"question": dict([relevant, other])})["question"]
    label = f"relevant {relevant[1]} {relevant[0]!r}, other {other[1]} {other[0]!r}"
    print(f"{label}: reciprocal rank {measures['recip_rank']}, nDCG {measures['ndcg']:.3f}")
    return measures["recip_rank"]


assert ranked(("a", 0.99999999), ("b", 0.99999998)) == 0.5
assert ranked(("b", 0.99999999), ("a", 0.99999998)) == 1
assert ranked(("a", 16777217.0), ("b", 16777216.0)) == 0.5
assert ranked(("a", 18.42), ("b", 17.73)) == 1
PY
