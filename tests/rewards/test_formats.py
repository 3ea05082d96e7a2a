import pytest

from r3lite.core.episode import ANSWERED, CUT_OFF, MALFORMED, Episode, Step
from r3lite.protocols.registry import build_protocol
from r3lite.rewards.formats import all_tags, approximate_format, strict_format, tag_share, valid_plan
from r3lite.settings import ProtocolSettings
from tests.rewards.episodes import GOLD, QUESTION, answer, answered, search


@pytest.mark.parametrize(
    ("episode", "strict", "approximate"),
    [
        (answered("Ada", search()), 1, 1),
        (answered("Ada", search(faults=("no_analysis",))), 0, 1),
        (Episode(QUESTION, [answer("Ada", ("text_after_answer",))], ANSWERED), 0, 1),
        (Episode(QUESTION, [search()], CUT_OFF), 0, 0),
        (Episode(QUESTION, [search(), Step("x", faults=("no_query_or_answer",))], MALFORMED), 0, 0),
    ],
)
def test_strict_and_approximate(episode, strict, approximate):
    assert (strict_format(episode), approximate_format(episode)) == (strict, approximate)


def test_all_tags_or_a_share_of_them():
    full_episode = answered("Ada", search(GOLD[0]))
    assert tag_share(full_episode) == all_tags(full_episode) == all_tags(full_episode, documents=True) == 1
    nothing_found = answered("Ada", search())
    assert (tag_share(nothing_found, documents=True), all_tags(nothing_found, documents=True)) == (3 / 4, 0)
    at_once = answered("Ada")
    assert (tag_share(at_once), all_tags(at_once), all_tags(at_once, query=False)) == (2 / 3, 0, 1)
    assert tag_share(Episode(QUESTION, [Step.asking("", "where")], CUT_OFF)) == pytest.approx(1 / 3)


def test_tags_as_a_protocol_reads_them():
    protocol = build_protocol(ProtocolSettings(format="solution"))

    def paid(text):
        step = protocol.parse(text, [])
        episode = Episode(QUESTION, [step], ANSWERED if step.answer else MALFORMED)
        return strict_format(episode), approximate_format(episode), tag_share(episode, query=False)

    solution = "<start_working_out> So. <end_working_out><SOLUTION> Ada </SOLUTION>"
    assert paid(solution) == (1, 1, 1)
    assert paid("Well, " + solution) == (0, 1, 1)
    assert paid("<SOLUTION> Ada </SOLUTION>") == (0, 1, 1 / 2)
    assert paid(solution + "<SOLUTION> Bob </SOLUTION>") == (0, 0, 1 / 2)  # it is not clear which of the two is meant


def test_a_valid_plan_as_its_protocol_reads_it():
    dag = build_protocol(ProtocolSettings(format="dag"))
    plan = "Nodes:\nA: Who? (General)\nEdges: none"
    for text, paid in ((plan, 1), (plan.replace("General", "Web"), 0)):
        assert valid_plan(Episode(QUESTION, [dag.parse(text, [])], CUT_OFF)) == paid
    assert valid_plan(Episode(QUESTION, [dag.read_answer(" Ada", [])], CUT_OFF)) == 0
    assert valid_plan(Episode(QUESTION, [], CUT_OFF)) == 0 == valid_plan(answered("Ada", search()))
