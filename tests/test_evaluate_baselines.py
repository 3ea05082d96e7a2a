"""`evaluate --baseline rag`, `closed-book` and `gold`: what is asked, how it is scored, and what is refused."""

import json

import pytest

from r3lite import evaluate, report
from r3lite.assembly import evaluating
from r3lite.core.files import write_jsonl
from r3lite.protocols.layout import OPENINGS, Layout
from r3lite.retrieval.setup import Setup
from r3lite.settings.commands import BASELINES
from tests.cold_start import WORLD
from tests.errors import shows
from tests.evaluating import read_results

NAMES = ("Ada", "Bob", "Cy")
ASKED = "Question: Where does {} live?\nAnswer with a short phrase or a name only, no explanation."
TURN = "<|im_start|>system\nYou answer questions.{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def prompts(monkeypatch):
    """The prompts of the next evaluation as text, by question, when the model is about to answer."""
    prompt_texts = {}
    turn_is_over = Layout.turn_is_over

    def look(layout, transcript):
        prompt = layout.tokenizer._marked.decode(transcript.tokens[: transcript.turn_start], skip_special_tokens=False)
        prompt_texts.setdefault(transcript.question.id, prompt)
        return turn_is_over(layout, transcript)

    monkeypatch.setattr(Layout, "turn_is_over", look)
    return prompt_texts


@pytest.mark.parametrize(
    ("baseline", "system", "searches", "recall"),
    [("rag", " Use the documents.", 1, 0.5), ("gold", " Use the documents.", 1, 1.0), ("closed-book", "", 0, 0.0)],
)
def test_what_is_asked_and_how_it_is_scored(toy, says, prompts, tmp_path, baseline, system, searches, recall):
    says({name: [f"\n{name}town\nThat is all."] * 2 for name in NAMES[:2]} | {"Cy": ["", " "]})
    assert evaluate.main([*toy, "--baseline", baseline, "--top-k", "1"]) == 0
    scores, predictions = read_results(tmp_path / "out")
    for line in predictions:
        documents = line["steps"][0].get("documents", [])
        context = "".join(f"[{i}] {d['title']}: {d['text']}\n" for i, d in enumerate(documents, 1))
        assert prompts[line["id"]] == TURN.format(system, context + "\n" * searches + ASKED.format(line["id"]))
        assert len(line["steps"]) == 1 + searches and len(documents) == searches * (2 if baseline == "gold" else 1)
    assert [p["prediction"] for p in predictions] == ["Adatown", "Bobtown", ""]
    values = [scores[name]["value"] for name in ("em", "mean_searches", "format_adherence")]
    well_formed = (2 + 3 * searches) / (3 + 3 * searches)  # a blank reply is a fault
    assert values == pytest.approx([2 / 3, searches, well_formed])
    assert scores["finish"] == {"answered": 2, "malformed": 1}
    assert [p["recall"] for p in predictions[:2]] == [recall] * 2
    assert all(("query" in p["steps"][0]) == bool(searches) for p in predictions)
    assert f'baseline = "{baseline}"' in (tmp_path / "out" / "config.toml").read_text()
    assert evaluate.main(["--config", str(tmp_path / "out" / "config.toml"), "--output", str(tmp_path / "again")]) == 0
    assert read_results(tmp_path / "again") == (scores, predictions)


def test_a_system_message_of_ones_own_and_any_preset(toy, prompts, capsys):
    flags = ["--system-prompt", "Be brief.", "--preset", "search-r1", "--max-new-tokens", "4"]
    assert evaluate.main([*toy, *flags, "--baseline", "closed-book"]) == 0
    assert prompts["Bob"].startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_an_adapter_is_asked_as_the_base_is(cold, prompts, tmp_path, capsys):
    """What format it was trained on plays no role, and nothing is warned of."""
    data = ["--data", str(WORLD / "dev.jsonl"), "--limit", "3", "--index", str(cold / "index"), "--encoder", "hashing"]
    run = ["--preset", "tiny", *data, "--baseline", "rag", "--max-new-tokens", "16"]
    assert evaluate.main([*run, "--output", str(tmp_path / "base")]) == 0
    base_prompts = dict(prompts)
    prompts.clear()
    assert evaluate.main([*run, "--adapter", str(cold / "sft"), "--output", str(tmp_path / "trained")]) == 0
    assert "warning" not in capsys.readouterr().err
    assert prompts == base_prompts and len(prompts) == 3
    base, trained = (read_results(tmp_path / name)[1] for name in ("base", "trained"))
    assert [p["prediction"] for p in base] != [p["prediction"] for p in trained]
    assert [p["steps"][0] for p in base] == [p["steps"][0] for p in trained]


