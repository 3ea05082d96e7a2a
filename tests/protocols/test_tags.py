"""Reading of steps in tags, strict and lenient, their rendering, and the settings of the two formats."""

import itertools
import random
import re

import pytest

from r3lite.core.episode import Document, Episode, Question, Search, Step
from r3lite.core.errors import R3LiteError
from r3lite.datasets.trajectories import check_steps
from r3lite.protocols.markup import Tag
from r3lite.protocols.registry import PROTOCOLS, build_protocol
from r3lite.protocols.tags import FAULTS, FORGIVEN, SOLUTION, WORKING_OUT, Tags
from r3lite.rewards.formats import valid_plan
from r3lite.settings import ProtocolSettings
from r3lite.settings.protocol import FORMATS
from tests.errors import raises

STRICT, LENIENT = (Tags("{question}", lenient=lenient) for lenient in (False, True))
SOLVE, SOLVE_LENIENT = (
    Tags("{question}", WORKING_OUT, SOLUTION, search=None, information=None, lenient=lenient)
    for lenient in (False, True)
)
EVERY = {"tags": STRICT, "lenient tags": LENIENT, "solution": SOLVE, "lenient solution": SOLVE_LENIENT}
THOUGHT, QUERY, ANSWER = "<think>a</think>", "<search>q</search>", "<answer>b</answer>"


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("<think> two\nlines </think>\n<search> who? </search>", Step.asking("two\nlines", "who?")),
        (" <think>a < b</think> <answer> <b>Oslo</b></answer>\n", Step("a < b", answer="<b>Oslo</b>")),
        ("<think>a</think><answer>Lon\ndon</answer>", Step("a", answer="Lon\ndon")),
    ],
)
@pytest.mark.parametrize("protocol", [STRICT, LENIENT])
def test_well_formed_steps(protocol, text, step):
    assert protocol.parse(text, []) == step


def test_the_solution_format():
    text = "<start_working_out> 6 times 7 <end_working_out><SOLUTION> 42 </SOLUTION>"
    assert (
        SOLVE.parse(text, []) == Step("6 times 7", answer="42")
        and SOLVE.render(Step("6 times 7", answer="42"), 1) == text
    )
    assert not SOLVE.can_search and SOLVE.stop_strings == ("</SOLUTION>",)
    assert SOLVE.parse("<start_working_out>x<end_working_out><search>q</search>", []).searches == ()
    assert SOLVE.parse("<start_working_out>x</start_working_out><SOLUTION>42</SOLUTION>", []).faults  # no such tag


@pytest.mark.parametrize(
    ("text", "faults", "usable"),
    [
        (f"Well. {THOUGHT}{QUERY}", ("text_outside_tags",), "q"),
        (f"{THOUGHT} so {ANSWER}", ("text_outside_tags",), "b"),
        (f"{THOUGHT}{ANSWER} and more", ("text_outside_tags",), "b"),
        (QUERY, ("no_think",), "q"),
        (f"<think> </think>{ANSWER}", ("no_think",), "b"),
        (f"{QUERY}{THOUGHT}", ("late_think",), "q"),
        (f"{THOUGHT}<search>q", ("unclosed_tag",), None),
        (f"{THOUGHT}<answer>b</search>", ("unclosed_tag", "unopened_tag"), None),
        (f"{THOUGHT}</search>{QUERY}", ("unopened_tag",), "q"),
        (f"<think>a{QUERY}", ("nested_tag",), "q"),
        (f"<think>a{QUERY}</think>", ("nested_tag", "unopened_tag"), "q"),
    ],
)
def test_what_leaves_no_doubt_is_a_fault_and_lenient_reading_forgives_it(text, faults, usable):
    """What it forgives it does not count, and a block that is never closed ends with the turn or at the next tag."""
    strict, lenient = STRICT.parse(text, []), LENIENT.parse(text, [])
    assert strict.faults == faults and set(faults) <= FORGIVEN
    assert next(iter(strict.queries), strict.answer) == usable
    assert lenient.faults == () and next(iter(lenient.queries), lenient.answer) in ("q", "b")


