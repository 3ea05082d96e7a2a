#!/usr/bin/env bash
# rouge 1.0.1, Python 3.11: repetitions cost nothing, and a line break at the end is a word that matches
#
# Valid input: an answer and a reference, as strings, for `Rouge().get_scores`.
#
# Expected: ROUGE counts a word as often as it occurs (Lin 2004, and the script ROUGE-1.5.5). If the reference is "the
# cat sat", ten times "the cat sat" has 30 words, of which 3 match: precision 0.1. Texts without a common word get 0,
# and white space at the end changes nothing. ROUGE-L counts a word of the reference at most once, so recall ends at 1.
#
# Seen: by default each text is the set of its words, and the ten repetitions have precision 1. Texts are cut at each
# "."; white space behind the last one becomes an empty word, so two texts that end with ".\n" or ". " have a word in
# common. `exclusive=False`, which is not in the README, counts repetitions, but then ROUGE-L counts a word of the
# reference once for each sentence of the answer that has it: three times the same sentence has a recall of 3.
#
# Why it matters: to repeat itself is what a small model does when it fails, and these scores do not show it; as a
# reward they do not stop it. A line break at the end, which models often add, lifts a short wrong answer from 0 to 0.5.
#
# Output (F1 of ROUGE-1 and ROUGE-L; by hand both are the same here):
#                                     by hand  ROUGE-1  ROUGE-L
#   the reference                       1.000    1.000    1.000
#   ten times                           0.182    1.000    1.000
#   ten times, exclusive=False          0.182    0.182    0.182
#   another word                        0.000    0.000    0.000
#   another word and a line break       0.000    0.500    0.500
#                                     by hand            ROUGE-L
#   three sentences, recall             1.000             1.000
#   the same, exclusive=False           1.000             3.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet rouge==1.0.1 || exit 2
"$work/venv/bin/python" -W ignore - <<'PY'
from collections import Counter

from rouge import Rouge

SENTENCE = "the cat sat"


def by_hand(answer: str, reference: str) -> dict[str, float]:
    """Returns recall and F1 of ROUGE-1; those of ROUGE-L too, as words in common have the same order here."""
    answer_words, reference_words = (Counter(text.replace(".", " ").split()) for text in (answer, reference))
    common = (answer_words & reference_words).total()
    return {
        "r": common / reference_words.total(),
        "f": 2 * common / (answer_words.total() + reference_words.total()),
    }


def seen(answer: str, reference: str, **options: bool) -> dict[str, dict[str, float]]:
    (scores,) = Rouge(**options).get_scores(answer, reference)
    return scores


print(f"{'':34}{'by hand':>9}{'ROUGE-1':>9}{'ROUGE-L':>9}")
for label, answer, reference, options, right in (
    ("the reference", SENTENCE, SENTENCE, {}, True),
    ("ten times", " ".join([SENTENCE] * 10), SENTENCE, {}, False),
    ("ten times, exclusive=False", " ".join([SENTENCE] * 10), SENTENCE, {"exclusive": False}, True),
    ("another word", "Paris.", "Rome.", {}, True),
    ("another word and a line break", "Paris.\n", "Rome.\n", {}, False),
):
    expected = by_hand(answer, reference)["f"]
    values = [round(seen(answer, reference, **options)[metric]["f"], 3) for metric in ("rouge-1", "rouge-l")]
    print(f"{label:34}{expected:9.3f}" + "".join(f"{value:9.3f}" for value in values))
    if right:
        assert values == [round(expected, 3)] * 2
    else:
        assert min(values) > expected + 0.4 and max(values) <= 1

print(f"{'':34}{'by hand':>9}{'':>9}{'ROUGE-L':>9}")
answer = " ".join([f"{SENTENCE}."] * 3)
for label, options, value in (
    ("three sentences, recall", {}, 1),
    ("the same, exclusive=False", {"exclusive": False}, 3),
):
    expected = by_hand(answer, SENTENCE)["r"]
    recall = seen(answer, SENTENCE, **options)["rouge-l"]["r"]
    print(f"{label:34}{expected:9.3f}{'':9}{recall:9.3f}")
    assert expected == 1 and round(recall, 6) == value
PY
