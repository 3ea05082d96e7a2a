"""What a comparison comes to: dates of every form in the data sets, what is not compared, copies with other dates."""

import re
from dataclasses import replace

import pytest

from r3lite.core.episode import Document, Hop, Question, Step
from r3lite.datasets.comparisons import compared, date, with_other_dates
from r3lite.datasets.trajectories import Trajectory
from tests.collecting import lines, read_rows, run, write

FILMS = Document("0", "Alva (film)", ""), Document("1", "Berta", "")
PEOPLE = Document("2", "Carl", ""), Document("3", "Dora", "")


def asked(
    a: str, b: str, answer: str, text: str = "Whose director died first, Alva or Berta?", kind="bridge_comparison"
):
    hops = (
        Hop("Who is the director of Alva?", "Carl", FILMS[0]),
        Hop("Who is the director of Berta?", "Dora", FILMS[1]),
        Hop("When did #1 die?", a, PEOPLE[0]),
        Hop("When did #2 die?", b, PEOPLE[1]),
    )
    return compared(Question("q", text, (answer,), hops=hops, type=kind))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("June 9, 1956", (1956, 6, 9)),
        ("19 February 1913", (1913, 2, 19)),
        ("October 1893", (1893, 10)),
        ("950", (950,)),
        ("9 may 1956", (1956, 5, 9)),
        ("June 1, 1950 and June 3, 1950", None),
        ("about 1950", None),
        ("India", None),
    ],
)
def test_dates(text, expected):
    assert date(text) == expected


def test_dates_stand_in_the_order_of_the_hops_and_names_in_that_of_the_dates():
    after = "1956 is after 9 June 1940: first Berta, then Alva. First is first: Berta."
    assert asked("1956", "9 June 1940", "Berta") == after
    assert asked("1956", "9 June 1940", "berta") == after
    before = "9 June 1940 is before 1956: first Alva, then Berta. First is first: Alva."
    assert asked("9 June 1940", "1956", "Alva") == before
    assert asked("9 June 1940", "July 1940", "Alva") == before.replace("1956", "July 1940")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("Which film came out earlier, Alva or Berta?", "Earlier is first: Alva."),
        ("Who is older, Alva or Berta?", "Older is first: Alva."),
        ("Whose director was born later, Alva or Berta?", "Later is then: Berta."),
        ("Which was released more recently, Alva or Berta?", "More recently is then: Berta."),
        ("Was the director of Alva or Berta born last?", "Last is then: Berta."),
        ("Whose director is younger, Alva or Berta?", "Younger is then: Berta."),
    ],
)
def test_the_word_of_the_question_says_which_end_of_the_order_is_asked_for(text, end):
    name = end.split(": ")[1].removesuffix(".")
    assert asked("1940", "1956", name, text) == f"1940 is before 1956: first Alva, then Berta. {end}"
    other = {"Alva": "Berta", "Berta": "Alva"}[name]
    assert asked("1940", "1956", other, text) is None  # another question than it seems


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        ("1956", "June 9, 1956", "Alva"),  # which is first is not known
        ("1956", "1956", "Alva"),
        ("1956", "unknown", "Alva"),
        ("1956", "1960", "Carl"),  # neither film
        ("1956", "1960", "yes"),
    ],
)
def test_what_does_not_decide_is_not_compared(a, b, answer):
    assert asked(a, b, answer) is None


@pytest.mark.parametrize(
    "text",
    ["Who lived longer, Alva or Berta?", "Which came out first, Alva or the last of Berta?", "Who knows it firsthand?"],
)
def test_without_a_single_word_for_an_end_of_the_order_nothing_is_compared(text):
    assert asked("1956", "1960", "Alva", text) is None


def test_only_comparisons_are_compared():
    assert asked("1956", "1960", "Alva") is not None
    assert asked("1956", "1960", "Alva", kind="compositional") is None


def test_whether_two_facts_are_the_same():
    text = "Are the directors of Alva and Berta of the same country?"
    assert asked("India", "Italian", "no", text) == "India and Italian are not the same."
    ends_with_same = "Are the nationalities of both directors the same?"
    assert asked("India", "Italian", "no", ends_with_same) == "India and Italian are not the same."
    assert asked("American", "U.S.", "yes", text) == "American and U.S. are the same."
    # The facts of HotpotQA are whole sentences: one was made of two, with stops in it.
    facts = ("Ann is an American singer.", "Bob was a British painter.")
    hops = [Hop(f"Person {i}", fact, PEOPLE[i], (fact,)) for i, fact in enumerate(facts)]
    question = Question("q", "Are Ann and Bob of the same country?", ("no",), hops=tuple(hops), type="comparison")
    assert compared(question) == "They are not the same."


ALVA = Document("3", "Alva", "Alva, of June 9, 1956, is a film. In 1956 it was praised.")
BERTA = Document("4", "Berta (film)", "Berta is of 3 May 1949, not of 13 May 1949.")
OLDER = Question(
    "c",
    "Which film is older, Alva or Berta?",
    ("Berta", "Berta, the film"),
    gold=(ALVA, BERTA),
    gold_by="title",
    hops=(Hop("When was Alva made?", "June 9, 1956", ALVA), Hop("When was Berta made?", "3 May 1949", BERTA)),
    type="comparison",
)
FACTS = "When was Alva made? June 9, 1956. When was Berta made? 3 May 1949."
DEMONSTRATION = Trajectory.of(
    OLDER,
    [
        Step.asking("The question names Alva and Berta.", OLDER.text, [ALVA, BERTA]),
        Step(f"{FACTS} {compared(OLDER)}", answer="Berta"),
    ],
    "gold",
)


