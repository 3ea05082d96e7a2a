"""Sub-questions: MuSiQue's short forms and relations, written out by rule."""

import pytest

from r3lite.datasets.hops import natural, relation_question


@pytest.mark.parametrize(
    ("sub_question", "natural_form"),
    [
        ("Hello Love >> performer", "Who is the performer of Hello Love?"),
        ("#1 >> located in or next to body of water", "Which body of water is #1 located in or next to?"),
        ("Midway, #2 , #1 >> country", "What is the country of Midway, #2, #1?"),
        ("#1 >> capital of", "What is #1 the capital of?"),
        ("X >> owned by", "What is X owned by?"),
        ("X >> record label", "What is the record label of X?"),
        ("Who is #3 's mother?", "Who is #3's mother?"),
        ("how many publix stores are in #3", "How many publix stores are in #3?"),
        ("Who was the first president of #1 ?", "Who was the first president of #1?"),
    ],
)  # fmt: skip
def test_musique_sub_questions_read_naturally(sub_question, natural_form):
    assert natural(sub_question) == natural_form


def test_relations_with_a_preposition_stay_readable():
    assert relation_question("Kant", "influenced by") == "What is Kant influenced by?"
