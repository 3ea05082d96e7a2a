"""Episodes that tests of rewards are worked out on by hand."""

from r3lite.core.episode import ANSWERED, Document, Episode, Question, Step

GOLD = tuple(Document(str(i), f"Title {i}", f"Text {i}.") for i in range(2))
OTHER, ANOTHER = Document("8", "Other", "Nothing."), Document("9", "Another", "Nothing more.")
QUESTION = Question("q", "Who wrote it?", ("Ada Byron", "Ada"), GOLD, GOLD)


def search(*documents, query="where", faults=()):
    return Step.asking("I need it.", query, documents, faults=faults)


def answer(text, faults=()):
    return Step("So.", answer=text, faults=faults)


def answered(text, *steps, question=QUESTION):
    """An episode that ends with an answer after some steps."""
    return Episode(question, [*steps, answer(text)], ANSWERED)