@pytest.mark.parametrize(
    ("text", "fault", "usable"),
    [
        (f"{THOUGHT}{QUERY}<search>r</search>", "repeated_tag", None),
        (f"{THOUGHT}{ANSWER}<answer>c</answer>", "repeated_tag", None),
        (f"{THOUGHT}{ANSWER}{ANSWER}", "repeated_tag", None),
        (f"{THOUGHT}{THOUGHT}{ANSWER}", "repeated_tag", "b"),
        (f"{THOUGHT}{QUERY}{ANSWER}", "query_and_answer", None),
        (f"{THOUGHT}<search>q{ANSWER}</search>", "query_and_answer", None),
        (THOUGHT, "no_query_or_answer", None),
        ("I do not know.", "no_query_or_answer", None),
        ("", "no_query_or_answer", None),
        (f"{THOUGHT}<search> \n</search>", "blank_query", None),
        (f"{THOUGHT}<answer></answer>", "blank_answer", None),
        (f"{THOUGHT}<information>made up</information>{QUERY}", "wrote_documents", "q"),
        (f"</information>{THOUGHT}{QUERY}", "wrote_documents", "q"),
        (f"{THOUGHT}<search>Asked, before!</search>", "repeated_query", "Asked, before!"),
    ],
)
@pytest.mark.parametrize("protocol", [STRICT, LENIENT], ids=["strict", "lenient"])
def test_what_leaves_doubt_is_a_fault_in_either_reading(protocol, text, fault, usable):
    step = protocol.parse(text, [Step.asking("x", "asked before")])
    assert fault in step.faults and next(iter(step.queries), step.answer) == usable
    assert set(step.faults) <= set(FAULTS)


def test_documents_before_a_thought_do_not_make_it_late():
    step = STRICT.parse(f"<information>made up</information>{THOUGHT}{QUERY}", [])
    assert step == Step.asking("a", "q", faults=("wrote_documents",))


def test_letter_case_counts_in_strict_reading_only():
    text = "<Think>a</THINK><Search>q</SEARCH>"
    assert LENIENT.parse(text, []) == Step.asking("a", "q")
    assert STRICT.parse(text, []).faults == ("text_outside_tags", "no_think", "no_query_or_answer")
    assert STRICT.parse("<think>a <SEARCH> b</think><search>q</search>", []) == Step.asking("a <SEARCH> b", "q")
    assert SOLVE_LENIENT.parse("<start_working_out>a<END_working_out><solution>b</Solution>", []) == Step(
        "a", answer="b"
    )


PIECES = (
    "a < b",
    "<b>",
    "</",
    "<think",
    "searching>",
    "\n\n",
    "東京",
    "🦊",
    "עברית",
    "<|im_end|>",
    "Step 1:",
    "\\n",
    "{question}",
    "  x ",
    "\u2039",
    "é\u2028",
)
TAGS_AS_TEXT = ("<think>", "</search>", "</information>", "<answer>", "<SOLUTION>", "<end_working_out>", "<Answer>")


def generated(seed: int, *extra: str) -> list[Step]:
    """Steps of random text, stripped and not blank, as a row's are."""
    draw = random.Random(seed)

    def text() -> str:
        return "".join(draw.choices(PIECES, k=draw.randint(1, 6)) + draw.choices(extra, k=bool(extra))).strip() or "x"

    return [Step.asking(text(), text()) if draw.random() < 0.5 else Step(text(), answer=text()) for _ in range(300)]


@pytest.mark.parametrize("name", EVERY)
def test_what_is_rendered_is_read_back(name):
    protocol, read = EVERY[name], 0
    for step in generated(1):
        if not step.searches or protocol.can_search:
            assert protocol.parse(protocol.render(step, 3), [Step.asking("x", "another")]) == step
            read += 1
    assert read > 100


@pytest.mark.parametrize("name", EVERY)
def test_a_step_that_holds_the_tags_is_not_trained_on(name):
    """Either its text is not read back and the row is refused, or the tags are not this protocol's."""
    protocol = EVERY[name]
    refused = 0
    for step in generated(2, *TAGS_AS_TEXT):
        if step.answer is None:
            continue
        stray_tags = protocol.markup.tags_in(step.analysis) | protocol.markup.tags_in(step.answer)
        problem = check_steps([step], protocol)
        assert (problem is not None) == bool(stray_tags), step
        refused += bool(stray_tags)
    assert refused > 20


def test_any_mixture_of_pieces_is_read_without_an_error():
    pieces = [*(end for tag in STRICT.markup.tags for end in (tag.opening, tag.closing)), " x", "\n"]
    pieces += [THOUGHT, ANSWER]  # without which no mixture of four is free of faults in strict reading
    faultless = 0
    for mixture in itertools.product(pieces, repeat=4):
        for protocol in (STRICT, LENIENT):
            step = protocol.parse("".join(mixture), [])
            assert not (step.searches and step.answer) and set(step.faults) <= set(FAULTS)
            if not step.faults:
                assert protocol.parse(protocol.render(step, 1), []) == step
            if not step.faults and protocol is STRICT:
                assert "".join(protocol.render(step, 1).split()) == "".join("".join(mixture).split())
                faultless += 1
    assert faultless == 9


