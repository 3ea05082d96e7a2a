"""Questions made from documents by rule, without a model: a sentence with a gap, which a name, date or number fills.

    one document   What is (1)? Marta Lindqvist: "She was born in (1)."
    two            What is (2)? "Silent Harbour is a novel by (1)." (1): "She was born in (2)."

Two documents are linked by a title that a sentence of the other one mentions. The title of a document stands before a
sentence that does not name it. The questions are rows of HotpotQA's format, with the paragraphs and the sentences that
state the answer, so that `collect --source gold` demonstrates them. They are not beautiful. What fills a gap occurs
once among the sentences that are used of its document, and no other text fills the same gap.

Names are words with capitals: in scripts without them only dates and numbers are asked for.
"""

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from r3lite.core.answer_match import SENTENCE
from r3lite.core.episode import Document, folded
from r3lite.core.errors import R3LiteError
from r3lite.datasets.gold import MONTHS
from r3lite.datasets.hops import name_of

FEWEST_WORDS = 4  # around a gap: fewer say too little
LONGEST = 250  # characters of a sentence: a demonstration quotes it within a turn
# Before an item of a list, a row of a table, a quotation or a heading, which are sentences of their own.
ITEM = re.compile(r"\n(?=\s*(?:[-*+\u2022|#>]|\d{1,3}[.)]\s))")
BULLET = re.compile(r"^(?:[-*+\u2022|#>]|\d{1,3}[.)]\s)\s*")
DATE = re.compile(
    rf"\b(?:\d{{1,2}} )?(?:{MONTHS})(?: \d{{1,2}})?,? \d{{4}}\b|\b(?:\d{{1,2}} (?:{MONTHS})|(?:{MONTHS}) \d{{1,2}})\b"
    r"|\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}\.\d{1,2}\.\d{4}\b",
    re.IGNORECASE,
)
NUMBER = re.compile(r"(?<![\w.,/-])[$\u00a3\u20ac]?\d+(?:[.,]\d+)*%?(?![\w/-])")
WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
PARTICLES = {"of", "the", "de", "del", "della", "di", "da", "du", "van", "von", "der", "den", "la", "le"}
# Capitals at the beginning of a sentence that are not a part of the name after them.
OPENERS = {
    "the", "a", "an", "in", "on", "at", "by", "for", "from", "to", "after", "before", "since", "until", "during",
    "with", "both", "each", "every", "all", "its", "his", "her", "their", "our", "my", "this", "that", "when",
    "while", "and", "but", "der", "die", "das", "le", "la", "les", "el", "los", "il",
}  # fmt: skip
LONGEST_NAME = 6  # words
MARKS = ("(1)", "(2)")


@dataclass(frozen=True)
class Statement:
    """A sentence of a document; `number` is its index among the sentences of its passage."""

    passage: Document
    number: int
    text: str
    name: str  # of its document: the title as a sentence would mention it


@dataclass(frozen=True)
class ClozeGap:
    """A part of a statement that is to be found: characters `start` to `end`."""

    statement: Statement
    start: int
    end: int

    @property
    def answer(self) -> str:
        """What fills the gap."""
        return self.statement.text[self.start : self.end]

    @property
    def context(self) -> tuple[str, str, str]:
        """What is said of the gap: the title, if the sentence does not name it, and the text before and after it."""
        before = folded(self.statement.text[: self.start])
        after = folded(self.statement.text[self.end :])
        title = ""
        if not mentions(before + " " + after, folded(self.statement.name)):
            title = folded(self.statement.name)
        return title, before, after

    def masked(self, mark: str) -> str:
        """Returns the sentence with a mark in the gap."""
        text = self.statement.text
        return f"{text[: self.start]}{mark}{text[self.end :]}"


