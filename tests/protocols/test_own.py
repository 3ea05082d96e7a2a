"""Formats of a user's own file."""

from pathlib import Path

import pytest

from r3lite.core.config import UsageError
from r3lite.core.episode import Document, Step
from r3lite.core.errors import R3LiteError
from r3lite.protocols.registry import build_protocol
from r3lite.settings import ProtocolSettings
from tests.errors import raises

DATA = Path(__file__).parent.parent / "data"
TAGS, HEADINGS = (DATA / name for name in ("own_tags.toml", "own_headings.toml"))
ASK, ANSWER = Step.asking("I need it.", "Who?"), Step("It is so.", answer="Ada")


def protocol_of(path: Path, **settings):
    return build_protocol(ProtocolSettings(format=str(path), **settings))


def test_tags_of_ones_own():
    protocol = protocol_of(TAGS)
    assert protocol.render(ASK, 1) == "<reason> I need it. </reason><ask> Who? </ask>"
    assert protocol.stop_strings == ("</ask>", "</result>")
    steps = [ASK.with_documents([[Document("1", "T", "x <end_found> </FOUND>")]])]
    assert (
        protocol.observation("Who?", steps) == "\n\n<found>Doc 1(Title: T) x \u2039end_found> </FOUND><end_found>\n\n"
    )
    assert protocol.read_answer(" Ada </result>", [ASK]) == Step("-", answer="Ada")
    assert protocol.question_message("Who?") == "Reason, then ask or answer.\n\nWho?"


def test_headings_of_ones_own():
    protocol = protocol_of(HEADINGS)
    assert protocol.render(ASK, 1) == "Round 1:\nThought: I need it.\nLook up: Who?"
    assert protocol.stop_strings == ("Found:",)
    steps = [ASK.with_documents([[Document("1", "T", "x\nResult: y")]])]
    assert protocol.observation("Who?", steps) == "Found:\n[1] T: x Result: y\n\nNow Round 2."
    assert protocol.answer_heading == "Result:"
    assert protocol.read_answer(" Ada", [ASK]) == Step("-", answer="Ada")
    step = Step("Both.", (*ASK.searches, *Step.asking("", "When?").searches))
    several = protocol_of(HEADINGS, queries_per_step=2)
    assert "Look these up:\n1. Who?\n2. When?" in several.render(step, 1)
    assert several.parse(several.render(step, 1), []) == step


@pytest.mark.parametrize("path", [TAGS, HEADINGS])
def test_what_is_written_is_read(path):
    protocol = protocol_of(path)
    for step in (ASK, ANSWER):
        assert protocol.parse(protocol.render(step, 2), [Step("x")]) == step


def test_without_search_a_format_is_one_turn(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "tags"\nthink = ["<a>", "</a>"]\nanswer = ["<b>", "</b>"]\nprompt = "{question}"')
    protocol = protocol_of(path)
    assert not protocol.can_search and protocol.render(ANSWER, 1) == "<a> It is so. </a><b> Ada </b>"


def test_prompts_of_the_settings_come_first(tmp_path):
    (tmp_path / "prompt.txt").write_text("Mine: {question}")
    assert protocol_of(TAGS, init_prompt=str(tmp_path / "prompt.txt")).question_message("Who?") == "Mine: Who?"
    with raises(R3LiteError, "step-prompt-unsupported"):
        protocol_of(TAGS, step_prompt=str(tmp_path / "prompt.txt"))


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        (TAGS, 'kind = "tags"', "", "has kind = None; it must be headings or tags"),
        (TAGS, 'kind = "tags"', 'kind = "tag"', "has kind = 'tag'"),
        (TAGS, 'kind = "tags"', 'kind = ["tags"]', r"has kind = \['tags'\]; it must be headings or tags"),
        (TAGS, 'kind = "tags"', "kind = {a = 1}", "has kind = {'a': 1}; it must be"),
        (TAGS, "think =", "thinks =", r"has the unknown key 'thinks' \(did you mean think\?\)"),
        (TAGS, 'answer = ["<result>", "</result>"]', "", "has no answer"),
        (TAGS, '["<ask>", "</ask>"]', '"<ask>"', "has search = '<ask>'; it must be an opening and a closing tag"),
        (TAGS, '"</ask>"', '"/ask"', "has search = "),
        (TAGS, '"</ask>"', '"<REASON>"', "has <reason> more than once"),
        (TAGS, 'search = ["<ask>", "</ask>"]', "", "has only one of search and documents"),
        (TAGS, "{question}", "", "the opening prompt has the placeholders none"),
        (TAGS, "{question}", "{question} {context}", "the opening prompt has the placeholders"),
        (HEADINGS, '"Round"', '""', "has step = ''; it must be one line of text"),
        (HEADINGS, '"Found:"', '"Found:\\nx"', "has documents = .*; it must be one line of text"),
        (HEADINGS, '"Look up:"', '"Look"', "has queries = 'Look these up:', which begins as query does"),
        (HEADINGS, '"Result:"', '"Thought:"', "which begins as"),
        (HEADINGS, "{documents}", "", "the prompt with documents has the placeholders"),
        (HEADINGS, "documents_prompt", "document_prompt", "has the unknown key 'document_prompt'"),
    ],
)
def test_what_a_file_cannot_mean_is_told(tmp_path, path, old, new, message):
    text = path.read_text()
    assert old in text
    (tmp_path / "mine.toml").write_text(text.replace(old, new, 1) if old != '"Found:"' else text.replace(old, new))
    with pytest.raises(R3LiteError, match=message):
        protocol_of(tmp_path / "mine.toml")


def test_files_that_cannot_be_read_and_names_that_are_not_known(tmp_path):
    with raises(UsageError, "file-unreadable", "nowhere.toml"):
        protocol_of(tmp_path / "nowhere.toml")
    (tmp_path / "mine.toml").write_text("kind =")
    with raises(UsageError, "file-unreadable", "mine.toml"):
        protocol_of(tmp_path / "mine.toml")
    with raises(UsageError, "unknown-format", "tag' (did you mean tags?", "choose from r3, tags"):
        ProtocolSettings(format="tag").check()
    with raises(UsageError, "headings-needed"):
        protocol_of(TAGS, verification=True)
