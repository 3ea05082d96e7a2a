"""`collect --baseline rag`, then SFT, then `evaluate --baseline rag`: a model is asked as it was trained."""

import json

import pytest

from r3lite import evaluate, sft
from r3lite.core.episode import Failure
from r3lite.core.files import shipped, write_jsonl
from r3lite.datasets.trajectories import encode_row
from r3lite.models.weights import resolve_folder
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.collecting import lines, read_rows, run
from tests.errors import shows

DATA = shipped("data", "world", "dev.jsonl")
RAG = ["--preset", "tiny", "--baseline", "rag", "--top-k", "5", "--limit", "6"]
# Documents are cut, and some do not fit.
TIGHT = ["--max-document-tokens", "40", "--max-length", "256", "--max-new-tokens", "32"]
PLAIN = {"question": "Where does Ada live?", "answers": ["Adatown", "Adatown City"]}
CORPUS = [{"id": str(i), "title": name, "text": f"{name} lives in {name}town."} for i, name in enumerate(("Ada", "Bo"))]


@pytest.fixture
def prompts(monkeypatch):
    """The prompts of evaluations in tokens, by question, as the model is given them."""
    prompt_tokens = {}
    turn_is_over = Layout.turn_is_over

    def look(layout, transcript):
        prompt_tokens.setdefault(transcript.question.id, transcript.tokens[: transcript.turn_start])
        return turn_is_over(layout, transcript)

    monkeypatch.setattr(Layout, "turn_is_over", look)
    return prompt_tokens


def test_a_model_is_asked_as_it_was_trained(prompts, tmp_path, capsys):
    assert run(DATA, tmp_path / "rag.jsonl", *RAG, *TIGHT) == 0
    steps = ["--max-steps", "2", "--validation-fraction", "0", "--max-length", "256"]
    train = ["--preset", "tiny", "--data", str(tmp_path / "rag.jsonl"), *steps]
    assert sft.main([*train, "--output", str(tmp_path / "sft")]) == 0
    flags = [*RAG, *TIGHT, "--data", str(DATA), "--encoder", "hashing"]
    assert evaluate.main([*flags, "--adapter", str(tmp_path / "sft"), "--output", str(tmp_path / "out")]) == 0
    assert "warning" not in capsys.readouterr().err

    tokenizer = Tokenizer.load(resolve_folder("tiny"))
    layout = Layout(tokenizer, build_protocol(ProtocolSettings()), LengthSettings(max_length=256))
    rows = {row.id: encode_row(row, layout) for row in read_rows(tmp_path / "rag.jsonl")}
    assert rows.keys() == prompts.keys() and len(rows) == 6
    predictions = {line["id"]: line for line in lines(tmp_path / "out" / "predictions.jsonl")}
    for id, row in rows.items():
        prompt = prompts[id]
        assert row.tokens[: len(prompt)] == prompt and not any(row.action_mask[: len(prompt)])
        trained = [token for token, has_loss in zip(row.tokens, row.action_mask) if has_loss]
        reply, end = trained[:-1], trained[-1]
        assert tokenizer.decode(reply) == predictions[id]["answers"][0] and end == tokenizer.stop_id
    document_counts = [len(line["steps"][0]["documents"]) for line in predictions.values()]
    assert min(document_counts) < 5  # else the limits would not have been tried


def test_any_question_with_an_answer_gives_a_row_with_its_first_answer(tmp_path):
    """Demonstrations in steps need a decomposition; this control is for all questions."""
    write_jsonl(tmp_path / "data.jsonl", [PLAIN, {"question": "Where does Bo live?", "answer": "Botown"}])
    write_jsonl(tmp_path / "dev.jsonl", [{"question": "where does BO live", "answer": "Botown"}])
    write_jsonl(tmp_path / "corpus.jsonl", CORPUS)
    extra_flags = ["--corpus", str(tmp_path / "corpus.jsonl"), "--exclude", str(tmp_path / "dev.jsonl")]
    assert run(tmp_path / "data.jsonl", tmp_path / "rag.jsonl", *RAG, *extra_flags) == 0
    (row,) = lines(tmp_path / "rag.jsonl")
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
    assert row["messages"][1]["content"].startswith("[1] Ada: Ada lives in Adatown.\n[2] Bo: ")
    assert row["messages"][2]["content"] == "Adatown"


def test_rows_are_not_written_over_and_none_is_an_error(tmp_path, monkeypatch, capsys):
    write_jsonl(tmp_path / "data.jsonl", [PLAIN])
    write_jsonl(tmp_path / "corpus.jsonl", CORPUS)
    arguments = [tmp_path / "data.jsonl", tmp_path / "rag.jsonl", *RAG]
    assert run(*arguments, "--retriever", "none") == 2
    assert shows(capsys.readouterr().err, "baseline-without-retriever")
    arguments += ["--corpus", str(tmp_path / "corpus.jsonl")]
    with monkeypatch.context() as patch:
        failing = lambda setup: lambda pairs: [Failure("down") for _ in pairs]  # noqa: E731
        patch.setattr("r3lite.assembly.collecting.build_retriever", failing)
        assert run(*arguments) == 1
    assert "the retriever failed  1" in capsys.readouterr().out
    assert run(*arguments) == 0
    content = (tmp_path / "rag.jsonl").read_text()
    assert run(*arguments) == 1 and shows(capsys.readouterr().err, "output-not-empty")
    assert (tmp_path / "rag.jsonl").read_text() == content and json.loads(content)["id"] == "data-1"
