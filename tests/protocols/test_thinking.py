"""Models that think: a turn opens inside a thought, which no step has, and which a forced answer ends."""

import pytest

from r3lite.core.episode import ANSWERED, Document, Question, Step
from r3lite.core.errors import R3LiteError
from r3lite.datasets.conversations import Conversation
from r3lite.datasets.trajectories import encode_rows, parts_of
from r3lite.protocols.chat import Chat, ThinkingChat
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Transcript
from r3lite.rollout.sequence import Listener
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.protocols.test_chat_template import folder  # noqa: F401 (a fixture)

WHO = Question("1", "Who wrote it?", ("Ada",))
DOCUMENT = Document("d", "Book", "Ada wrote it.")
THOUGHT = "Hm, which book?\n</think>\n\n"


@pytest.fixture(params=["r3", "tags"])
def layout(request, folder):  # noqa: F811
    protocol = build_protocol(ProtocolSettings(format=request.param, worked_example=False))
    return Layout(Tokenizer.load(folder("r1")), protocol, LengthSettings(max_length=4000, max_hops=1))


def opened(layout) -> Transcript:
    transcript = Transcript(WHO)
    layout.open(transcript)
    return transcript


def write_reply(layout, transcript, text: str, ends: bool = True) -> None:
    transcript.write([*layout.tokenizer.encode(text), *[layout.tokenizer.stop_id] * ends])
    layout.close_turn(transcript)


def with_special_tokens(layout, tokens) -> str:
    return layout.tokenizer._marked.decode(tokens, skip_special_tokens=False)


def test_a_step_is_read_after_the_thought(layout):
    transcript, protocol = opened(layout), layout.protocol
    step = Step.asking("I look for the book.", "the book")
    text = protocol.render(step, 1)
    if protocol.thinks:  # <think> is the format's own, and opened already
        assert text.startswith("<think>")
        write_reply(layout, transcript, text.removeprefix("<think>"), ends=False)
    else:
        write_reply(layout, transcript, THOUGHT + text)
    assert transcript.steps == [step] and transcript.pending


def test_a_thought_that_is_not_over_is_no_step(layout):
    transcript = opened(layout)
    write_reply(layout, transcript, "Hm, which book?")
    assert transcript.finish == "malformed" and transcript.steps[0].answer is None


def test_a_stop_string_in_a_thought_is_a_quotation(layout):
    """The prompt shows it, and a thought may repeat it: the turn was cut off there, whatever the limits."""
    transcript = opened(layout)
    stop = layout.protocol.stop_strings[0]
    transcript.write(layout.tokenizer.encode(f"Then we get {stop}"))
    assert layout.turn_is_over(transcript) == layout.protocol.thinks  # such a thought is part of the step
    transcript.write(layout.tokenizer.encode("\n</think>\n\nStep 1:\n"))
    assert not layout.turn_is_over(transcript)  # the quotation is near, but the last token is not its end
    transcript.write(layout.tokenizer.encode(stop))
    assert layout.turn_is_over(transcript)


def test_a_forced_answer_ends_the_thought(layout):
    transcript = opened(layout)
    protocol = layout.protocol
    for number in (1, 2):  # the second search is one too many
        text = protocol.render(Step.asking("I look.", f"the book {number}"), number)
        if protocol.thinks:
            write_reply(layout, transcript, text.removeprefix("<think>") if number == 1 else text, ends=False)
        else:
            write_reply(layout, transcript, THOUGHT + text)
        if number == 1:
            layout.splice(transcript, [[DOCUMENT]])
    transcript_text = with_special_tokens(layout, transcript.tokens)
    assert transcript_text.count("<think>") == transcript_text.count("</think>")
    write_reply(layout, transcript, " Ada" if not protocol.thinks else "Ada</answer>", ends=not protocol.thinks)
    assert transcript.finish == ANSWERED and transcript.steps[-1].answer == "Ada"


def test_a_thought_that_runs_out_of_room_is_ended_before_the_answer(layout):
    transcript = opened(layout)
    layout.lengths = LengthSettings(max_length=4000, max_new_tokens=10)
    write_reply(layout, transcript, "Hm, which book may this have been?", ends=False)
    assert transcript.forced_step is not None
    transcript_text = with_special_tokens(layout, transcript.tokens)
    assert "</think>" in transcript_text.partition("Hm, which")[2]


