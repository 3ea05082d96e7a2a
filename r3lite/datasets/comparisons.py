"""Comparisons: the sentence that states their result in demonstrations, and demonstrations with other dates.

A small model that has both dates right may still name the wrong film. So the last analysis of a demonstration states
which date is first. The dates stand in the order of the hops: then what is to be decided is a single word between them,
which a small model learns from far fewer examples than which of two names to begin with. Then comes the word of the
question with its end of the order, and the name: without it a small model states the right order, but answers with
either name. Even so a data set may have too few (2WikiMultiHopQA: 74 in 500 training questions, 15 of which ask for the
later one), and the model can learn each answer by heart. Copies with other dates leave it nothing but to compare, and
to read which of both is asked for.
"""

import random
import re
from dataclasses import dataclass, replace

from r3lite.core.answer_match import normalize
from r3lite.core.episode import Question, Step
from r3lite.datasets.gold import referenced_hops
from r3lite.datasets.hops import name_of
from r3lite.datasets.trajectories import Trajectory
from r3lite.protocols.base import one_line

MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
# June 9, 1956; 9 June 1956; June 1956; 1956
DATE = re.compile(
    rf"(?:(?P<month>{MONTHS}) (?P<day>\d{{1,2}}),? |(?:(?P<day_first>\d{{1,2}}) )?(?P<month_last>{MONTHS}),? )?"
    r"(?P<year>\d{3,4})",
    re.IGNORECASE,
)
YEARS_MOVED = 40  # the later of two other dates is at most this many years from the true first one
MEAN_GAP = 25  # years between both other dates, in the mean: near dates are the hard ones
LONGEST_GAP = 100
FIRST_YEAR = 100 + YEARS_MOVED + LONGEST_GAP  # for the true date: all other dates have years of at least three digits
LAST_YEAR = 2020
LAST_DAY = 28  # that every month has
# The words of questions that ask for the earlier of two dates, and of those that ask for the later one. With each comes
# the word of the question when it is turned around.
EARLIER_WORDS = {"first": "last", "earlier": "later", "older": "younger"}
LATER_WORDS = {"last": "first", "later": "earlier", "more recently": "earlier", "younger": "older"}
WORDS = EARLIER_WORDS | LATER_WORDS
ASKED_FOR = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")


def compared(question: Question) -> str | None:
    """Returns what a comparison of two facts comes to, in a sentence or two; None for other questions.

    If the question asks whether they are the same, it is `India and Italy are not the same.`, or `They are not the
    same.` if the facts are sentences. If they are two dates, it is `DatedPair.sentences`.
    """
    last_hops = _last_hops(question)
    if last_hops is None:
        return None
    answer = normalize(question.answers[0])
    if answer in ("yes", "no") and re.search(r"\bsame\b", question.text):
        facts = [question.hops[hop].answer for hop in last_hops]
        verdict = "not the same"
        if answer == "yes":
            verdict = "the same"
        compared_facts = f"{facts[0]} and {facts[1]}"
        # The facts of HotpotQA are supporting sentences. They stand in the analysis just before the returned sentence.
        if any(hop.answer == " ".join(hop.evidence) for hop in question.hops):
            compared_facts = "They"
        return f"{compared_facts} are {verdict}."
    pair = dated_pair(question)
    if pair is None:
        return None
    return pair.sentences


@dataclass(frozen=True)
class DatedPair:
    """Two things that a question compares, and their dates, in the order of the hops. One date is earlier."""

    names: tuple[str, str]
    dates: tuple[str, str]  # as the data set writes them
    word: str  # of the question, for the one that it asks for; a key of `WORDS`

    @property
    def is_ascending(self) -> bool:
        """Returns whether the first date is the earlier one."""
        return date(self.dates[0]) < date(self.dates[1])

    @property
    def in_order(self) -> tuple[str, str]:
        """Returns the names, that with the earlier date first."""
        if self.is_ascending:
            return self.names
        return self.names[::-1]

    @property
    def answer(self) -> str:
        """Returns the name that is asked for."""
        earlier, later = self.in_order
        if self.word in EARLIER_WORDS:
            return earlier
        return later

    @property
    def sentences(self) -> str:
        """`June 9, 1956 is before May 3, 1993: first Prairie King, then Opium Eater. Later is then: Opium Eater.`"""
        relation = "after"
        if self.is_ascending:
            relation = "before"
        end = "then"
        if self.word in EARLIER_WORDS:
            end = "first"
        earlier, later = self.in_order
        order = f"{self.dates[0]} is {relation} {self.dates[1]}: first {earlier}, then {later}."
        return f"{order} {self.word.capitalize()} is {end}: {self.answer}."


def dated_pair(question: Question) -> DatedPair | None:
    """Returns what a question compares if it is two dates, one of which is earlier; else None.

    The dates are the answers of the two hops that no further hop uses. The question has a single one of `WORDS`, and
    its answer is the name that follows.
    """
    last_hops = _last_hops(question)
    words = ASKED_FOR.findall(question.text)
    if last_hops is None or len(words) != 1:
        return None
    names = [subject(question, hop) for hop in last_hops]
    dates = [question.hops[hop].answer.strip() for hop in last_hops]
    numbers = [date(text) or () for text in dates]
    # Equal dates have no order, nor have dates that are equal as far as the less exact one goes: 1956 and June 9, 1956.
    exactness = min(map(len, numbers))
    if numbers[0][:exactness] == numbers[1][:exactness]:
        return None
    pair = DatedPair(names=(names[0], names[1]), dates=(dates[0], dates[1]), word=words[0])
    # `subject` guesses the names. If the one that follows is the answer, the guess is taken to be right.
    is_answered = [normalize(name) == normalize(question.answers[0]) for name in pair.in_order]
    if is_answered != [name is pair.answer for name in pair.in_order]:
        return None
    return pair