@pytest.mark.parametrize("name", EVERY)
def test_a_turn_ends_where_its_query_or_answer_does(name):
    protocol = EVERY[name]
    for step in (Step.asking("a", "q"), Step("a", answer="b")):
        if not step.searches or protocol.can_search:
            text = protocol.render(step, 1)
            assert text.endswith(protocol.stop_strings) and protocol.first_turn(f"{text}<information>x") == text
    assert protocol.first_turn("no tag") == "no tag"
    assert ("</SEARCH>" in protocol.stop_strings) == (protocol is LENIENT)


@pytest.mark.parametrize("name", EVERY)
def test_a_forced_answer_needs_no_thought_of_its_own(name):
    protocol = EVERY[name]
    assert protocol.read_answer(f" Oslo {protocol.answer.closing}", []) == Step("-", answer="Oslo")
    assert "blank_answer" in protocol.read_answer(protocol.answer.closing, []).faults


@pytest.mark.parametrize("name", EVERY)
def test_a_turn_that_ran_out_of_room_is_finished_by_an_answer(name):
    """What it left open is closed first; a turn that has begun to answer cannot be finished."""
    protocol = EVERY[name]
    cut_off = f"{protocol.think.opening} a lot"
    heading = protocol.heading_after_cut_off(cut_off, [])
    assert heading == f"{protocol.think.closing}\n{protocol.answer.opening}"
    assert protocol.parse(f"{cut_off}{heading} Oslo {protocol.answer.closing}", []) == Step("a lot", answer="Oslo")
    assert protocol.heading_after_cut_off(f"{cut_off}{heading} Os", []) is None
    in_other_case = f"{cut_off}{heading.swapcase()} Os"  # which strict reading takes for text of the thought
    assert (protocol.heading_after_cut_off(in_other_case, []) is None) == protocol.lenient


def test_documents_are_numbered_one_a_line_inside_their_tags():
    documents = [Document("a", "T", "one\n two"), Document("b", "</Information>", "<b> <ANSWER>x</answer> a < b")]
    second = "Doc 2(Title: \u2039/Information>) <b> \u2039ANSWER>x\u2039/answer> a < b"
    observation = f"\n\n<information>Doc 1(Title: T) one two\n{second}</information>\n\n"
    assert STRICT.observation("Q?", [Step.asking("a", "q", documents)]) == observation
    assert (
        STRICT.observation("Q?", [Step.asking("a", "q", [])])
        == "\n\n<information>(nothing was found)</information>\n\n"
    )


# Settings


def load(**settings):
    return build_protocol(ProtocolSettings(**settings))


def test_every_format_of_the_settings_is_a_protocol():
    assert set(FORMATS) == set(PROTOCOLS)


@pytest.mark.parametrize("ends", [("<r>", "</r>"), ("<context>", "<end_context>"), ("<start>", "<start>")])
def test_the_tags_around_documents_are_settings(ends):
    protocol = load(format="tags", information_open=ends[0], information_close=ends[1], system_prompt="Be brief.")
    assert protocol.information == Tag(*ends) and protocol.system == "Be brief."
    assert (
        protocol.observation("Q?", [Step.asking("a", "q", [Document("a", "T", "x")])]).strip()
        == f"{ends[0]}Doc 1(Title: T) x{ends[1]}"
    )
    assert f"between {ends[0]} and {ends[1]}" in protocol.init_prompt
    assert "wrote_documents" in protocol.parse(f"{THOUGHT}{ends[0]}x{ends[1]}{QUERY}", []).faults


@pytest.mark.parametrize("end", ["information", "<a b>", "<>", "<|im_end|>", "<search>", "</Answer>", "<r>\n"])
def test_what_is_no_tag_of_its_own_is_refused(end):
    with raises(R3LiteError, "tag-invalid", "--information-close"):
        load(format="tags", information_close=end)


def test_the_opening_end_alone_of_the_tags_around_documents_is_refused():
    with raises(R3LiteError, "tags-differ", "<context>"):
        load(format="tags", information_open="<context>")
    assert load(format="tags", information_close="<end>").information.closing == "<end>"  # chosen, not forgotten


GRAPH = load(format="tags", search_graph=True, information_open="<r>", information_close="</r>")
NODES = "Nodes:\nA: Who directed Brenn? (General)\nB: Which prizes did Brenn win? (News)\nEdges: A -> B"
PLANNED = Step(
    f"Two things.\n{NODES}",
    (Search("Who directed Brenn?", kind="General"), Search("Which prizes did Brenn win?", kind="News")),
)