def test_a_demonstration_leaves_the_thought_empty_and_reads_as_the_rollout(layout):
    steps = [Step.asking("I look.", "the book").with_documents([[DOCUMENT]]), Step("Ada wrote it.", answer="Ada")]
    laid = layout.lay_out(WHO, steps, 100)
    grown, protocol = opened(layout), layout.protocol
    for number, step in enumerate(steps, 1):
        text = protocol.render(step, number)
        if protocol.thinks:
            text = text.removeprefix("<think>") if number == 1 else text
        else:
            text = "\n</think>\n\n" + text
        grown.write(layout.tokenizer.encode_written(text) + [layout.tokenizer.stop_id] * (not protocol.thinks))
        layout.close_turn(grown)
        if grown.pending:
            layout.splice(grown, [[DOCUMENT]])
    assert (laid.tokens, laid.action_mask) == (grown.tokens, grown.action_mask)
    without = [[s.with_documents([()] * len(s.searches)) for s in each.steps] for each in (laid, grown)]
    assert without[0] == without[1]


def test_what_a_user_sees_while_it_is_written_has_no_thought(layout):
    transcript = opened(layout)
    transcript.write(layout.tokenizer.encode("Hm, which"))
    readable = layout.turn_text.readable(transcript, turn_is_over=False)
    assert readable == ("<think>Hm, which" if layout.protocol.thinks else "")


TRACE = "<think>\nHm, which book?\n</think>\n\nAda"
ASKED = [{"role": "user", "content": WHO.text}]


def taught(tokenizer, reply: str) -> tuple[list[int], list[int]]:
    """The tokens of an SFT row that are given, and those that are trained on."""
    ids, mask = tokenizer.chat([*ASKED, {"role": "assistant", "content": reply}])
    start = mask.index(True)
    end = len(mask) - mask[::-1].index(True)
    assert all(mask[start:end])
    return ids[:start], ids[start:end]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("family", "thinking"), [("qwen3", "on"), ("r1", "auto")])
def test_a_thought_is_trained_on_after_the_prompt_that_it_is_sampled_after(folder, family, thinking, special):  # noqa: F811
    """Its ends are the tokens that the model knows them by. They were trained on as text, after an empty thought of the
    template's in Qwen3, and with the <think> that R1's prompt gives."""
    tokenizer = Tokenizer.load(folder(family, special), thinking)
    prompt_ids, reply_ids = taught(tokenizer, TRACE)
    assert prompt_ids == tokenizer.open_chat(WHO.text)
    ends = [tokenizer._added[end] for end in ("<think>", "</think>")]
    assert [token for token in reply_ids if token in ends] == ends[family == "r1" :]
    transcript = Transcript(WHO)
    layout = Layout(tokenizer, ThinkingChat(), LengthSettings())
    layout.open(transcript)
    transcript.write(reply_ids)
    layout.close_turn(transcript)
    assert transcript.steps == [Step("Hm, which book?", answer="Ada")]


def test_only_the_assistant_s_thoughts_are_tokens(folder):  # noqa: F811
    tokenizer = Tokenizer.load(folder("qwen3", False), "on")
    end = tokenizer._added["</think>"]
    assert end not in tokenizer.encode("</think>") and end not in tokenizer.open_chat("What is </think>?")
    assert tokenizer.encode_written("a</think>b").count(end) == 1


def test_a_reply_without_a_thought_teaches_an_empty_one_where_the_prompt_opens_it(folder):  # noqa: F811
    tokenizer = Tokenizer.load(folder("r1", False))
    prompt_ids, reply_ids = taught(tokenizer, "Ada")
    assert prompt_ids == tokenizer.open_chat(WHO.text) and tokenizer.decode(reply_ids) == "\n</think>\n\nAda"


@pytest.mark.parametrize("thinking", ["auto", "off"])
def test_a_thought_that_is_switched_off_is_not_trained_on(folder, thinking):  # noqa: F811
    tokenizer = Tokenizer.load(folder("qwen3", False), thinking)
    with pytest.raises(R3LiteError, match=r"thinking is off in the chat template\n.*--thinking on"):
        taught(tokenizer, TRACE)
    with pytest.raises(R3LiteError, match="--thinking on"):
        Layout(tokenizer, ThinkingChat(), LengthSettings())
    assert taught(tokenizer, "Ada")[0] == tokenizer.open_chat(WHO.text)


def test_a_thought_in_spite_of_the_switch_is_no_answer(folder):  # noqa: F811
    layout = Layout(Tokenizer.load(folder("qwen3", False), "off"), Chat(), LengthSettings())
    for tokens, answer in (
        (layout.tokenizer.encode_written("Hm.\n</think>\n\nAda"), "Ada"),
        (layout.tokenizer.encode("It ends with </think>."), "It ends with </think>."),  # text about it
    ):
        transcript = opened(layout)
        transcript.write([*tokens, layout.tokenizer.stop_id])
        layout.close_turn(transcript)
        assert transcript.steps == [Step(answer=answer)]


