"""Asks a trained model: streams its reasoning, the documents of its queries, and the answer."""

import contextlib
import io
import sys
from collections.abc import Iterator

from r3lite.core import command
from r3lite.core.errors import R3LiteError, UsageError
from r3lite.core.invocation import check_texts
from r3lite.settings import AskConfig

PROMPT = "question> "


def ask(config: AskConfig) -> None:
    """Answers --question, or without it the questions that are typed or piped."""
    question = config.ask.question
    if question is not None and not question.strip():
        raise UsageError("the question is empty", code="question-empty")

    from r3lite.assembly.answering import answers_in_steps, build_engine, open_retriever, plain_baseline
    from r3lite.assembly.asking import AskSession, say_plain

    sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `check_texts` refuses a line with bytes of another encoding
    # Opened before the model is loaded, so that a missing index is reported at once.
    retrieve, procedure_finder = open_retriever(config)
    baseline = "none"
    if not answers_in_steps(config):
        baseline = plain_baseline(config)
        say_plain(baseline)
    session = AskSession(
        engine=build_engine(config, questions=1, baseline=baseline),
        retrieve=retrieve,
        finder=procedure_finder,
        seed=config.common.seed,
        as_json=config.ask.json,
    )
    if question is not None:
        session.ask(question)
        return
    for next_question in questions_of_stdin(config.ask.json):
        try:
            check_texts({"question": next_question})
            session.ask(next_question)
        except KeyboardInterrupt:
            print("\nstopped; press Ctrl-C again to exit", file=sys.stderr)
        except (R3LiteError, UsageError) as error:  # about this question only: it is too long, for example
            print(f"\n{error}", file=sys.stderr)


def questions_of_stdin(as_json: bool) -> Iterator[str]:
    """Yields the lines of stdin, typed or piped, until an empty line or the end.

    With `as_json`, stdout has nothing but JSON: prompts go to stderr, and piped questions are not printed.
    """
    from r3lite.core.terminal import printable

    with contextlib.suppress(ImportError):  # Windows has no readline, but its console keeps a history
        import readline  # noqa: F401  (once imported, it gives input() a history)
    is_typed = sys.stdin.isatty()
    prompt_of_input = PROMPT if is_typed and not as_json else ""  # `input` prints it on stdout
    if is_typed:
        print("Type a question and press Enter. An empty line ends.", file=sys.stderr)
    else:
        print("reading questions from the standard input, one on each line; an empty line ends", file=sys.stderr)
    while True:
        if is_typed and as_json:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        try:
            line = input(prompt_of_input)
            line = line.removeprefix("\ufeff").strip()  # a file from Windows may begin with a byte order mark
        except EOFError:
            line = ""
            if is_typed:
                print(file=sys.stderr)
        if not line:
            return
        if not (is_typed or as_json):
            print(f"{PROMPT}{printable(line)}")
        yield line


def plan(config: AskConfig) -> str:
    """Checks the retriever, and returns the memory that an episode takes, for `--dry-run`."""
    from r3lite.assembly.answering import check_retriever, plan_memory

    check_retriever(config)
    memory = plan_memory(config, 1)
    return f"\nMemory, for an episode of {config.lengths.max_length} tokens\n{memory.table()}"


main = command.Command("ask", AskConfig(), work=ask, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