def test_copies_have_other_dates_of_the_same_forms_and_the_answer_that_follows():
    copies = with_other_dates(OLDER, DEMONSTRATION, count=20, seed=0)
    seen = set()
    for number, copy in enumerate(copies, 1):
        asked_for = "older"
        if number % 2 == 0:
            asked_for = "younger"
        assert copy.id == f"c/dates-{number}" and copy.source == "gold"
        assert copy.question == f"Which film is {asked_for}, Alva or Berta?" == copy.steps[0].queries[0]
        last = copy.steps[-1]
        pattern = r"When was Alva made\? ([A-Z][a-z]+ \d+, (\d+))\. When was Berta made\? (\d+ [A-Z][a-z]+ (\d+))\. "
        alva, alva_year, berta, berta_year = re.match(pattern, last.analysis).groups()
        assert date(alva) and date(berta) and alva_year != berta_year
        films = {"older": "Berta", "younger": "Alva"}
        relation = "after"
        if int(alva_year) < int(berta_year):
            films = {"older": "Alva", "younger": "Berta"}
            relation = "before"
        order = f"first {films['older']}, then {films['younger']}."
        end = {"older": "first", "younger": "then"}[asked_for]
        chosen = f"{asked_for.capitalize()} is {end}: {films[asked_for]}."
        assert last.analysis.endswith(f"{berta}. {alva} is {relation} {berta}: {order} {chosen}")
        assert last.answer == copy.answers[0] == films[asked_for]
        assert copy.answers in (("Alva",), OLDER.answers)
        texts = [document.text for document in copy.steps[0].documents]
        # A date that only contains one of both, and a year alone, are left.
        assert texts[0] == ALVA.text.replace("June 9, 1956", alva)
        assert texts[1] == f"Berta is of {berta}, not of 13 May 1949."
        seen.add((asked_for, last.answer))
    assert len(seen) == 4 and len({copy.steps for copy in copies}) == 20
    assert with_other_dates(OLDER, DEMONSTRATION, count=20, seed=0) == copies
    assert with_other_dates(OLDER, DEMONSTRATION, count=20, seed=1) != copies
    assert with_other_dates(OLDER, DEMONSTRATION, count=0, seed=0) == []


@pytest.mark.parametrize("years", [("101", "102"), ("2098", "2099"), ("2019", "2020")])
def test_copies_of_dates_at_the_ends_of_time(years):
    documents = [replace(document, text=f"It is of {year}.") for document, year in zip((ALVA, BERTA), years)]
    hops = [replace(hop, answer=year) for hop, year in zip(OLDER.hops, years)]
    question = replace(OLDER, hops=tuple(hops), answers=("Alva",))
    steps = [Step.asking("", OLDER.text, documents), Step(compared(question), answer="Alva")]
    copies = with_other_dates(question, Trajectory.of(question, steps, "gold"), count=200, seed=0)
    others = [tuple(int(year) for year in re.findall(r"\d{3,4}", copy.steps[-1].analysis)) for copy in copies]
    assert min(map(min, others)) >= 100 and max(map(max, others)) <= 2020
    # What a date is says as little as possible about which is first.
    assert 80 <= sum(first < second for first, second in others) <= 120


def test_there_are_no_copies_if_a_date_would_stay():
    def copies(question=OLDER, **changes):
        documents = [replace(ALVA, **changes), BERTA]
        asked = Step.asking("", question.text, documents)
        return with_other_dates(question, Trajectory.of(question, [asked, DEMONSTRATION.steps[1]], ""), 1, seed=0)

    assert copies()
    assert not copies(text="Alva is of 9 June 1956.")  # in another form
    assert not copies(title="Alva (June 9, 1956)")
    assert not copies(replace(OLDER, text="Which is older, Alva of June 9, 1956 or Berta?"))
    assert not copies(replace(OLDER, type="compositional"))


def test_collect_adds_copies_behind_the_demonstrations(tmp_path, capsys):
    data = {"_id": "c", "type": "comparison", "question": OLDER.text, "answer": "Berta"}
    data["context"] = [["Alva", ["Alva is of June 9, 1956."]], ["Berta", ["Berta is of 3 May 1949."]]]
    data["supporting_facts"] = [["Alva", 0], ["Berta", 0]]
    evidence = [("Alva", "June 9, 1956"), ("Berta", "3 May 1949")]
    data["evidences"] = [[name, "publication date", day] for name, day in evidence]
    file = write(tmp_path / "data.jsonl", [data])
    output = tmp_path / "out.jsonl"
    assert run(file, output, "--retriever", "lexical", "--other-dates", "3") == 0
    assert [record["id"] for record in lines(output)] == ["c", "c/dates-1", "c/dates-2", "c/dates-3"]
    assert len(read_rows(output)) == 4  # refuses what is not well-formed
    assert re.search(r"trajectories kept +1\n(.*\n)*copies with other dates +3\n", capsys.readouterr().out)
    refused = ("--other-dates", "3", "--demonstrations", "sub-questions")
    assert run(file, tmp_path / "other.jsonl", *refused) == 2
    assert "--other-dates" in capsys.readouterr().err
