"""What a corpus lacks, worked by hand."""

from r3lite.core.episode import Document, Question
from r3lite.retrieval.recall import gaps, report

HARBOR, LEE, OSLO = (
    Document(str(i), t, f"{t} is here. More.") for i, t in enumerate(("Blue Harbor", "Ann Lee", "Oslo"))
)
ONE = Question("1", "One?", ("a",), gold=(HARBOR, LEE), gold_by="title")
TWO = Question("2", "Two?", ("a",), gold=(HARBOR, LEE, OSLO), gold_by="text")
BARE = Question("3", "No gold?", ("a",))
# Another text of Ann Lee is gold by its title only; a window of Oslo's paragraph is recognised.
CORPUS = [Document("x", "blue  harbor", "blue harbor is here. more."), Document("y", "Ann Lee", "Another."),
          Document("z", "Oslo", "Oslo is here.")]  # fmt: skip


def test_what_is_missing_and_what_it_costs():
    one, two = gaps([ONE, TWO, BARE], CORPUS)
    assert (one.missing, two.missing) == ((), (LEE,))
    assert [one.best_recall(k) for k in (1, 2, None)] == [0.5, 1, 1]
    assert [two.best_recall(k) for k in (1, 2, 5, None)] == [1 / 3, 2 / 3, 2 / 3, 2 / 3]


def test_the_report():
    summary = report(gaps([ONE, TWO, BARE], CORPUS), cuts=(1, 5))
    assert summary == {
        "n": 2,
        "gold": 5,
        "missing": 1,
        "best_recall": (1 + 2 / 3) / 2,
        "best_recall_at": {"1": (1 / 2 + 1 / 3) / 2, "5": (1 + 2 / 3) / 2},
        "questions": [
            {
                "id": "2",
                "question": "Two?",
                "gold": 3,
                "missing": [{"title": "Ann Lee", "text": "Ann Lee is here. More."}],
                "best_recall": 2 / 3,
            }
        ],
    }
    assert gaps([ONE], [])[0].best_recall() == 0
