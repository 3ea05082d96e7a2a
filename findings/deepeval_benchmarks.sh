#!/usr/bin/env bash
# deepeval 4.3.1, Python 3.11: HumanEval does not call its tests, and IFEval counts what it does not know as followed
#
# Valid input: HumanEval and IFEval with models that return fixed answers. The problems are made up, in the form of the
# data sets: in openai_humaneval the test is a function `check(candidate)`; in google/IFEval the instructions have 25
# names, of which each prompt here has one.
#
# Expected: a sample is right if `check` passes for it; pass@1 of a problem is its part of right samples, and
# overall_accuracy the mean of that over the problems. The answer "No, sorry." follows none of the 25 instructions.
#
# Seen: HumanEval executes a sample and the definition of `check`, but never calls it. Each sample that runs is right.
# One that imports a module does not run, as there is no `__import__` where it is executed, so it is wrong whatever it
# does. overall_accuracy is the part of problems with any such sample, for each k. IFEval knows nine of the 25 names; it
# expects keywords:must_include, for example, where the data have keywords:existence. 15 of the others count as followed
# whatever the answer is, and language:response_language as not followed, in any language.
#
# Why it matters: the numbers look like those of a good model and follow the syntax of its samples. To select a model or
# a checkpoint by them is to select by something else. A change of 2026 that was to run the tests still does not call
# them.
#
# Output (10 samples of one problem; right is their number by hand):
#   HumanEval                      right  pass@1 by hand  pass@1 seen  overall_accuracy
#   right                             10             1.0          1.0               1.0
#   wrong sum                          0             0.0          1.0               1.0
#   "pass"                             0             0.0          1.0               1.0
#   right, with an import             10             1.0          0.0               0.0
#   one wrong sum, nine broken         0             0.0          0.1               1.0
#   IFEval                                          by hand             overall_accuracy
#   "No, sorry." for 25 instructions                   0.00                         0.60
#   German for the instruction to use it               1.00                         0.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet deepeval==4.3.1 datasets==4.4.1 huggingface-hub==0.36.0 click==8.3.1 \
    pandas==2.3.3 numpy==2.4.6 || exit 2
cd "$work"
DEEPEVAL_TELEMETRY_OPT_OUT=YES "$work/venv/bin/python" -W ignore - <<'PY'
import contextlib
import io

from datasets import Dataset, disable_progress_bars
from deepeval.benchmarks import HumanEval, IFEval
from deepeval.benchmarks.tasks import HumanEvalTask
from deepeval.models import DeepEvalBaseLLM

disable_progress_bars()


class Fixed(DeepEvalBaseLLM):
    """A model with fixed samples."""

    def __init__(self, samples):
        self.samples = samples

    def load_model(self):
        return self

    def get_model_name(self):
        return "fixed"

    def generate(self, prompt):
        return self.samples[0]

    async def a_generate(self, prompt):
        return self.samples[0]

    def generate_samples(self, prompt, n, temperature):
        return self.samples[:n]


def evaluate(benchmark, samples, **options):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return benchmark.evaluate(Fixed(samples), **options).overall_accuracy


TEST = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n"
PROBLEM = {
    "task_id": "HumanEval/53",
    "prompt": 'def add(x, y):\n    """Returns the sum of x and y."""\n',
    "entry_point": "add",
    "canonical_solution": "    return x + y\n",
    "test": TEST,
}


def is_right(sample):
    try:
        exec(f"{sample}\n{TEST}\ncheck(add)", {})
    except Exception:
        return False
    return True


print(f"{'HumanEval':30}{'right':>6}{'pass@1 by hand':>16}{'pass@1 seen':>13}{'overall_accuracy':>18}")
right, wrong = "def add(x, y):\n    return x + y\n", "def add(x, y):\n    return 7\n"
for label, samples, expected in (
    ("right", [right] * 10, (10, 1.0, 1.0)),
    ("wrong sum", [wrong] * 10, (0, 1.0, 1.0)),
    ('"pass"', ["pass"] * 10, (0, 1.0, 1.0)),
    ("right, with an import", [f"import math\n\n{right}"] * 10, (10, 0.0, 0.0)),
    ("one wrong sum, nine broken", [wrong] + ["def add(x, y) return x"] * 9, (0, 0.1, 1.0)),
):
    benchmark = HumanEval(tasks=[HumanEvalTask.ADD], n=10, dataset={"test": Dataset.from_list([PROBLEM])})
    overall = evaluate(benchmark, samples, k=1)
    count = sum(map(is_right, samples))
    (score,) = benchmark.predictions["Score"]
    print(f"{label:30}{count:6}{count / 10:16.1f}{score:13.1f}{overall:18.1f}")
    assert (count, round(score, 6), overall) == expected

AT_LEAST = {"relation": "at least"}
INSTRUCTIONS = {
    "keywords:existence": {"keywords": ["river"]},
    "keywords:frequency": {"keyword": "river", "frequency": 2, **AT_LEAST},
    "keywords:forbidden_words": {"forbidden_words": ["sorry"]},
    "keywords:letter_frequency": {"letter": "z", "let_frequency": 3, "let_relation": "at least"},
    "language:response_language": {"language": "de"},
    "length_constraints:number_sentences": {"num_sentences": 3, **AT_LEAST},
    "length_constraints:number_paragraphs": {"num_paragraphs": 2},
    "length_constraints:number_words": {"num_words": 50, **AT_LEAST},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "river"},
    "detectable_content:number_placeholders": {"num_placeholders": 2},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "detectable_format:constrained_response": {},
    "detectable_format:number_highlighted_sections": {"num_highlights": 2},
    "detectable_format:multiple_sections": {"section_spliter": "SECTION", "num_sections": 2},
    "detectable_format:json_format": {},
    "detectable_format:title": {},
    "combination:two_responses": {},
    "combination:repeat_prompt": {"prompt_to_repeat": "Name a river."},
    "startend:end_checker": {"end_phrase": "Any questions?"},
    "startend:quotation": {},
    "change_case:capital_word_frequency": {"capital_frequency": 3, "capital_relation": "at least"},
    "change_case:english_capital": {},
    "change_case:english_lowercase": {},
    "punctuation:no_comma": {},
}


def accuracy(names, answer):
    rows = [{"prompt": name, "instruction_id_list": [name], "kwargs": [INSTRUCTIONS[name]]} for name in names]
    return evaluate(IFEval(dataset={"train": rows}), [answer])


print(f"{'IFEval':47}{'by hand':>8}{'overall_accuracy':>29}")
for label, names, answer, by_hand, expected in (
    ('"No, sorry." for 25 instructions', list(INSTRUCTIONS), "No, sorry.", 0, 0.6),
    ("German for the instruction to use it", ["language:response_language"], "Nein, leider nicht.", 1, 0),
):
    value = accuracy(names, answer)
    print(f"{label:47}{by_hand:8.2f}{value:29.2f}")
    assert round(value, 6) == expected
PY
