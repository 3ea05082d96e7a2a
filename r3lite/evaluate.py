"""Answers a question set with retrieval and scores the answers, or compares two evaluations."""

import time
from pathlib import Path

from r3lite.core import command
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.files import sole_writer
from r3lite.settings import EvaluateConfig


def evaluate(config: EvaluateConfig) -> None:
    """Answers and scores the questions of --data, or compares the evaluations of --compare."""
    from r3lite.evaluation.folder import check_output, compare_predictions

    if config.evaluate.compare:
        compare_predictions(config.evaluate.pairs, config.common.seed, config.common.output)
        return
    if not config.data.data:
        raise UsageError(
            "--data is missing: pass a question file in any supported format, or name,subset,split", code="data-missing"
        )
    check_baseline(config)
    output = output_of(config)
    with sole_writer(output):
        check_output(config, output)
        from r3lite.assembly import evaluating  # imported after the checks: torch takes seconds to load

        evaluating.answer_and_score(config, output)


def output_of(config: EvaluateConfig) -> Path:
    """Returns the folder of the evaluation."""
    return Path(config.common.output or time.strftime("runs/evaluate-%Y%m%d-%H%M%S"))


def check_baseline(config: EvaluateConfig) -> None:
    """Raises R3LiteError for a baseline that lacks the retriever or the search that it needs."""
    from r3lite.protocols.layout import OPENINGS
    from r3lite.protocols.registry import build_protocol

    baseline = config.evaluate.baseline
    opening = OPENINGS[baseline]
    protocol = build_protocol(config.protocol, opening)
    if opening.retrieves_first and config.retrieval.retriever == "none":
        raise R3LiteError(
            f"--baseline {baseline} needs a retriever, but --retriever is none",
            "Pass another one.",
            code="baseline-without-retriever",
        )
    if opening.retrieves_first and not protocol.can_search:
        cause = f"--baseline {baseline} needs a search, but --format {config.protocol.format} has none"
        raise R3LiteError(cause, "Pass another --baseline or --format.", code="baseline-without-searches")


def plan(config: EvaluateConfig) -> str:
    """Checks what the command checks, and returns the memory of model and judge, for `--dry-run`.

    With --compare, returns "": a comparison runs no model.
    """
    from r3lite.assembly.answering import QUESTIONS_OF_DRY_RUN, plan_memory
    from r3lite.assembly.evaluating import read_setup
    from r3lite.evaluation.folder import check_comparison, check_output

    if config.evaluate.compare:
        check_comparison(config.evaluate.pairs, config.common.output)
        return ""
    check_baseline(config)
    check_output(config, output_of(config))
    count = config.data.limit or QUESTIONS_OF_DRY_RUN
    if config.data.data and Path(config.data.data).exists():
        count = len(read_setup(config).questions)
    memory = plan_memory(config, count, config.judge)
    return f"\nMemory, for episodes of {config.lengths.max_length} tokens\n{memory.table()}"


main = command.Command("evaluate", EvaluateConfig(), work=evaluate, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
