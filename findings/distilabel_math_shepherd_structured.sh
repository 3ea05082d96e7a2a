#!/usr/bin/env bash
# distilabel 1.5.3, Python 3.11: with structured output, `MathShepherdCompleter` throws all completions away
#
# Valid input: a right solution of three steps, and a model that completes its first steps N times, as text or JSON by
# the schema of the task. The documentation calls structured output the preferred way. `FormatPRM`, the next step of the
# documentation, makes rows for the training of a process reward model.
#
# Expected: a step is labelled "+" if any of its completions comes to the right answer, and "-" if none does.
#
# Seen: from text the labels are right. From JSON there is no label at all, whether all completions are right or none:
# to see whether there are N of them, the task counts the characters of all the JSON, and drops them all. From text the
# same happens if the model gives two completions instead of three, though both are right: what is missing counts as an
# empty completion, and that takes a "+" back. `FormatPRM` then takes the last character of the step for its label: it
# is cut off, and the step is wrong. At most an INFO tells of an empty completion.
#
# Why it matters: all steps but the last are trained as wrong ones, in right solutions as well, and their numbers have
# lost a digit: "3 * 12 = 36" is "3 * 12 = 3". The model was asked for N completions of each of them for nothing.
#
# Output (labels of the first two steps; what they are for training; all steps of the solution are right):
#                                   labels      for training    first step for training
#     text, 1 of 1 right            +, +        True, True      Step 1: Three boxes have 3 * 12 = 36
#     text, 0 of 1 right            -, -        False, False    Step 1: Three boxes have 3 * 12 = 36
#     text, 3 of 3 right            +, +        True, True      Step 1: Three boxes have 3 * 12 = 36
#     text, first of 3 right        +, +        True, True      Step 1: Three boxes have 3 * 12 = 36
#     text, 0 of 3 right            -, -        False, False    Step 1: Three boxes have 3 * 12 = 36
#     text, 2 of 2 right, N=3       none, none  False, False    Step 1: Three boxes have 3 * 12 = 3
#     structured, 1 of 1 right      none, none  False, False    Step 1: Three boxes have 3 * 12 = 3
#     structured, 3 of 3 right      none, none  False, False    Step 1: Three boxes have 3 * 12 = 3
#     structured, first of 3 right  none, none  False, False    Step 1: Three boxes have 3 * 12 = 3
#     structured, 0 of 3 right      none, none  False, False    Step 1: Three boxes have 3 * 12 = 3
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
# requests is imported by distilabel, but is not among its dependencies.
"$work/venv/bin/pip" install --quiet distilabel==1.5.3 datasets==5.2.0 numpy==2.4.6 scipy==1.17.1 pandas==3.1.1 \
  pyarrow==26.0.1 pydantic==2.14.4 requests==2.34.2 || exit 2
HOME="$work" OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
import copy
import json
import logging
import warnings
from typing import Any

warnings.filterwarnings("ignore", module="pydantic")  # Of default values in the package.
from distilabel.models.llms import LLM
from distilabel.steps.tasks import FormatPRM, MathShepherdCompleter

logging.disable(logging.WARNING)  # They tell that the steps are used without a pipeline.
RIGHT = "Step 3: One half of 30 is 30 / 2 = 15\nThe answer is: 15"
WRONG = "Step 3: One half of 30 is 30 / 2 = 16\nThe answer is: 16"
SOLUTION = [
    "Step 1: Three boxes have 3 * 12 = 36",
    "Step 2: Without the 6 there are 36 - 6 = 30",
    "Step 3: One half of 30 is 30 / 2 = 15",
    "The answer is: 15",
]
ROW = {
    "instruction": "A box has 12 pens. Of three boxes 6 pens are gone. How many are one half of the rest?",
    "solutions": [SOLUTION],
    "golden_solution": SOLUTION,
}


class Model(LLM):
    """Answers each question with the same text."""

    text: str
    structured_output: Any = None

    @property
    def model_name(self):
        return "model"

    def generate(self, inputs, num_generations=1, **kwargs):
        statistics = {"input_tokens": [1], "output_tokens": [1]}
        return [{"generations": [self.text], "statistics": statistics} for _ in inputs]


def labelled(completions, number, structured):
    text = "\n---\n".join(completions)
    schema = None
    if structured:
        text = json.dumps({"solutions": [{"solution": completion} for completion in completions]})
        schema = {"format": "json", "schema": {}}  # Given by hand: the model of this script needs none.
    model = Model(text=text, structured_output=schema)
    task = MathShepherdCompleter(name="completer", llm=model, N=number, use_default_structured_output=structured)
    task.load()
    return next(task.process([copy.deepcopy(ROW)]))[0]["solutions"][0]


def for_training(steps):
    step = FormatPRM(name="format", format="trl")
    step.load()
    return next(step.process([{"instruction": ROW["instruction"], "solutions": list(steps)}]))[0]


print(f"{'':32}labels      for training    first step for training")
for label, completions, number, structured in (
    ("text, 1 of 1 right", [RIGHT], 1, False),
    ("text, 0 of 1 right", [WRONG], 1, False),
    ("text, 3 of 3 right", [RIGHT] * 3, 3, False),
    ("text, first of 3 right", [RIGHT, WRONG, WRONG], 3, False),
    ("text, 0 of 3 right", [WRONG] * 3, 3, False),
    ("text, 2 of 2 right, N=3", [RIGHT] * 2, 3, False),
    ("structured, 1 of 1 right", [RIGHT], 1, True),
    ("structured, 3 of 3 right", [RIGHT] * 3, 3, True),
    ("structured, first of 3 right", [RIGHT, WRONG, WRONG], 3, True),
    ("structured, 0 of 3 right", [WRONG] * 3, 3, True),
):
    steps = labelled(completions, number, structured)
    data = for_training(steps)
    assert len(steps) == 3 and steps[2] == "Step 3: One half of 30 is 30 / 2 = 15 The answer is: 15 +"
    marks = [step[len(given):].strip() for step, given in zip(steps[:2], SOLUTION)]
    shown = [mark or "none" for mark in marks]
    truth = [str(value) for value in data["labels"][:2]]
    print(f"  {label:30}{', '.join(shown):12}{', '.join(truth):16}{data['completions'][0]}")
    if structured or len(completions) < number:
        assert marks == ["", ""] and data["labels"] == [False, False, True]
        assert data["completions"][:2] == [step[:-1] for step in SOLUTION[:2]]
    else:
        right = RIGHT in completions
        assert marks == ["+" if right else "-"] * 2 and data["labels"] == [right, right, True]
        assert data["completions"][:2] == SOLUTION[:2]
PY