@dataclass(frozen=True)
class ClozeQuestion:
    """A question and its answer, with the statements that show it in the order in which they are looked up."""

    text: str
    answer: str
    statements: tuple[Statement, ...]
    sentences_of: dict[str, list[str]] = field(repr=False, hash=False)  # of the passages, by their ids

    def to_json(self) -> dict:
        """Returns the row of a question file, in HotpotQA's format."""
        kind = "cloze"
        if len(self.statements) > 1:
            kind = "bridge"
        context = []
        facts = []
        for statement in self.statements:
            title = statement.passage.title
            context.append([title, self.sentences_of[statement.passage.id]])
            facts.append([title, statement.number])
        return {
            "_id": f"cloze-{hashlib.sha256(self.text.encode()).hexdigest()[:16]}",
            "question": self.text,
            "answer": self.answer,
            "type": kind,
            "supporting_facts": facts,
            "context": context,
        }


def sentences(text: str) -> list[str]:
    """Returns the sentences of a text, each on one line; an item of a list is one, without its bullet."""
    result = []
    for part in chain.from_iterable(map(SENTENCE.split, ITEM.split(text))):
        sentence = BULLET.sub("", " ".join(part.split()))
        if sentence:
            result.append(sentence)
    return result


def names(sentence: str) -> Iterator[tuple[int, int]]:
    """Yields the places of names: words with capitals in a row, such as `Marta Lindqvist` or `Bank of England`.

    What begins a sentence has a capital in any case. It is no name, unless its first word is one of OPENERS, which is
    then left out.
    """
    run: list[re.Match] = []
    for word in chain(WORD.finditer(sentence), [None]):
        is_next = bool(run) and word is not None and sentence[run[-1].end() : word.start()] in (" ", "-")
        if word is not None and word[0][0].isupper() and (is_next or not run):
            run.append(word)
            continue
        if is_next and word[0] in PARTICLES:
            run.append(word)
            continue
        yield from _name_of_run(run)
        run = []
        if word is not None and word[0][0].isupper():
            run = [word]


def _name_of_run(run: list[re.Match]) -> Iterator[tuple[int, int]]:
    """Yields the place of the name in a run of words, if there is one."""
    words = list(run)
    if words and words[0].start() == 0:
        if words[0][0].casefold() not in OPENERS:
            return
        words = words[1:]
    while words and words[-1][0] in PARTICLES:
        words.pop()
    while words and words[0][0] in PARTICLES:
        words.pop(0)
    if not 0 < len(words) <= LONGEST_NAME:
        return
    first_word = words[0][0]
    is_month = DATE.search(f"1 {first_word}") is not None
    is_letter = len(words) == 1 and len(first_word) == 1
    if not is_month and not is_letter:
        yield words[0].start(), words[-1].end()


def spans(sentence: str) -> list[tuple[int, int]]:
    """Returns the places of dates, numbers and names in a sentence, none of which overlap."""
    places: list[tuple[int, int]] = []
    numbers = [match.span() for pattern in (DATE, NUMBER) for match in pattern.finditer(sentence)]
    for start, end in chain(numbers, names(sentence)):
        if all(end <= other_start or start >= other_end for other_start, other_end in places):
            places.append((start, end))
    return places


def mentions(text: str, name: str) -> bool:
    """Returns whether a text has a name in it, in the same letters, and not as a part of a longer word."""
    return bool(_places(text, name))


def _places(text: str, name: str) -> list[int]:
    """Returns where a name begins in a text. (A pattern for each of a million names would take minutes to compile.)"""
    places = []
    start = text.find(name)
    while start >= 0:
        end = start + len(name)
        if not (_is_letter(text[start - 1 : start]) or _is_letter(text[end : end + 1])):
            places.append(start)
        start = text.find(name, start + 1)
    return places


def _is_letter(character: str) -> bool:
    """Returns whether a character is a part of a word; the empty one is none."""
    return character.isalnum() or character == "_"


