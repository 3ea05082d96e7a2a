"""What a comparison comes to, by rule: a small model that has both dates right may still name the wrong film."""

import re

from r3lite.core.answer_match import normalize
from r3lite.core.episode import Hop, Question
from r3lite.datasets.hops import name_of

MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
DATE = re.compile(
    rf"(?:(?P<month>{MONTHS}) (?P<day>\d{{1,2}}),? |(?:(?P<day_first>\d{{1,2}}) )?(?P<month_last>{MONTHS}),? )?"
    r"(?P<year>\d{3,4})",
    re.IGNORECASE,
)


def compared(question: Question) -> str | None:
    """What the last two facts of a comparison come to; None if they are not two, or are of another kind than these.

    `The Prairie King (June 9, 1956) is before Confessions of an Opium Eater (October 26, 1993).` if two dates decide,
    of what the question asks about; `India and Italian are not the same.` if it asks whether they are.
    """
    leaned_on = set[int]().union(*map(used, question.hops))
    ends = [i for i in range(len(question.hops)) if i not in leaned_on]
    if "comparison" not in question.type or len(ends) != 2:
        return None
    answer, facts = normalize(question.answers[0]), [question.hops[i].answer for i in ends]
    if answer in ("yes", "no") and "same" in question.text.split():
        return f"{facts[0]} and {facts[1]} are {'the same' if answer == 'yes' else 'not the same'}."
    names = [subject(question, i) for i in ends]
    parts = [(date(fact), f"{name} ({fact})") for name, fact in zip(names, facts, strict=True)]
    (first, earlier), (last, later) = sorted(parts, key=lambda one: one[0] or ())
    # Of two dates that begin alike one says only the year, or they are the same.
    if not first or not last or last[: len(first)] == first:
        return None
    if sum(normalize(name) == answer for name in names) != 1:
        return None
    return f"{earlier} is before {later}."


def used(hop: Hop) -> set[int]:
    """The hops whose answers the sub-question of a hop refers to."""
    return {int(number) - 1 for number in re.findall(r"#(\d{1,9})(?!\d)", hop.question)}


def subject(question: Question, hop: int) -> str:
    """What a chain of hops begins with: the name of its first paragraph."""
    before = used(question.hops[hop])
    return subject(question, min(before)) if before else name_of(question.hops[hop].document.title)


def date(text: str) -> tuple[int, ...] | None:
    """Year, month and day, as far as they are told; None if the text is no date."""
    if not (found := DATE.fullmatch(text.strip())):
        return None
    parts = [int(found["year"])]
    if month := found["month"] or found["month_last"]:
        parts.append(1 + MONTHS.split("|").index(month.lower()))
    if day := found["day"] or found["day_first"]:
        parts.append(int(day))
    return tuple(parts)