def test_the_beginning_of_a_thought_is_held_back(folder):  # noqa: F811
    layout = Layout(Tokenizer.load(folder("qwen3"), "on"), Chat(), LengthSettings())
    visible = []
    for text in ("<", "<thi", TRACE[:12], TRACE, "<this> is"):
        transcript = opened(layout)
        transcript.write(layout.tokenizer.encode(text))
        visible.append(layout.turn_text.readable(transcript, turn_is_over=False))
    assert visible == ["", "", "", "Ada", "<this> is"]


def test_a_thought_without_a_beginning_is_heard_as_it_was_written(folder):  # noqa: F811
    """At its end the readable text shrank to what follows: the pieces that were heard did not add up to it."""
    layout = Layout(Tokenizer.load(folder("qwen3", False), "off"), Chat(), LengthSettings())
    transcript = opened(layout)
    pieces = []
    listener = Listener(pieces.append, on_step=None)
    for token in layout.tokenizer.encode_written("Hm.\n</think>\n\nAda"):
        transcript.write([token])
        readable = layout.turn_text.readable(transcript, turn_is_over=False)
        listener.send_text(readable, turn_is_over=False)
        assert "".join(pieces) == readable
    assert readable == "Hm.\n</think>\n\nAda" and layout.turn_text.read(transcript) == "Ada"


SECOND = [{"role": "user", "content": "In which year?"}, {"role": "assistant", "content": "Let us see: 1987."}]
LATER = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "<think>\nA town.\n</think>\n\nIn Rome."},
]
TALK = [*ASKED, {"role": "assistant", "content": TRACE}, *SECOND, *LATER]
LAYOUT = LengthSettings()


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
@pytest.mark.parametrize(
    ("family", "thinking"), [("qwen3", "on"), ("r1", "auto"), ("qwen2.5", "auto"), ("gemma", "auto")]
)
def test_each_reply_is_trained_on_after_the_template_s_own_prompt(folder, family, thinking, system):  # noqa: F811
    """Thoughts of earlier replies stood before later ones, although the template removes them."""
    tokenizer = Tokenizer.load(folder(family), thinking)
    messages = [*system, *TALK]
    layout = Layout(tokenizer, Chat(), LAYOUT)
    replies = []
    for part in parts_of(Conversation("1", tuple(messages)), layout):
        ids, mask = tokenizer.chat(part.messages)
        starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        for start in starts:
            end = ids.index(tokenizer.stop_id, start) + 1
            reply = with_special_tokens(layout, ids[start : end - 1])
            number = next(
                i for i, m in enumerate(messages) if m["content"].endswith(reply.split("</think>")[-1].strip())
            )
            prompt = tokenizer.template.render(tokenizer.merge_system(messages[:number]), prompt=True)
            assert with_special_tokens(layout, ids[:start]) == prompt
            assert all(mask[start:end])
            replies.append((number - len(system), "</think>" in reply))
    # R1's prompt opens a thought, so that the reply without one has an empty one.
    assert sorted(replies) == [(1, True), (3, family == "r1"), (5, True)]


def test_a_reply_that_is_not_trained_on_has_no_part(folder):  # noqa: F811
    layout = Layout(Tokenizer.load(folder("qwen3"), "on"), Chat(), LAYOUT)
    ignored = {**TALK[1], "train": False}
    assert parts_of(Conversation("1", (TALK[0], ignored, *TALK[2:])), layout) == [
        Conversation("1", (TALK[0], ignored, *TALK[2:]))
    ]
    alone = Conversation("1", (*TALK[:2], SECOND[0]))  # whose only reply is trained on in its part
    assert [len(part.messages) for part in parts_of(alone, layout)] == [2]


def test_it_is_told_how_many_rows_are_trained_on(folder, capsys):  # noqa: F811
    layout = Layout(Tokenizer.load(folder("qwen3"), "on"), Chat(), LAYOUT)
    rows = encode_rows([Conversation("1", tuple(TALK))], layout)
    assert len(rows) == 2 and "1 rows are trained on as 2: " in capsys.readouterr().err
    encode_rows([Conversation("1", tuple(ASKED + SECOND[1:]))], layout)
    assert "trained on as" not in capsys.readouterr().err


def test_a_client_s_earlier_replies_lose_their_thoughts(folder):  # noqa: F811
    for family, thinking in (("qwen3", "on"), ("r1", "auto"), ("qwen3", "auto")):
        tokenizer = Tokenizer.load(folder(family), thinking)
        earlier = [*ASKED, {"role": "assistant", "content": TRACE}]
        text = tokenizer.template.render([*earlier, SECOND[0]], prompt=True)
        opened = tokenizer._marked.decode(tokenizer.open_chat(SECOND[0]["content"], earlier=earlier), False)
        assert opened == text and "Hm, which book?" not in opened
    tokenizer = Tokenizer.load(folder("qwen2.5"))
    prompt = tokenizer._marked.decode(tokenizer.open_chat("x", earlier=earlier), False)
    assert "Hm, which book?" in prompt  # by a template that keeps thoughts
