"""`ask` with a scripted tiny model: what is shown, the JSON, the prompt, and what is refused."""

import builtins
import io
import json
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch

from r3lite import ask, quickstart
from r3lite.assembly import asking, stages
from r3lite.assembly.answering import answers_in_steps, open_retriever
from r3lite.core.episode import CUT_OFF, Document, Episode, Question, Search, Step
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.core.invocation import resolve
from r3lite.protocols.layout import Layout
from r3lite.protocols.r3 import FAULTS
from r3lite.retrieval.index import PassageIndex
from r3lite.rollout.engine import Engine
from tests.evaluating import token_of

CITY = "\u6771\u4eac"
QUERY = f"Step 1:\nThe problem analysis: I look for {CITY}.\nThe retrieval query: Ada lives in which city?"
ANSWER = f"Step 2:\nThe problem analysis: That says it.\nThe final answer: Caf\u00e9 {CITY}"
SCRIPT = {
    "Where does Ada live?": [QUERY, ANSWER],
    "Who is Bob?": ["Step 1:\nThe problem analysis: I know.\nThe final answer: a friend"],
    "What is this?": ["I do not know."],
    "Is Ada old?": ["Oslo\nIt is a town.", "Oslo\nIt is a town."],  # the second if a search is its first step
}


class Typed(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Arguments of a tiny model that says what SCRIPT has for a question."""
    texts = {"Ada": f"Ada lives in {CITY}. " + "She likes it there. " * 9, "Bob": "Bob is\ta\x1b[31mfriend."}
    write_jsonl(tmp_path / "corpus.jsonl", [{"id": f"d-{t}", "title": t, "text": text} for t, text in texts.items()])

    def sample(engine, logits, batch):
        tokens = []
        for sequence, depth in zip(batch.sequences, batch.depths, strict=True):
            turn = SCRIPT[sequence.question.text][len(sequence.steps)]
            tokens.append(token_of(engine.layout.tokenizer, turn, len(sequence.turn) + depth))
        return torch.tensor(tokens), torch.zeros(len(tokens))

    monkeypatch.setattr(Engine, "_sample", sample)
    return ["--preset", "tiny", "--corpus", str(tmp_path / "corpus.jsonl"), "--dtype", "fp32", "--steps", "on"]


def output_of(capsys, argv, status=0):
    assert ask.main(argv) == status
    return capsys.readouterr()


def test_reasoning_evidence_and_answer_are_shown(arguments, capsys):
    captured = output_of(capsys, ["Where does Ada live?", *arguments])
    lines = captured.out.splitlines()
    assert lines[:3] == QUERY.splitlines()
    assert lines[3].startswith(f"  [d-Ada] Ada: Ada lives in {CITY}. She likes it") and lines[4].endswith(" ...")
    assert lines[5] == "  [d-Bob] Bob: Bob is a [31mfriend."  # nothing that steers a terminal
    assert lines[6] == "" and lines[7:10] == ANSWER.splitlines()
    assert lines[-2:] == [f"answer: Caf\u00e9 {CITY}", ""] and set(lines[-3]) == {"-"}
    assert all(len(line) <= 80 for line in lines)
    assert "step format" not in captured.err


def test_a_model_that_has_not_learned_the_steps_answers_by_plain_rag(arguments, tmp_path, capsys, monkeypatch):
    """Asked with the prompt of steps, it copied names from the prompt's worked example."""
    prompts = []
    opened = Layout.splice

    def splice(layout, transcript, documents):
        opened(layout, transcript, documents)
        prompts.append(layout.tokenizer.decode(transcript.tokens))

    monkeypatch.setattr(Layout, "splice", splice)
    row = {"name": "N", "description": "d", "trigger": "old", "steps": [{"action": "Think"}]}
    (tmp_path / "p.json").write_text(json.dumps(row))
    auto = [*arguments[:-2], "--procedures", str(tmp_path / "p.json"), "--procedures-by", "triggers"]
    captured = output_of(capsys, ["Is Ada old?", *auto])
    assert "this is plain RAG" in captured.err and "Pass --adapter RUN" in captured.err
    lines = captured.out.splitlines()
    assert lines[:3] == ["Procedure: N. d", "1. Think", ""]
    assert sum(line.startswith(("  [d-Ada] Ada: ", "  [d-Bob] Bob: ")) for line in lines) == 2
    assert lines[-2:] == ["answer: Oslo", ""]
    (prompt,) = prompts
    assert "Use the documents." in prompt and "Step 1" not in prompt
    assert prompt.index("Procedure: N. d") < prompt.index("[1] ") < prompt.index("Question: Is Ada old?")
    trace = json.loads(output_of(capsys, ["--json", "Is Ada old?", *auto]).out)["reasoning_trace"]
    assert trace == "Oslo\nIt is a town."  # it began with a line break, of the search before the first turn
    without = [word for word in arguments[:-2] if word not in ("--corpus", arguments[3])]
    captured = output_of(capsys, ["Is Ada old?", *without, "--retriever", "none"])
    assert "without documents" in captured.err and captured.out.endswith("answer: Oslo\n(no document was read)\n\n")


def test_a_model_is_known_to_have_learned_the_steps_by_its_run_or_its_export(tmp_path):
    def in_steps(*argv):
        return answers_in_steps(resolve("ask", ask.AskConfig(), ["--preset", "tiny", *argv]))

    assert in_steps("--adapter", "runs/sft") and not in_steps("--adapter", "runs/sft", "--steps", "off")
    assert not in_steps() and in_steps("--steps", "on")
    (tmp_path / "model.gguf").write_bytes(b"")
    (tmp_path / "README.md").write_text("# tiny, exported by r3lite\n")
    assert not in_steps("--model", str(tmp_path))
    (tmp_path / "README.md").write_text("# tiny, trained with r3lite\n")
    assert in_steps("--model", str(tmp_path)) and in_steps("--model", str(tmp_path / "model.gguf"))


def test_the_procedure_that_fits_is_shown_and_given_to_the_model(arguments, tmp_path, capsys, monkeypatch):
    rows = [{"name": "People", "description": "who they are", "trigger": "bob", "steps": [{"action": "Think"}]}]
    (tmp_path / "p.json").write_text(json.dumps(rows))
    prompts = []
    opened = Layout.open

    def opening(layout, transcript):
        opened(layout, transcript)
        prompts.append(layout.tokenizer.decode(transcript.tokens))

    monkeypatch.setattr(Layout, "open", opening)
    argv = [*arguments, "--procedures", str(tmp_path / "p.json"), "--encoder", "hashing"]
    text = "Procedure: People. who they are\n1. Think\n\n"
    assert output_of(capsys, ["Who is Bob?", *argv]).out.startswith(f"{text}Step 1:")
    assert output_of(capsys, ["Where does Ada live?", *argv]).out.startswith("Step 1:")
    assert f"user\n{text}" in prompts[0] and text not in prompts[1]
    assert json.loads(output_of(capsys, ["--json", "Who is Bob?", *argv]).out)["final_answer"] == "a friend"


def test_what_is_shown_comes_while_it_is_sampled(arguments, capsys, monkeypatch):
    """The first words are out before the documents are looked for."""
    out = []

    def search(index, *args):
        out.append(capsys.readouterr().out)
        return real(index, *args)

    real = PassageIndex.search
    monkeypatch.setattr(PassageIndex, "search", search)
    output_of(capsys, ["Where does Ada live?", *arguments])
    assert out == [QUERY]


def test_json_is_one_line_with_the_text_that_was_streamed(arguments, capsys):
    streamed = output_of(capsys, ["Where does Ada live?", *arguments]).out
    (line,) = output_of(capsys, ["--json", *arguments, "Where does Ada live?"]).out.splitlines()
    record = json.loads(line)
    assert list(record) == ["question", "final_answer", "reasoning_trace", "search_queries", "documents"]
    assert record["question"] == "Where does Ada live?" and record["final_answer"] == f"Caf\u00e9 {CITY}"
    assert record["reasoning_trace"] == f"{QUERY}\n{ANSWER}" and record["search_queries"] == [
        "Ada lives in which city?"
    ]
    assert [d["id"] for d in record["documents"]] == ["d-Ada", "d-Bob"]
    assert all(turn in streamed for turn in record["reasoning_trace"].split("\nStep"))


def test_piped_questions_are_answered_up_to_an_empty_line(arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Where does Ada live?\nWho is Bob?\n\nWhat is this?\n"))
    records = [json.loads(line) for line in output_of(capsys, ["--json", *arguments]).out.splitlines()]
    assert [r["final_answer"] for r in records] == [f"Caf\u00e9 {CITY}", "a friend"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who is Bob?"))
    assert output_of(capsys, arguments).out.startswith("question> Who is Bob?\nStep 1:\n")


def test_a_line_that_is_not_utf8_concerns_this_question_alone(arguments, capsys, monkeypatch):
    """It ended all with Python's UnicodeDecodeError, and a byte order mark was a part of the first question."""
    content = "\ufeffWho is Bob?\r\n".encode() + b"caf\xe9?\nWho is Bob?\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline="\n"))
    captured = output_of(capsys, ["--json", *arguments])
    assert "bytes that are not UTF-8" in captured.err
    assert [json.loads(line)["question"] for line in captured.out.splitlines()] == ["Who is Bob?", "Who is Bob?"]


@pytest.mark.parametrize("as_json", [False, True])
def test_without_a_question_it_says_that_it_waits_for_one_and_how_to_end(monkeypatch, capsys, as_json):
    """With an input that was not closed, such as a service's, it waited without a word."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n"))
    assert list(ask.questions_of_stdin(as_json)) == ["Who?"]
    assert (
        capsys.readouterr().err == "reading questions from the standard input, one on each line; an empty line ends\n"
    )
    monkeypatch.setattr(sys, "stdin", Typed("\n"))
    assert list(ask.questions_of_stdin(as_json)) == []
    assert capsys.readouterr().err.startswith("Type a question and press Enter. An empty line ends.\n")


def test_the_prompt_of_json_is_not_on_stdout(arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Typed("Who is Bob?\n"))
    captured = output_of(capsys, ["--json", *arguments])
    assert len(captured.out.splitlines()) == 1 and captured.err.count("question> ") == 2
    monkeypatch.setattr(sys, "stdin", Typed("Who is Bob?\n"))
    captured = output_of(capsys, arguments)
    assert captured.out.count("question> ") == 2 and "question> " not in captured.err


def test_ctrl_c_stops_an_answer_and_twice_ends(arguments, capsys, monkeypatch):
    scripted = Engine._sample
    calls = []

    def sample(engine, logits, batch):
        calls.append(batch.sequences[0].question.text)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return scripted(engine, logits, batch)

    def typed(prompt):
        if not questions:
            raise KeyboardInterrupt
        return questions.pop(0)

    monkeypatch.setattr(Engine, "_sample", sample)
    questions = ["Where does Ada live?", "Who is Bob?", "Where does Ada live?"]
    monkeypatch.setattr(builtins, "input", typed)
    captured = output_of(capsys, arguments, status=130)
    assert captured.err.count("stopped; press Ctrl-C again to exit") == 1
    assert captured.out.count("answer: ") == 4  # "The final answer: " and the answer itself, of two questions
    assert captured.out.endswith(f"answer: Caf\u00e9 {CITY}\n\n")


def test_a_retriever_that_failed_is_shown_as_such(arguments, capsys, monkeypatch):
    def search(*_):
        raise R3LiteError("the disk is gone", code="broken")

    monkeypatch.setattr(PassageIndex, "search", search)
    stdout = output_of(capsys, ["Where does Ada live?", *arguments]).out
    assert f"{QUERY}\n  no documents: the retriever failed: the disk is gone\n" in stdout
    record = json.loads(output_of(capsys, ["Where does Ada live?", *arguments, "--json"]).out)
    assert record["failure"] == "the disk is gone"
    searching = arguments.index("--corpus")
    without = [*arguments[:searching], *arguments[searching + 2 :], "--retriever", "none"]
    stdout = output_of(capsys, ["Where does Ada live?", *without]).out
    assert f"{QUERY}\n  (nothing was found)\n" in stdout


def test_an_answer_from_the_weights_alone_is_marked(arguments, capsys):
    assert output_of(capsys, ["Who is Bob?", *arguments]).out.endswith("answer: a friend\n(no document was read)\n\n")


def test_an_episode_without_an_answer_says_why(arguments, capsys):
    out = output_of(capsys, ["What is this?", *arguments]).out
    assert out.startswith("I do not know.\n\nno answer: step 1 does not open with `Step k:`, has no problem analysis")
    full = Episode(Question("q", "x", ()), [Step.asking("so", "y")], CUT_OFF)
    assert asking.outcome(full, FAULTS) == "no answer: step 1 had no room left within --max-length\n"


def test_a_question_that_is_too_long_leaves_the_prompt_usable(arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'why ' * 2000}\nWho\0?\nWho is Bob?\n"))
    captured = output_of(capsys, ["--json", *arguments])
    assert "leaves no room for an answer" in captured.err and "contains NUL" in captured.err
    assert json.loads(captured.out)["final_answer"] == "a friend"


@pytest.mark.parametrize(
    ("argv", "status", "cause"),
    [
        ([""], 2, "question is empty"),
        (["  "], 2, "the question is empty"),
        (["who?"], 2, "--index is missing"),
        (["who?", "--retriever", "golden"], 2, "need the questions of a data set"),
        (["who?", "--retriever", "none", "--output", "x"], 2, "--output is x, but has no effect"),
        (["who?", "--index", "no-such-folder"], 1, "python -m r3lite.index --documents FOLDER (or --corpus"),
        (["who", "is", "it?"], 2, "unknown argument is; a value stands after its flag, and a text of several words in"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(argv, status, cause, capsys, monkeypatch):
    monkeypatch.setattr("r3lite.assembly.answering.build_engine", lambda *_: pytest.fail("the model was loaded"))
    assert cause in output_of(capsys, ["--preset", "tiny", *argv], status).err


def test_a_format_without_search_needs_no_index():
    config = resolve("ask", ask.AskConfig(), ["x", "--format", "solution"])
    assert open_retriever(config)[0]([(Question("q", "x", ()), "x")]) == [[]]


def test_a_dry_run_tells_the_memory(capsys):
    out = output_of(capsys, ["--preset", "tiny", "--retriever", "none", "--dry-run"]).out
    assert "Memory, for an episode of 1536 tokens" in out


@pytest.mark.parametrize("text", ["word " * 60, "x" * 300, "\u6771" * 300, "\x1b[2J\x9b\n" * 40])
def test_a_passage_takes_two_lines(text):
    lines = asking.summary(Document("17", "Title", text)).splitlines()
    assert 1 <= len(lines) <= 2 and all(len(line) <= 80 and line.isprintable() for line in lines)
    assert lines[0].startswith("  [17] Title: ") and lines[0].strip() != "[17] Title:"


def test_the_command_that_quickstart_names_is_understood(tmp_path, capsys):
    stages.print_what_next(tmp_path / "my runs", quickstart.QuickstartConfig())
    line = next(line for line in capsys.readouterr().out.splitlines() if "r3lite.ask" in line)
    python, m, module, *argv = shlex.split(line)
    assert (python, m, module) == ("python", "-m", "r3lite.ask")
    config = resolve("ask", ask.AskConfig(), argv)
    assert config.ask.question == "Who is married to the composer of Jelsan Janli?"
    assert config.model.adapter == str(tmp_path / "my runs" / "reinforce++-baseline") and config.common.preset == "tiny"
    assert config.retrieval.index == str(tmp_path / "my runs" / "index")


@pytest.mark.parametrize(
    ("failure", "last_line"), [(None, "  (nothing was found)"), ("gone", "  no documents: the retriever failed: gone")]
)
def test_the_nodes_of_a_plan_are_shown_with_their_sources(failure, last_line):
    """The queries of later nodes are not what the model wrote: answers are filled in."""
    document = Document("1", "Oslo", "A city.")
    step = Step("A: Ann", (Search("Where was Ann born?", (document,), "News"), Search("Her film?", (), "General")))
    sequence = SimpleNamespace(steps=[step], failure=failure)
    lines = ["Where was Ann born? (News):", "  [1] Oslo: A city.", "Her film? (General):", last_line]
    assert asking.evidence(sequence) == "".join(f"{line}\n" for line in lines)
    assert asking.evidence(SimpleNamespace(steps=[Step("I know.", answer="x")], failure=None)) == ""
    # The failure may be that of an earlier step.
    later = SimpleNamespace(steps=[Step.asking("a", "Where?", [document])], failure="gone")
    assert asking.evidence(later) == "  [1] Oslo: A city.\n"
