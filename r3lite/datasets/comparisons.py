"""Comparisons: the sentence that states their result in demonstrations, and demonstrations with other dates.

A small model that has both dates right may still name the wrong film. So the last analysis of a demonstration states
which date is first. The dates stand in the order of the hops: then what is to be decided is a single word between them,
which a small model learns from far fewer examples than which of two names to begin with. Even so a data set may have
too few (2WikiMultiHopQA: 74 in 500 training questions, 15 of which ask for the later one), and the model can learn each
answer by heart. Copies with other dates leave it nothing but to compare, and to read which of both is asked for.
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
# What a question asks for, and what it asks for when it is turned around.
OPPOSITES = {
    "first": "last", "last": "first", "earlier": "later", "later": "earlier", "more recently": "earlier",
    "older": "younger", "younger": "older",
}  # fmt: skip
ASKED_FOR = re.compile(rf"\b(?:{'|'.join(OPPOSITES)})\b")


def compared(question: Question) -> str | None:
    """Returns a sentence that compares the two facts of a comparison; None for other questions.

    If the question asks whether they are the same, the sentence is `India and Italy are not the same.`, or `They are
    not the same.` if the facts are sentences. If they are two dates, it is that of `DatedPair`.
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
    return pair.sentence


@dataclass(frozen=True)
class DatedPair:
    """Two things that a question compares, and their dates, in the order of the hops. One date is earlier."""

    names: tuple[str, str]
    dates: tuple[str, str]  # as the data set writes them

    @property
    def is_ascending(self) -> bool:
        """Returns whether the first date is the earlier one."""
        return date(self.dates[0]) < date(self.dates[1])

    @property
    def sentence(self) -> str:
        """`June 9, 1956 is before October 26, 1993: first The Prairie King, then Confessions of an Opium Eater.`"""
        first, second = self.names
        if self.is_ascending:
            return f"{self.dates[0]} is before {self.dates[1]}: first {first}, then {second}."
        return f"{self.dates[0]} is after {self.dates[1]}: first {second}, then {first}."


def dated_pair(question: Question) -> DatedPair | None:
    """Returns what a question compares if it is two dates, one of which is earlier; else None.

    The dates are the answers of the two hops that no further hop uses. Exactly one of the things is the answer.
    """
    last_hops = _last_hops(question)
    if last_hops is None:
        return None
    names = [subject(question, hop) for hop in last_hops]
    dates = [question.hops[hop].answer.strip() for hop in last_hops]
    numbers = [date(text) or () for text in dates]
    # Equal dates have no order, nor have dates that are equal as far as the less exact one goes: 1956 and June 9, 1956.
    exactness = min(map(len, numbers))
    is_decided = numbers[0][:exactness] != numbers[1][:exactness]
    # `subject` guesses the names. If exactly one of them is the answer, the guess is taken to be right.
    is_answered = sum(normalize(name) == normalize(question.answers[0]) for name in names) == 1
    if not is_decided or not is_answered:
        return None
    return DatedPair(names=(names[0], names[1]), dates=(dates[0], dates[1]))


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
    analyses; the answer is the one that follows. Every second copy asks for the other one, if the question can be
    turned around: who is younger in place of who is older.

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
        asked = question.text
        if number % 2 == 0:
            asked = turned(asked)
        other = _other_dates(pair, stream)
        copy = _copy(question, trajectory, pair=pair, other=other, asked=asked)
        copies.append(replace(copy, id=f"{trajectory.id}/dates-{number}"))
    return copies


def turned(text: str) -> str:
    """Returns a question that asks for the other one of two things; the same question if it cannot be turned around."""
    words = ASKED_FOR.findall(text)
    if len(words) != 1:
        return text
    return ASKED_FOR.sub(OPPOSITES[words[0]], text)


def _whole(text: str) -> re.Pattern:
    """Returns a pattern for a text that is no part of a longer word or number."""
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")


def _other_dates(pair: DatedPair, stream: random.Random) -> DatedPair:
    """Returns the pair with two random dates of the same forms, in years that differ. Either may be the earlier one."""
    true_year = min(max(date(pair.dates[0])[0], FIRST_YEAR), LAST_YEAR)
    later_year = true_year + stream.randint(-YEARS_MOVED, min(YEARS_MOVED, LAST_YEAR - true_year))
    gap = min(1 + int(stream.expovariate(1 / MEAN_GAP)), LONGEST_GAP)
    years = [later_year - gap, later_year]
    stream.shuffle(years)
    first, second = (_in_year(text, year, stream) for text, year in zip(pair.dates, years, strict=True))
    return replace(pair, dates=(first, second))


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


def _copy(question: Question, trajectory: Trajectory, pair: DatedPair, other: DatedPair, asked: str) -> Trajectory:
    """Returns the trajectory with the dates of `other` in place of those of `pair`, and `asked` as its question."""
    new_dates = dict(zip(pair.dates, other.dates, strict=True))
    old_date = re.compile("|".join(_whole(text).pattern for text in sorted(new_dates, key=len, reverse=True)))

    def redated(text: str) -> str:
        return old_date.sub(lambda match: new_dates[match[0]], text)

    def redated_step(step: Step) -> Step:
        searches = []
        for search in step.searches:
            documents = [replace(document, text=redated(document.text)) for document in search.documents]
            query = search.query.replace(one_line(question.text), one_line(asked))
            searches.append(replace(search, query=query, documents=tuple(documents)))
        return replace(
            step,
            analysis=redated(step.analysis),
            searches=tuple(searches),
            verification=redated(step.verification),
        )

    answers = trajectory.answers
    is_reordered = other.is_ascending != pair.is_ascending
    is_turned = asked != question.text
    if is_reordered != is_turned:
        answers = tuple(name for name in pair.names if normalize(name) != normalize(question.answers[0]))
    *steps, last = trajectory.steps
    last = replace(last, analysis=last.analysis.removesuffix(pair.sentence), answer=answers[0])
    last = redated_step(last)
    last = replace(last, analysis=last.analysis + other.sentence)
    return replace(
        trajectory,
        question=asked,
        answers=answers,
        steps=(*map(redated_step, steps), last),
    )