class ClozeMaker:
    """Makes questions from the passages of documents, which are in memory with all their sentences."""

    def __init__(self, passages: Iterable[Document]):
        self.sentences_of: dict[str, list[str]] = {}
        self.statements: dict[str, dict[str, Statement]] = defaultdict(dict)  # by folded title and text
        for passage in passages:
            texts = sentences(passage.text)
            self.sentences_of[passage.id] = texts
            name = name_of(passage.title)
            of_title = self.statements[folded(passage.title)]
            for number, text in enumerate(texts):
                if len(text) <= LONGEST and not any(mark in text for mark in MARKS):
                    of_title.setdefault(text, Statement(passage, number, text, name))
        self.gaps = self._facts()
        self.links = self._links()

    def questions(self, seed: int) -> list[ClozeQuestion]:
        """Returns questions of two documents and of one in turn, in an order drawn by a seed.

        There is at most one question of one document for each sentence, and one of two for each link.
        """
        draw = random.Random(f"{seed}/cloze")
        simple = [self._simple(draw.choice(gaps)) for gaps in self.gaps.values()]
        linked = [self._linked(link, title, draw) for link, title in self.links]
        simple = [question for question in simple if question]
        linked = [question for question in linked if question]
        draw.shuffle(simple)
        draw.shuffle(linked)
        by_text: dict[str, ClozeQuestion] = {}
        for question in chain.from_iterable(zip_longest(linked, simple)):
            if question:
                by_text.setdefault(question.text, question)
        return list(by_text.values())

    def _facts(self) -> dict[Statement, list[ClozeGap]]:
        """Returns the gaps of each statement.

        A gap is one that only one text fills. That text occurs once in the statements of its document.
        """
        all_gaps = []
        fit_gaps = []
        for of_title in self.statements.values():
            text = "\n".join(of_title).casefold()
            for statement in of_title.values():
                for start, end in spans(statement.text):
                    gap = ClozeGap(statement, start, end)
                    all_gaps.append(gap)
                    words = WORD.findall(gap.masked(" "))
                    is_told = folded(gap.answer) in folded(statement.passage.title)
                    if len(words) >= FEWEST_WORDS and not is_told and text.count(gap.answer.casefold()) == 1:
                        fit_gaps.append(gap)
        unique = set(unambiguous(all_gaps))
        gaps: dict[Statement, list[ClozeGap]] = defaultdict(list)
        for gap in fit_gaps:
            if gap in unique:
                gaps[gap.statement].append(gap)
        return gaps

    def _links(self) -> list[tuple[ClozeGap, str]]:
        """Returns the gaps that the title of another document fills, with that title, folded."""
        titles: dict[str, set[str]] = defaultdict(set)  # by the name that a sentence would mention
        for title, of_title in self.statements.items():
            for statement in list(of_title.values())[:1]:
                titles[statement.name].add(title)
        by_first_word: dict[str, list[str]] = defaultdict(list)
        for name, title_set in titles.items():
            words = WORD.findall(name)
            # A title such as `notes` is a word of any text.
            if len(title_set) == 1 and words and len(name) > 2 and name != name.casefold():
                by_first_word[words[0]].append(name)
        links = []
        for title, of_title in self.statements.items():
            for statement in of_title.values():
                for name in self._names_in(statement, by_first_word):
                    (linked_title,) = titles[name]
                    places = _places(statement.text, name)
                    if linked_title == title or len(places) != 1 or mentions(statement.name, name):
                        continue
                    gap = ClozeGap(statement, places[0], places[0] + len(name))
                    if len(WORD.findall(gap.masked(" "))) >= FEWEST_WORDS:
                        links.append((gap, linked_title))
        unique = set(unambiguous([gap for gap, _ in links]))
        return [(gap, title) for gap, title in links if gap in unique]

    def _names_in(self, statement: Statement, by_first_word: dict[str, list[str]]) -> list[str]:
        """Returns the names that a statement mentions, in its order, without those that are a part of a longer one."""
        mentioned = []
        for word in dict.fromkeys(WORD.findall(statement.text)):
            mentioned += [name for name in by_first_word.get(word, ()) if mentions(statement.text, name)]
        return [name for name in mentioned if not any(name != longer and name in longer for longer in mentioned)]

    def _simple(self, gap: ClozeGap) -> ClozeQuestion | None:
        """Returns the question of a gap; None if it tells its answer."""
        quoted = _quoted(gap.masked(MARKS[0]), gap.statement.name)
        return self._question(f"What is {MARKS[0]}? {quoted}", gap.answer, (gap.statement,))

    def _linked(self, link: ClozeGap, title: str, draw: random.Random) -> ClozeQuestion | None:
        """Returns a question of a gap in the document that fills the `link`; None if none is fit."""
        questions = []
        lead = _quoted(link.masked(MARKS[0]), link.statement.name)
        for statement in self.statements[title].values():
            for gap in self.gaps.get(statement, ()):
                text = _without_name(gap, link.answer)
                if text is None or mentions(statement.text, link.statement.name):
                    continue
                if folded(gap.answer) in folded(link.statement.text):
                    continue
                quoted = _quoted(text, MARKS[0])
                question = self._question(
                    f"What is {MARKS[1]}? {lead} {quoted}", gap.answer, (link.statement, statement)
                )
                if question:
                    questions.append(question)
        if not questions:
            return None
        return draw.choice(questions)

    def _question(self, text: str, answer: str, statements: tuple[Statement, ...]) -> ClozeQuestion | None:
        if folded(answer) in folded(text):
            return None
        return ClozeQuestion(text, answer, statements, self.sentences_of)


