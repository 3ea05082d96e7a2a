"""Whether ppo warns of questions that the adapter has learned, or of which no demonstration could be made."""

import shutil

import pytest

from r3lite.assembly.rl_questions import warn_of_questions
from r3lite.core.episode import Question
from r3lite.core.files import write_json, write_jsonl, write_text
from r3lite.core.invocation import with_values
from r3lite.settings import PpoConfig
from r3lite.training.earlier_run import QUESTIONS_FILE, demonstrated, question_hash
from tests.test_ppo_guard import run, world  # noqa: F401

TEXTS = [f"Where is {i}?" for i in range(12)]
ASKED = [Question(f"q{i}", text, ("there",)) for i, text in enumerate(TEXTS)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes run folders of SFT, which name the adapter that they began with and have learned some questions."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, texts: list[str] | None, adapter: str | None = None, command: str = "sft") -> str:
        table = f"[{command}]\n" + (f'adapter = "{adapter}"\n' if adapter else "")
        write_text(tmp_path / name / "config.toml", table)
        (tmp_path / name / "adapter").mkdir()
        if texts is not None:
            write_json(tmp_path / name / QUESTIONS_FILE, {"hashes": sorted(map(question_hash, texts))})
        return name

    return write


def warnings_of(capsys, questions: list[Question], **settings) -> str:
    warn_of_questions(with_values(PpoConfig(), settings), questions)
    return capsys.readouterr().err


def test_a_hash_does_not_depend_on_case_and_punctuation():
    assert question_hash("Where is  it?") == question_hash("where is it") != question_hash("Where is he?")
    assert len(question_hash("Where?")) == 16


def test_questions_of_the_demonstrations_are_warned_of(folder, capsys):
    """RL on questions that the adapter answers from memory made the answers to others worse."""
    name = folder("runs/sft", [text.upper() for text in TEXTS[:7]])
    for adapter in (name, f"{name}/adapter", f"{name}/checkpoint-3", f"{name}/checkpoint-3/adapter"):
        stderr = warnings_of(capsys, ASKED, adapter=adapter)
        assert stderr.startswith(f"warning: {adapter} has learned demonstrations of 7 of the 12 questions and may know")
        assert "`prepare --rl-size N`" in stderr and stderr.count("\n") == 1
    assert warnings_of(capsys, [*ASKED, *ASKED[7:9]], adapter=name) == ""  # 7 of 14
    assert warnings_of(capsys, ASKED) == ""  # no adapter
    model = with_values(PpoConfig(), {"model": "runs/sft/model"})
    write_text("runs/sft/config.toml", "[sft]\nno_lora = true\n")
    warn_of_questions(model, ASKED)
    assert "runs/sft/model has learned demonstrations of 7" in capsys.readouterr().err


def test_what_earlier_runs_of_an_adapter_have_learned_counts(folder, capsys):
    folder("one", TEXTS[:4])
    folder("two", TEXTS[4:8], adapter="one/adapter")
    folder("three", None, adapter="two", command="ppo")
    assert demonstrated("three") == set(map(question_hash, TEXTS[:8]))
    assert "three has learned demonstrations of 8 of" in warnings_of(capsys, ASKED, adapter="three")
    folder("round", TEXTS[:1], adapter="round")  # moved by hand
    assert len(demonstrated("round")) == 1


@pytest.mark.parametrize("content", [None, "", "[]", '{"hashes": 3}', '{"hashes": [1]}'])
def test_an_adapter_whose_questions_are_not_known_is_not_warned_of(folder, capsys, content):
    name = folder("sft", None)
    if content is not None:
        write_text(f"{name}/{QUESTIONS_FILE}", content)
    assert warnings_of(capsys, ASKED, adapter=name) == warnings_of(capsys, ASKED, adapter="elsewhere/adapter") == ""


def test_what_exclude_leaves_is_warned_of_if_collect_rejected_it(tmp_path, capsys):
    """--exclude gold.jsonl left exactly the questions of which no query finds the gold paragraph."""
    gold, dev = str(tmp_path / "gold.jsonl"), str(tmp_path / "dev.jsonl")
    rejected = [{"id": f"q{i}", "reason": "a query that does not find its gold paragraph"} for i in range(5, 12)]
    write_jsonl(f"{gold}.rejected.jsonl", rejected)
    stderr = warnings_of(capsys, ASKED[5:], exclude=(dev, gold))
    assert stderr.startswith(
        "warning: `collect` could make no demonstration of 7 of the 7 questions that --exclude leaves"
    )
    assert "`prepare --rl-size N`" in stderr and stderr.count("\n") == 1
    named = [Question(f"one/{q.id}", q.text, q.answers, source="one") for q in ASKED[5:]]
    assert "7 of the 7" in warnings_of(capsys, named, exclude=(gold,))
    accepted = [Question(f"other{i}", "Who?", ("x",)) for i in range(7)]
    # The other half of the questions is there, too.
    assert warnings_of(capsys, [*ASKED[5:], *accepted], exclude=(gold,)) == ""
    assert warnings_of(capsys, ASKED[5:]) == warnings_of(capsys, ASKED[5:], exclude=(dev,)) == ""
    write_text(f"{gold}.rejected.jsonl", "hello")
    assert warnings_of(capsys, ASKED[5:], exclude=(gold,)) == ""


def test_ppo_says_it_before_it_begins(world, tmp_path, capsys):  # noqa: F811
    shutil.copytree(world / "sft", tmp_path / "sft")
    write_json(tmp_path / "sft" / QUESTIONS_FILE, {"hashes": sorted(map(question_hash, TEXTS))})
    adapter = str(tmp_path / "sft")
    assert run(world, tmp_path / "run", "--adapter", adapter, "--max-steps", "1", validated=False) == 0
    assert f"warning: {adapter} has learned demonstrations of 12 of the 12 questions" in capsys.readouterr().err


def test_questions_of_which_normalization_leaves_nothing_are_told_apart():
    """Their hashes were all that of the empty text, so that any of them counted as demonstrated."""
    assert question_hash("A?") != question_hash("The?")
    assert question_hash("Who is Ann?") == question_hash("who is  ann")
