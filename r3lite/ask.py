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
    retrieve, finder = open_retriever(config)  # before the model is loaded, so that a missing index shows at once
    baseline = "none"
    if not answers_in_steps(config):
        baseline = plain_baseline(config)
        say_plain(baseline)
    session = AskSession(
        engine=build_engine(config, 1, baseline),
        retrieve=retrieve,
        finder=finder,
        seed=config.common.seed,
        as_json=config.ask.json,
    )
    if question is not None:
        session.ask(question)
        return
    for line in lines(config.ask.json):
        try:
            check_texts({"question": line})
            session.ask(line)
        except KeyboardInterrupt:
            print("\nstopped; press Ctrl-C again to exit", file=sys.stderr)
        except (R3LiteError, UsageError) as error:  # concerns this question alone, such as one that is too long
            print(f"\n{error}", file=sys.stderr)


def lines(as_json: bool) -> Iterator[str]:
    """Yields questions that are typed, or piped, up to an empty line or the end of the input."""
    from r3lite.core.terminal import printable

    with contextlib.suppress(ImportError):  # Windows has no readline, but its console keeps a history
        import readline  # noqa: F401  (once imported, it gives input() a history)
    typed = sys.stdin.isatty()
    if typed:
        print("Type a question and press Enter. An empty line ends.", file=sys.stderr)
    else:
        print("reading questions from the standard input, one on each line; an empty line ends", file=sys.stderr)
    while True:
        if typed and as_json:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        try:
            line = input(PROMPT if typed and not as_json else "")
            line = line.removeprefix("\ufeff").strip()  # a byte order mark, of a file from Windows
        except EOFError:
            line = ""
            if typed:
                print(file=sys.stderr)
        if not line:
            return
        if not typed and not as_json:
            print(f"{PROMPT}{printable(line)}")
        yield line


def plan(config: AskConfig) -> str:
    """Returns the memory that an episode takes, for `--dry-run`."""
    from r3lite.assembly.answering import check_retriever, plan_memory

    check_retriever(config)
    memory = plan_memory(config, 1)
    return f"\nMemory, for an episode of {config.lengths.max_length} tokens\n{memory.table()}"


main = command.Command("ask", AskConfig(), work=ask, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
