#!/usr/bin/env bash
# continuous-eval 0.3.14.post2, Python 3.11: two metrics give answers that are just as expected 0 or a half
#
# Valid input: short programs that are, to the letter, their references, for PythonASTSimilarity; and an agent that
# makes exactly the calls that are expected, in their order, for ToolSelectionAccuracy. Some calls come twice or more:
# a search for one thing and then for another (judged by the names alone, with ignore_kwargs=True), or a next page.
#
# Expected: 1. By the documentation, a similarity counts what matches in the two syntax trees, with -1 for programs that
# cannot be parsed, and the score of the calls is the number of right calls over that of the calls in the ground truth.
#
# Seen: PythonASTSimilarity compares loops, conditions, functions, classes, imports, comprehensions and returns. If a
# program has just one of these, what matches is added up but never used, and the similarity is 0, whatever the other
# program is. An unused import in both makes it 1.
#   ToolSelectionAccuracy counts the different calls that are right, but divides by all calls. What comes twice counts
# once above, and twice below: the right agent gets 0.67 or 0.5, and one that leaves calls out gets as much. With
# order_sensitive=True it is right. There is no warning.
#
# Why it matters: short scripts get the worst grade of all, below that of wrong functions (0.29 here), and the mean over
# a benchmark depends on how many of its programs are short. An agent that has to use a tool twice cannot get 1, and the
# score does not tell whether it did.
#
# Output (similarity of a program; score of an agent, and number of right calls):
#   programs
#     a function, as expected                     1.00
#     a function, another one expected            0.29
#     a loop, as expected                         0.00
#     a function that prints, as expected         0.00
#     the loop and an import, as expected         1.00
#     the loop, the import is missing             0.00
#   calls                                     unordered    ordered
#     search a, answer: as expected             1.00  2    1.00  2
#     search a, search b, answer: as expected   0.67  2    1.00  3
#     search a, answer: search b is missing     0.67  2    0.33  1
#     3 next pages, read: as expected           0.50  2    1.00  4
#     1 next page, read: 2 are missing          0.50  2    0.25  1
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet pyyaml==6.0.4 jinja2==3.1.6 json-repair==0.31.0 python-dotenv==1.0.1 \
  pydantic==2.14.4 appdirs==1.4.4 posthog==3.7.4 tqdm==4.70.1 munkres==1.1.4 thefuzz==0.22.1 || exit 2
# Without its other dependencies: they are for language models and for other metrics.
"$work/venv/bin/pip" install --quiet --no-deps continuous-eval==0.3.14.post2 || exit 2
HOME="$work" CONTINUOUS_EVAL_DO_NOT_TRACK=true OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import warnings

from continuous_eval.eval.types import ToolCall
from continuous_eval.metrics.code.python import PythonASTSimilarity
from continuous_eval.metrics.tools.match import ToolSelectionAccuracy

warnings.simplefilter("error")
RETURNS = "def total(values):\n    return sum(values)\n"
OTHER = "def total(values):\n    return max(values) + 1\n"
LOOP = "total = 0\nfor value in values:\n    total += value\n"
PRINTS = "def greet(name):\n    print(name)\n"
IMPORT = "import math\n" + LOOP

print("programs")
similarity = PythonASTSimilarity()
for label, answer, reference, seen in (
    ("a function, as expected", RETURNS, RETURNS, 1),
    ("a function, another one expected", RETURNS, OTHER, 0.29),
    ("a loop, as expected", LOOP, LOOP, 0),
    ("a function that prints, as expected", PRINTS, PRINTS, 0),
    ("the loop and an import, as expected", IMPORT, IMPORT, 1),
    ("the loop, the import is missing", LOOP, IMPORT, 0),
):
    value = similarity(answer=answer, ground_truth_answers=[reference])["Python_AST_Similarity"]
    print(f"  {label:42}{value:6.2f}")
    assert abs(value - seen) < 0.005, label

SEARCH_A = ToolCall(name="search", kwargs={"query": "who wrote it"})
SEARCH_B = ToolCall(name="search", kwargs={"query": "where was that"})
ANSWER = ToolCall(name="answer", kwargs={"text": "in Rome"})
PAGE = ToolCall(name="next_page", kwargs={})
READ = ToolCall(name="read", kwargs={})
THREE = [SEARCH_A, SEARCH_B, ANSWER]
print(f"{'calls':42}unordered    ordered")
for label, names_only, calls, expected, seen in (
    ("search a, answer: as expected", True, [SEARCH_A, ANSWER], [SEARCH_A, ANSWER], (2, 2)),
    ("search a, search b, answer: as expected", True, THREE, THREE, (2, 3)),
    ("search a, answer: search b is missing", True, [SEARCH_A, ANSWER], THREE, (2, 1)),
    ("3 next pages, read: as expected", False, [PAGE] * 3 + [READ], [PAGE] * 3 + [READ], (2, 4)),
    ("1 next page, read: 2 are missing", False, [PAGE, READ], [PAGE] * 3 + [READ], (2, 1)),
):
    line = f"  {label:40}"
    for ordered, correct in zip((False, True), seen):
        metric = ToolSelectionAccuracy(order_sensitive=ordered, ignore_kwargs=names_only)
        result = metric(tools=calls, ground_truths=expected)
        line += f"{result['score']:6.2f}{result['num_correct']:3}  "
        assert result["num_correct"] == correct and result["score"] == correct / len(expected), label
    print(line.rstrip())
PY