def test_no_corpus_is_read_where_nothing_is_searched(toy, says, monkeypatch):
    says({name: ["x"] * 2 for name in NAMES})
    monkeypatch.setattr(Setup, "documents", property(lambda _: pytest.fail("a corpus was read")))
    for baseline in ("closed-book", "gold"):
        assert evaluate.main([*toy, "--baseline", baseline, "--output", f"{toy[5]}-{baseline}"]) == 0


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ("rag --retriever none", 1, "--baseline rag needs a retriever, but --retriever is none"),
        ("rag --format tags", 2, "--format is tags, but has no effect here: it needs a --baseline with steps"),
        ("gold --init-prompt mine.txt", 2, "--init-prompt is mine.txt, but has no effect"),
        ("closed-book --verification", 2, "--verification is True, but has no effect"),
        ("closed-book --procedures p.json", 2, "--procedures is p.json, but has no effect"),
        ("closed-book --retriever lexical", 2, "--retriever is lexical, but has no effect"),
        ("closed-book --rerank auto", 2, "--rerank is auto, but has no effect"),
        ("gold --retriever lexical", 2, "--retriever is lexical, but has no effect"),
        ("rag --max-hops 3", 2, "--max-hops is 3, but has no effect"),
        ("rag --max-length 200", 1, "has no room for question Ada with a document"),
    ],
)
def test_what_a_baseline_does_not_use_is_refused(toy, tmp_path, capsys, flags, status, message):
    argv = [*toy, *f"--baseline {flags}".split()]
    assert evaluate.main(argv) == status
    assert message in capsys.readouterr().err and not (tmp_path / "out" / "scores.json").exists()
    if status == 2:
        assert evaluate.main([*argv, "--dry-run"]) == 2


def test_gold_needs_gold_paragraphs(toy, tmp_path, capsys):
    write_jsonl(tmp_path / "questions.jsonl", [{"question": "Who?", "answer": "Ada"}])
    assert evaluate.main([*toy, "--baseline", "gold"]) == 1
    assert shows(capsys.readouterr().err, "golden-without-paragraphs", "questions-1")


def test_a_dry_run_tells_what_a_baseline_brings(toy, capsys):
    assert evaluate.main([*toy, "--baseline", "gold", "--dry-run"]) == 0
    words = capsys.readouterr().out.split()
    assert all(words[words.index(name) + 1] == value for name, value in (("baseline", "gold"), ("retriever", "golden")))


def test_an_unfinished_baseline_is_begun_again_only_by_itself(toy, says, tmp_path, monkeypatch, capsys):
    says({name: ["x"] * 2 for name in NAMES})
    monkeypatch.setattr(evaluating, "summary", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert evaluate.main([*toy, "--baseline", "rag"]) == 130
    assert evaluate.main([*toy, "--baseline", "closed-book"]) == 1
    assert shows(capsys.readouterr().err, "other-run", "evaluate", "baseline (was rag, is closed-book)")
    monkeypatch.undo()
    assert evaluate.main([*toy, "--baseline", "rag", "--max-new-tokens", "160"]) == 0


def test_comparison_and_report_name_the_baseline(toy, says, tmp_path, capsys):
    says({name: ["x"] * 2 for name in NAMES})
    folders = [str(tmp_path / name) for name in ("a", "b", "c")]
    for folder, baseline in zip(folders, ("rag", "closed-book", "none")):
        assert evaluate.main([*toy, "--baseline", baseline, "--output", folder]) == 0
    capsys.readouterr()
    assert evaluate.main(["--compare", *folders[:2], "--output", str(tmp_path / "d")]) == 0
    assert f"A  {folders[0]} (plain RAG)\nB  {folders[1]} (closed book)\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "d" / "comparison.json").read_text())["a"] == folders[0]
    assert evaluate.main(["--compare", f"{folders[1]}/predictions.jsonl", folders[2]]) == 0
    assert f"A  {folders[1]}/predictions.jsonl\nB  {folders[2]}\n" in capsys.readouterr().out
    assert report.main([*folders, "--output", str(tmp_path / "x.html")]) == 0
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "b (closed book) minus a (plain RAG)" in page and "c minus a (plain RAG)" in page


def test_every_baseline_has_a_name():
    assert {"none", *BASELINES} == set(OPENINGS)