def _last_hops(question: Question) -> list[int] | None:
    """Returns the two hops of a comparison that no further hop uses; None for other questions."""
    hop_count = len(question.hops)
    used_hops: set[int] = set()
    for hop in range(hop_count):
        used_hops |= referenced_hops(question, hop)
    last_hops = [hop for hop in range(hop_count) if hop not in used_hops]
    if "comparison" not in question.type or len(last_hops) != 2:
        return None
    return last_hops


def subject(question: Question, hop: int) -> str:
    """Returns what a hop is about in the end: the name of the first paragraph of the chain that leads to the hop."""
    earlier_hops = referenced_hops(question, hop)
    if earlier_hops:
        return subject(question, min(earlier_hops))
    return name_of(question.hops[hop].document.title)


def date(text: str) -> tuple[int, ...] | None:
    """Returns (year,), (year, month) or (year, month, day), as far as the text has them; None if it is no date."""
    match = DATE.fullmatch(text)
    if match is None:
        return None
    parts = [int(match["year"])]
    month = match["month"] or match["month_last"]
    if month:
        parts.append(1 + MONTHS.split("|").index(month.lower()))
    day = match["day"] or match["day_first"]
    if day:
        parts.append(int(day))
    return tuple(parts)


def with_other_dates(question: Question, trajectory: Trajectory, count: int, seed: int) -> list[Trajectory]:
    """Returns `count` copies of a question's trajectory in which both compared dates are others, in all documents and
    analyses; the answer is the one that follows. Every second copy asks for the other one: who is younger in place of
    who is older.

    There are none if the question compares no dates, if it or the title of a document has one of the dates, or if one
    does not stand in the documents just as the data set writes it.
    """
    pair = dated_pair(question)
    if pair is None:
        return []
    documents = [document for step in trajectory.steps for document in step.documents]
    untouched = "\n".join([question.text, *(document.title for document in documents)])
    texts = "\n".join(document.text for document in documents)
    for text in pair.dates:
        if _whole(text).search(untouched) or not _whole(text).search(texts):
            return []
    copies = []
    for number in range(1, count + 1):
        stream = random.Random(f"{seed}/{question.id}/dates/{number}")
        other = replace(pair, dates=_other_dates(pair, stream))
        if number % 2 == 0:
            other = replace(other, word=WORDS[pair.word])
        copy = _copy(trajectory, pair=pair, other=other)
        copies.append(replace(copy, id=f"{trajectory.id}/dates-{number}"))
    return copies


def _whole(text: str) -> re.Pattern:
    """Returns a pattern for a text that is no part of a longer word or number."""
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")


def _other_dates(pair: DatedPair, stream: random.Random) -> tuple[str, str]:
    """Returns two random dates of the same forms, in years that differ. Either may be the earlier one."""
    true_year = min(max(date(pair.dates[0])[0], FIRST_YEAR), LAST_YEAR)
    later_year = true_year + stream.randint(-YEARS_MOVED, min(YEARS_MOVED, LAST_YEAR - true_year))
    gap = min(1 + int(stream.expovariate(1 / MEAN_GAP)), LONGEST_GAP)
    years = [later_year - gap, later_year]
    stream.shuffle(years)
    first, second = (_in_year(text, year, stream) for text, year in zip(pair.dates, years, strict=True))
    return first, second


def _in_year(text: str, year: int, stream: random.Random) -> str:
    """Returns a date of the form of `text` in a year; month and day are random, as far as the form has them."""
    month = stream.choice(MONTHS.split("|")).title()
    day = str(stream.randint(1, LAST_DAY))
    values = {"month": month, "month_last": month, "day": day, "day_first": day, "year": str(year)}
    match = DATE.fullmatch(text)
    parts = sorted((match.span(name), value) for name, value in values.items() if match[name])
    for (begin, end), value in reversed(parts):
        text = text[:begin] + value + text[end:]
    return text


def _copy(trajectory: Trajectory, pair: DatedPair, other: DatedPair) -> Trajectory:
    """Returns the trajectory of a question that compares `pair` as that of the same question about `other`."""
    new_dates = dict(zip(pair.dates, other.dates, strict=True))
    old_date = re.compile("|".join(_whole(text).pattern for text in sorted(new_dates, key=len, reverse=True)))
    asked = ASKED_FOR.sub(other.word, trajectory.question)

    def redated(text: str) -> str:
        return old_date.sub(lambda match: new_dates[match[0]], text)

    def redated_step(step: Step) -> Step:
        searches = []
        for search in step.searches:
            documents = [replace(document, text=redated(document.text)) for document in search.documents]
            query = search.query.replace(one_line(trajectory.question), one_line(asked))
            searches.append(replace(search, query=query, documents=tuple(documents)))
        return replace(
            step,
            analysis=redated(step.analysis),
            searches=tuple(searches),
            verification=redated(step.verification),
        )

    answers = trajectory.answers
    if other.answer != pair.answer:
        answers = (other.answer,)
    *steps, last = trajectory.steps
    redated_last = redated_step(replace(last, analysis=last.analysis.removesuffix(pair.sentences)))
    redated_last = replace(redated_last, analysis=redated_last.analysis + other.sentences, answer=answers[0])
    return replace(
        trajectory,
        question=asked,
        answers=answers,
        steps=(*map(redated_step, steps), redated_last),
    )