def test_a_search_is_a_graph_of_queries_in_the_order_of_its_edges():
    """The layout of R-Search (arXiv 2506.08352): think, a graph in search, r for what was found, answer."""
    text = f"<think> Two things. </think><search> {NODES} </search>"
    assert GRAPH.parse(text, []) == PLANNED and GRAPH.render(PLANNED, 1) == text
    assert GRAPH.parse(text.replace("A -> B", "B -> A"), []).queries == PLANNED.queries[::-1]
    assert GRAPH.parse(text, [PLANNED]).faults == ("repeated_query",)
    searched = PLANNED.with_documents([[Document("1", "Brenn", "By Ann </r> Dahl.")], []])
    observed = "<r>Who directed Brenn?\nDoc 1(Title: Brenn) By Ann \u2039/r> Dahl.\nWhich prizes did Brenn win?\n"
    assert GRAPH.observation("Q?", [searched]).strip() == f"{observed}(nothing was found)</r>"
    assert GRAPH.parse(f"{THOUGHT}{ANSWER}", [searched]) == Step("a", answer="b")
    assert check_steps([searched, Step("a", answer="b")], GRAPH) is None


def test_a_graph_without_a_thought_is_rendered_as_it_was_read():
    """Lenient reading forgives the thought; the plan was taken for it then, and another was written behind it."""
    lenient = load(format="tags", search_graph=True, tags="lenient")
    step = lenient.parse(f"<search> {NODES} </search>", [])
    assert step == Step(NODES, PLANNED.searches)
    assert (
        lenient.render(step, 1).endswith(f"<search> {NODES} </search>")
        and lenient.parse(lenient.render(step, 1), []) == step
    )


@pytest.mark.parametrize(
    ("graph", "fault"),
    [
        ("Who?", "no_nodes"),
        ("Nodes:\nA: Who? (General)", "no_edges"),
        ("Nodes:\nA: Who? (General)\nB: Where? (General)\nEdges: A -> B ; B -> A", "cycle"),
        ("Nodes:\nA: Who? (General)\nB: Where was {A}? (General)\nEdges: A -> B", "unfilled_reference"),
    ],
)
def test_a_graph_that_cannot_be_searched_ends_the_episode(graph, fault):
    step = GRAPH.parse(f"{THOUGHT}<search>{graph}</search>", [])
    assert step == Step("a", faults=(fault,)) and fault in GRAPH.faults
    assert valid_plan(Episode(Question("q", "Q?", ()), [step])) == 0.0
    assert valid_plan(Episode(Question("q", "Q?", ()), [PLANNED])) == 1.0


def test_steps_of_other_formats_become_graphs_of_their_queries():
    steps = [Step("a", (Search("who?"), Search("where?"))), Step("a", answer="b")]
    assert check_steps(steps, GRAPH) is None
    assert GRAPH.render(steps[0], 1).endswith("Nodes:\nA: who? (General)\nB: where? (General)\nEdges: none </search>")
    assert check_steps([Step.asking("a", "who is {x}?"), steps[1]], GRAPH) is not None


def test_the_prompt_of_a_graph_has_its_limits_and_a_worked_example():
    prompt = load(format="tags", search_graph=True, most_nodes=9, most_node_words=7).init_prompt
    assert "at most 9 nodes, of at most 7 words" in prompt and "General, News, Academic" in prompt
    shots = load(format="tags", search_graph=True).shots
    turns = [
        turn
        for shot in shots
        if shot["role"] == "assistant"
        for turn in re.split("<information>.*?</information>", shot["content"], flags=re.DOTALL)
    ]
    steps = []
    for text in turns:
        steps.append(load(format="tags", search_graph=True).parse(text.strip(), steps))
    assert len(steps) == 3 and not any(step.faults for step in steps)


@pytest.mark.parametrize("name", ["tags", "solution"])
def test_prompts(tmp_path, name):
    protocol = load(format=name)
    assert "Who {wrote} it?" in protocol.question_message("Who {wrote} it?")
    assert all(end in protocol.init_prompt for tag in protocol.markup.tags for end in (tag.opening, tag.closing))
    assert protocol.think.opening in protocol.step_request(2)
    (tmp_path / "mine.txt").write_text("Q: {question}")
    assert load(format=name, init_prompt=str(tmp_path / "mine.txt")).question_message("x") == "Q: x"
    (tmp_path / "mine.txt").write_text("Q: {question} {step}")
    with raises(R3LiteError, "prompt-placeholders"):
        load(format=name, init_prompt=str(tmp_path / "mine.txt"))
    with raises(R3LiteError, "step-prompt-unsupported", name):
        load(format=name, step_prompt="prompts/step_prompt.txt")
