"""Plans of searches: what is read, what is refused by name, and the order of the nodes."""

import random

import pytest

from r3lite.protocols.plan import FAULTS, InvalidPlan, Limits, Node, SearchPlan, read

LIMITS = Limits(nodes=4, words=6)
DIAMOND = """Nodes:
A: Who made Brenn? (General)
B: When was {A} born? (News)
C: Where was {A} born? (Academic)
D: Who ruled {C} in {B}? (General)
Edges: A -> B ; A -> C ; B -> D ; C -> D"""


def test_a_diamond():
    plan = read(DIAMOND, LIMITS)
    assert [[node.name for node in level] for level in plan.levels] == [["A"], ["B", "C"], ["D"]]
    assert [node.kind for node in plan.nodes] == ["General", "News", "Academic", "General"]
    assert plan.text() == DIAMOND and read(plan.text(), LIMITS) == plan
    assert plan.nodes[3].filled({"B": "1900", "C": "{B}"}) == "Who ruled {B} in 1900?"  # an answer is no reference


@pytest.mark.parametrize(
    "text",
    [
        "Nodes:\nA: x? (General)\nEdges: none",
        "\n  Nodes:\n\n  A :  x?  ( general )  \n\nEdges:\n",
        "Nodes:\nA: x? (GENERAL)\nEdges: None",
    ],
)
def test_spaces_case_and_blank_lines_are_free(text):
    assert read(text, LIMITS) == SearchPlan((Node("A", "x?"),))


def test_academy_is_academic_and_a_query_may_have_brackets():
    plan = read("Nodes:\nA: Who made Brenn (film)? (Academy)\nEdges:\n", LIMITS)
    assert plan == SearchPlan((Node("A", "Who made Brenn (film)?", "Academic"),))


A, B, END = "A: x (General)\n", "B: y (General)\n", "Edges: none"
BAD = {  # 45, by fault
    "no_nodes": ["", "  ", "none of it", "Nodes:", "Nodes:\nEdges: none", "nodes:\n" + A + END],
    "no_edges": ["Nodes:\n" + A, "Nodes:\n" + A + "edges: none", "Nodes:\n" + A + "x Edges: none"],
    "text_outside_plan": ["I plan.\nNodes:\n" + A + END, "1. Nodes:\n" + A + END],
    "malformed_node": [
        f"Nodes:\n{line}\n{END}"
        for line in ("A x (General)", "A: x", "A: x General", ": x (General)", "1: x (General)", "A: x (General) more")
    ],
    "blank_query": ["Nodes:\nA: (General)\n" + END, "Nodes:\nA:   (News)\n" + END],
    "unknown_source": [f"Nodes:\nA: x ({source})\n{END}" for source in ("", "Web", "General, News", "Generall")],
    "repeated_node": ["Nodes:\n" + A + "A: z (News)\n" + END],
    "too_many_nodes": ["Nodes:\n" + "".join(f"N{i}: q{i} (General)\n" for i in range(5)) + END],
    "long_query": ["Nodes:\nA: one two three four five six seven (General)\n" + END],
    "repeated_query": ["Nodes:\n" + A + "B: X? (News)\n" + END],
    "malformed_edge": [
        f"Nodes:\n{A}{B}Edges: {edges}"
        for edges in ("A", "A B", "A > B", "A -> ", "-> B", "A -> B, B -> A", "A -> B -> A", "none ; A -> B")
    ],
    "unknown_node": ["Nodes:\n" + A + B + "Edges: A -> C", "Nodes:\n" + A + "B: {C} (General)\nEdges: A -> B"],
    "repeated_edge": ["Nodes:\n" + A + B + "Edges: A -> B ; A -> B"],
    "self_loop": ["Nodes:\n" + A + "Edges: A -> A"],
    "cycle": [
        "Nodes:\n" + A + B + "Edges: A -> B ; B -> A",
        "Nodes:\n" + A + B + "C: z (General)\nEdges: A -> B ; B -> C ; C -> B",
    ],
    "reference_without_edge": [
        "Nodes:\n" + A + "B: {A} (General)\n" + END,
        "Nodes:\nA: {B} (General)\n" + B + "Edges: A -> B",
        "Nodes:\nA: {A} (General)\n" + END,
    ],
}


def test_there_are_forty_malformed_plans_and_one_of_every_fault():
    assert sum(map(len, BAD.values())) >= 40 and BAD.keys() == FAULTS.keys()


@pytest.mark.parametrize(("fault", "text"), [(fault, text) for fault, texts in BAD.items() for text in texts])
def test_malformed_plans_are_refused_by_name(fault, text):
    with pytest.raises(InvalidPlan) as refused:
        read(text, LIMITS)
    assert str(refused.value) == fault


def test_random_plans_survive_being_written_and_their_order_is_topological():
    draw = random.Random(0)
    for _ in range(200):
        names = draw.sample("ABCDEFGH", draw.randint(1, 8))
        edges = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if draw.random() < 0.3]
        draw.shuffle(edges)
        nodes = [
            Node(
                n,
                " ".join([f"what is {i}", *(f"{{{a}}}" for a, b in edges if b == n)]),
                draw.choice(("News", "General")),
            )
            for i, n in enumerate(draw.sample(names, len(names)))
        ]
        plan = SearchPlan(tuple(nodes), tuple(edges))
        assert read(plan.text(), Limits(8, 99)) == plan
        level = {node.name: i for i, nodes in enumerate(plan.levels) for node in nodes}
        assert all(level[a] < level[b] for a, b in edges) and len(level) == len(names)
        # No node waits longer than it must: each has a predecessor in the level before it.
        assert all(k == 0 or any(b == n and level[a] == k - 1 for a, b in edges) for n, k in level.items())
