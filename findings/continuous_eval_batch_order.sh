#!/usr/bin/env bash
# continuous-eval 0.3.14.post2, Python 3.11: `batch` and `EvaluationRunner` give the results in an order of their own
#
# Valid input: 60 short programs, each with a reference; every second one is its reference, the others have one term
# more. Two metrics of the package, CodeStringMatch and PythonASTSimilarity, called for each program, with `batch`, and
# with `EvaluationRunner` as in the readme.
#
# Expected: result i belongs to program i, as with calls one by one; a row of `results` has the metrics of one program.
#
# Seen: with two or more workers, and there is one for each core, `batch` returns the results in the order in which a
# set of finished tasks happens to yield them. Nothing tells which program a result belongs to. The rows of `results`
# (and of `to_pandas`) join the metrics by their place, each in its own order: half of the programs that are their
# reference are in a row that says that their syntax trees differ from it. There is no warning. On one core, or with
# CONTINUOUS_EVAL_DISABLE_MULTIPROCESSING, all is right. Means over all programs are right as well.
#
# Why it matters: to look at the worst answers, to compare two systems question by question, or to relate retrieval to
# answers, results are put beside the questions. They are those of other questions, and any correlation is lost.
#
# Output of one run (with 2 workers, the numbers differ from run to run): results that are those of their program; rows
# of programs that are their reference, with trees that are not alike:
#                         at their place  exact but not alike
#     workers: 1              60 of 60             0 of 30
#     workers: 2              24 of 60            17 of 30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet pyyaml==6.0.4 jinja2==3.1.6 json-repair==0.31.0 python-dotenv==1.0.1 \
  pydantic==2.14.4 appdirs==1.4.4 posthog==3.7.4 tqdm==4.70.1 munkres==1.1.4 thefuzz==0.22.1 || exit 2
# Without its other dependencies: they are for language models and for other metrics.
"$work/venv/bin/pip" install --quiet --no-deps continuous-eval==0.3.14.post2 || exit 2
HOME="$work" CONTINUOUS_EVAL_DO_NOT_TRACK=true OMP_NUM_THREADS=1 "$work/venv/bin/python" - <<'PY'
from continuous_eval.eval import Dataset, EvaluationRunner, SingleModulePipeline
from continuous_eval.metrics.code.python import CodeStringMatch, PythonASTSimilarity

ANSWERS = 60


def program(terms):
    return "def total(a):\n    return " + " + ".join(["a"] * terms) + "\n"


def main():
    # Every second answer is the reference itself; each of the others has one term more.
    references = [program(number + 2) for number in range(ANSWERS)]
    answers = [program(number + 2 + number % 2) for number in range(ANSWERS)]
    rows = [{"answer": answer, "references": [reference]} for answer, reference in zip(answers, references)]
    metric = CodeStringMatch()
    single = [metric(answer=row["answer"], ground_truth_answers=row["references"]) for row in rows]
    names = {"answer": [row["answer"] for row in rows], "ground_truth_answers": [row["references"] for row in rows]}
    print(f"{'':20}at their place  exact but not alike")
    for workers in (1, 2):
        metrics = [CodeStringMatch(), PythonASTSimilarity()]
        for metric in metrics:
            metric.max_workers = workers  # As many as there are cores, if it is not set.
            metric.show_progress = False
        batch = metrics[0].batch(**names)
        dataset = Dataset.from_data([dict(row) for row in rows])
        used = [metric.use(answer=dataset.answer, ground_truth_answers=dataset.references) for metric in metrics]
        results = EvaluationRunner(SingleModulePipeline(dataset=dataset, eval=used)).evaluate().results["eval"]
        placed = sum(one == other for one, other in zip(single, batch))
        mixed = sum(row["Exact_Match_Score"] == 1 and row["Python_AST_Similarity"] < 1 for row in results)
        print(f"  {f'workers: {workers}':18}{placed:8} of {ANSWERS}{mixed:14} of {ANSWERS // 2}")
        exact = [row["Exact_Match_Score"] for row in results]
        assert len(results) == ANSWERS and sum(exact) == ANSWERS // 2
        assert sorted(map(str, batch)) == sorted(map(str, single))
        assert (placed == ANSWERS and mixed == 0) == (workers == 1)


if __name__ == "__main__":
    main()
PY
