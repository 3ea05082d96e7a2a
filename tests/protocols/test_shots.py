"""The worked example of a prompt: messages of a chat before the question."""

import pytest

from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.templates import messages
from r3lite.settings import LengthSettings, ProtocolSettings

QUESTION = "Which river flows through the town where the author of Silent Harbour was born?"
NOVEL = Document("1", "Silent Harbour", "Silent Harbour is a 1987 novel by Marta Lindqvist. It is set on the coast.")
HARBOUR = Document("2", "Harbour", "A harbour is a place where ships may shelter.")
TOWN = Document("3", "Ljungby", "Ljungby is a town in Sweden. The river Lagan flows through it.")
AUTHOR = Document(
    "4", "Marta Lindqvist", "Marta Lindqvist (1941-2009) was a Swedish novelist. She was born in Ljungby."
)
FOUND = {"r3": [[NOVEL, HARBOUR], [TOWN, AUTHOR]], "dag": [[NOVEL], [TOWN, AUTHOR]]}
OPTIONS = [{}, {"queries_per_step": 3}, {"verification": True}]


@pytest.mark.parametrize("settings", [*OPTIONS, {"format": "dag"}], ids=str)
def test_the_example_is_what_the_protocol_itself_writes(settings):
    """An example that differs from what follows it teaches an untrained model the wrong format."""
    protocol = build_protocol(ProtocolSettings(**settings))
    first, *turns = [shot["content"] for shot in protocol.shots]
    assert first.endswith(protocol.question_message(QUESTION))
    steps = []
    for turn, documents in zip(turns[::2], [*FOUND[settings.get("format", "r3")], []], strict=True):
        step = protocol.parse(turn, steps)
        assert not step.faults and protocol.render(step, len(steps) + 1) == turn
        steps.append(step.with_documents([documents] * len(step.searches)))
        if step.searches:
            assert turns[2 * len(steps) - 1] == protocol.observation(QUESTION, steps)
    assert steps[-1].answer == "Lagan"


def test_the_example_in_tags_is_one_turn():
    protocol = build_protocol(ProtocolSettings(format="tags", information_open="<found>", information_close="</found>"))
    searches = 0
    for user, assistant in zip(protocol.shots[::2], protocol.shots[1::2], strict=True):
        question = user["content"].partition("Question: ")[2].partition("\n")[0]
        assert user["content"].endswith(protocol.question_message(question))
        *asking, last = assistant["content"].split("</found>\n\n")
        steps = []
        for text in asking:
            turn, _, documents = text.partition("\n\n<found>")
            assert documents.startswith("Doc 1(Title: ")
            steps.append(protocol.parse(turn, steps))
            assert not steps[-1].faults and protocol.render(steps[-1], 1) == turn
        searches += len(steps)
        answer = protocol.parse(last, steps)
        assert not answer.faults and answer.answer and protocol.render(answer, 1) == last
    assert (len(protocol.shots), searches) == (4, 3)


def test_an_episode_opens_with_the_example(qwen):
    """After the system message and before an earlier conversation; no token of it is trained on."""
    protocol = build_protocol(ProtocolSettings(system_prompt="Be brief."))
    layout = Layout(qwen, protocol, LengthSettings())
    user_message = {"role": "user", "content": protocol.question_message("Who?")}
    system = {"role": "system", "content": "Be brief."}
    earlier = [{"role": "user", "content": "Hello."}]
    earlier.append({"role": "assistant", "content": "Hello."})
    for history in ([], earlier):
        ids, _ = qwen.chat([system, *protocol.shots, *history, user_message])
        assert layout.prompt("Who?", history) == [*ids[: -len(qwen.encode("\n"))], *qwen.assistant_turn()]
    of_user = {"role": "system", "content": "Be kind."}
    ids, _ = qwen.chat([of_user, *protocol.shots, *earlier, user_message])
    assert layout.prompt("Who?", [of_user, *earlier])[: len(ids) - 1] == ids[:-1]
    transcript = layout.lay_out(Question("1", "Who?", ("x",)), [], 10)
    assert not any(transcript.action_mask)


@pytest.mark.parametrize("format", ["r3", "tags", "dag"])
def test_without_the_example_the_instructions_stay(format):
    with_example, without_example = (
        build_protocol(ProtocolSettings(format=format, worked_example=on)) for on in (True, False)
    )
    instructions, _, first = with_example.shots[0]["content"].partition("\n\n")
    assert without_example.shots == [] and "Silent Harbour" in first
    assert without_example.question_message(QUESTION) == f"{instructions}\n\n{with_example.question_message(QUESTION)}"


def test_a_format_file_may_have_an_example(tmp_path):
    prompt = "Think.\n\n[user]\nA?\n[assistant]\n<t> a </t><a> b </a>\n[user]\n{question}"
    text = f'kind = "tags"\nthink = ["<t>", "</t>"]\nanswer = ["<a>", "</a>"]\nprompt = """{prompt}"""'
    (tmp_path / "own.toml").write_text(text)
    with_example, without_example = (
        build_protocol(ProtocolSettings(format=str(tmp_path / "own.toml"), worked_example=on)) for on in (True, False)
    )
    assert (len(with_example.shots), with_example.question_message("Who?")) == (2, "Who?")
    assert (without_example.shots, without_example.question_message("Who?")) == ([], "Think.\n\nWho?")


def test_a_prompt_without_messages_is_the_user_s():
    assert messages("Q: {question}") == [{"role": "user", "content": "Q: {question}"}]
    assert messages("an [user] within {question}")[0]["content"] == "an [user] within {question}"
    assert messages("Think.\n[user]\n{question}") == [{"role": "user", "content": "Think.\n\n{question}"}]
    assert messages("Q: {question}\n[user]\nThink.") == [{"role": "user", "content": "Q: {question}\n\nThink."}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[assistant]\nx\n[user]\n{question}", r"\[user\] and \[assistant\] in the opening prompt do not alternate"),
        ("[user]\nx\n[user]\n{question}", r"\[user\] and \[assistant\] in the opening prompt do not alternate"),
        ("[user]\nx\n[assistant]\n{question}", r"\[user\] and \[assistant\] in the opening prompt do not alternate"),
        ("[user]\nx\n[assistant]\n\n[user]\n{question}", "a message of the opening prompt is empty"),
        ("[user]\n{question}\n[assistant]\ny\n[user]\nx", "in its example"),
    ],
)
def test_messages_that_make_no_chat_are_refused(tmp_path, text, says):
    (tmp_path / "init.txt").write_text(text)
    for format in ("r3", "tags", "dag"):
        with pytest.raises(R3LiteError, match=says):
            build_protocol(ProtocolSettings(format=format, init_prompt=str(tmp_path / "init.txt")))