def unambiguous(gaps: Sequence[ClozeGap]) -> list[ClozeGap]:
    """Returns the gaps whose context stands among the gaps with one answer only."""
    answers: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for gap in gaps:
        answers[gap.context].add(folded(gap.answer))
    return [gap for gap in gaps if len(answers[gap.context]) == 1]


def _quoted(sentence: str, name: str) -> str:
    """Returns a sentence in quotation marks, after the name of what it is about unless it has that itself."""
    if not name or mentions(sentence, name):
        return f'"{sentence}"'
    return f'{name}: "{sentence}"'


def _without_name(gap: ClozeGap, name: str) -> str | None:
    """Returns the sentence of a gap with (2) in it and (1) for a name; None if a part of the name stays, which would
    tell it."""
    text = gap.masked(MARKS[1])
    for start in reversed(_places(text, name)):
        text = text[:start] + MARKS[0] + text[start + len(name) :]
    words_of_name = {word for word in WORD.findall(name) if len(word) > 2 and word not in PARTICLES}
    if words_of_name & set(WORD.findall(text)):
        return None
    return text


def make_questions(passages: Iterable[Document], seed: int, limit: int | None) -> list[ClozeQuestion]:
    """Returns at most `limit` questions of passages; raises R3LiteError if none can be made."""
    maker = ClozeMaker(passages)
    questions = maker.questions(seed)
    if not questions:
        cause = f"no question can be made from {len(maker.sentences_of)} passages"
        remedy = "A question needs a sentence with a name, a date or a number that its document mentions once."
        raise R3LiteError(cause, remedy, code="no-cloze-questions")
    return questions[:limit]


def split(
    questions: Sequence[ClozeQuestion], share: float, seed: int
) -> tuple[list[ClozeQuestion], list[ClozeQuestion]]:
    """Returns the questions to train on, and the questions to test on.

    The latter are those whose answers are in a `share` of the documents, in which no question to train on has its
    answer. If the share is between 0 and 1, both lists have questions; of a single document, all are to train on.
    """
    titles = list(dict.fromkeys(folded(question.statements[-1].passage.title) for question in questions))
    random.Random(f"{seed}/test").shuffle(titles)
    count = round(share * len(titles))
    if 0 < share < 1:
        count = min(max(count, 1), len(titles) - 1)
    held_out = set(titles[:count])
    training = []
    testing = []
    for question in questions:
        if folded(question.statements[-1].passage.title) in held_out:
            testing.append(question)
        else:
            training.append(question)
    return training, testing
