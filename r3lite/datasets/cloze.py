"""Questions made from documents by rule, without a model: a sentence with a gap, which a name, date or number fills.

    one document    What is (1)? Marta Lindqvist: "She was born in (1)."
    two documents   What is (2)? "Silent Harbour is a novel by (1)." (1): "She was born in (2)."

Two documents are linked if a sentence of one mentions the title of the other. Before a sentence that does not name
its document, the question puts the document's title, or (1) in its place. The questions are rows of HotpotQA's format,
with the paragraphs and the sentences that state the answer, so that `collect --source gold` can demonstrate them. They
are not beautiful. An answer occurs once in the sentences of its document that are used, and no two gaps with the same
words around them have different answers.

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
LONGEST_SENTENCE = 250  # characters; longer ones are not used: a demonstration must quote a sentence within one turn
# The line break before an item of a list, a row of a table, a quotation or a heading: each is a sentence of its own.
ITEM_BREAK = re.compile(r"\n(?=\s*(?:[-*+\u2022|#>]|\d{1,3}[.)]\s))")
BULLET = re.compile(r"^(?:[-*+\u2022|#>]|\d{1,3}[.)]\s)\s*")
DATE = re.compile(
    rf"\b(?:\d{{1,2}} )?(?:{MONTHS})(?: \d{{1,2}})?,? \d{{4}}\b|\b(?:\d{{1,2}} (?:{MONTHS})|(?:{MONTHS}) \d{{1,2}})\b"
    r"|\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}\.\d{1,2}\.\d{4}\b",
    re.IGNORECASE,
)
NUMBER = re.compile(r"(?<![\w.,/-])[$\u00a3\u20ac]?\d+(?:[.,]\d+)*%?(?![\w/-])")
WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
PARTICLES = {"of", "the", "de", "del", "della", "di", "da", "du", "van", "von", "der", "den", "la", "le"}
# First words of a sentence that are not a part of the name after them.
NAMELESS_OPENERS = {
    "the", "a", "an", "in", "on", "at", "by", "for", "from", "to", "after", "before", "since", "until", "during",
    "with", "both", "each", "every", "all", "its", "his", "her", "their", "our", "my", "this", "that", "when",
    "while", "and", "but", "der", "die", "das", "le", "la", "les", "el", "los", "il",
}  # fmt: skip
LONGEST_NAME = 6  # words
# What stands in gaps. A question of one document asks for (1). A question of two documents asks for (2), and (1) stands
# for the name of the second document.
MARKS = ("(1)", "(2)")


@dataclass(frozen=True)
class Statement:
    """A sentence of a document; `number` is its index among the sentences of its passage."""

    passage: Document
    number: int
    text: str
    name: str  # of the document: its title as a sentence would mention it


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
    def surroundings(self) -> tuple[str, str, str]:
        """Three folded texts by which gaps are compared: the name of the document, the text before the gap and the text
        after it. The name is "" if the sentence mentions it."""
        before = folded(self.statement.text[: self.start])
        after = folded(self.statement.text[self.end :])
        name = folded(self.statement.name)
        if mentions(before + " " + after, name):
            name = ""
        return name, before, after

    def masked(self, mark: str) -> str:
        """Returns the sentence with a mark in the gap."""
        text = self.statement.text
        return f"{text[: self.start]}{mark}{text[self.end :]}"


@dataclass(frozen=True)
class ClozeQuestion:
    """A question and its answer, and the statements that show the answer, in the order in which they are looked up."""

    text: str
    answer: str
    statements: tuple[Statement, ...]
    sentences_of: dict[str, list[str]] = field(repr=False, hash=False)  # by the id of the passage

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
    """Returns the sentences of a text, each on one line. An item of a list is a sentence, without its bullet."""
    result = []
    for part in chain.from_iterable(map(SENTENCE.split, ITEM_BREAK.split(text))):
        sentence = BULLET.sub("", " ".join(part.split()))
        if sentence:
            result.append(sentence)
    return result


def names(sentence: str) -> Iterator[tuple[int, int]]:
    """Yields the start and the end of each name: consecutive words with capitals, such as `Marta Lindqvist` or `Bank of
    England`.

    Any word has a capital at the beginning of a sentence. The run that begins a sentence is not taken for a name,
    unless its first word is in NAMELESS_OPENERS; this word is then left out of the name.
    """
    runs: list[list[re.Match]] = [[]]
    for word in WORD.finditer(sentence):
        run = runs[-1]
        text = word[0]
        has_capital = text[0].isupper()
        follows = bool(run) and sentence[run[-1].end() : word.start()] in (" ", "-")
        if follows and (has_capital or text in PARTICLES):
            run.append(word)
        elif has_capital:
            runs.append([word])
        else:
            runs.append([])
    for run in runs:
        yield from _name_of_run(run)


def _name_of_run(run: list[re.Match]) -> Iterator[tuple[int, int]]:
    """Yields the start and the end of the name in a run of words, if there is one."""
    words = list(run)
    if words and words[0].start() == 0:  # the run begins the sentence
        if words[0][0].casefold() not in NAMELESS_OPENERS:
            return
        words = words[1:]
    while words and words[-1][0] in PARTICLES:
        words.pop()
    while words and words[0][0] in PARTICLES:
        words.pop(0)
    if not 0 < len(words) <= LONGEST_NAME:
        return
    first_word = words[0][0]
    is_month = DATE.search(f"1 {first_word}") is not None  # `1 May` is a date
    is_letter = len(words) == 1 and len(first_word) == 1
    if not is_month and not is_letter:
        yield words[0].start(), words[-1].end()


def spans(sentence: str) -> list[tuple[int, int]]:
    """Returns the start and the end of each date, number and name in a sentence.

    Of two that overlap, a date is preferred to a number, and a number to a name.
    """
    dates = [match.span() for match in DATE.finditer(sentence)]
    numbers = [match.span() for match in NUMBER.finditer(sentence)]
    result: list[tuple[int, int]] = []
    for start, end in chain(dates, numbers, names(sentence)):
        if all(end <= other_start or start >= other_end for other_start, other_end in result):
            result.append((start, end))
    return result


def mentions(text: str, name: str) -> bool:
    """Returns whether a text has a name in it, with the same capitals, and not as a part of a longer word."""
    return bool(_places(text, name))


def _places(text: str, name: str) -> list[int]:
    """Returns the indices at which a text mentions a name.

    No regular expression is used: to compile one for each of a million names would take minutes.
    """
    places = []
    start = text.find(name)
    while start >= 0:
        end = start + len(name)
        if not (_is_letter(text[start - 1 : start]) or _is_letter(text[end : end + 1])):
            places.append(start)
        start = text.find(name, start + 1)
    return places


def _is_letter(character: str) -> bool:
    """Returns whether a character is a part of a word; "", which stands for the end of the text, is not."""
    return character.isalnum() or character == "_"


class ClozeMaker:
    """Makes questions from passages of documents. All sentences are in memory."""

    def __init__(self, passages: Iterable[Document]):
        self.sentences_of: dict[str, list[str]] = {}
        self.statements: dict[str, dict[str, Statement]] = defaultdict(dict)  # by the folded title, then by the text
        for passage in passages:
            texts = sentences(passage.text)
            self.sentences_of[passage.id] = texts
            name = name_of(passage.title)
            of_title = self.statements[folded(passage.title)]
            for number, text in enumerate(texts):
                if len(text) <= LONGEST_SENTENCE and not any(mark in text for mark in MARKS):
                    of_title.setdefault(text, Statement(passage, number, text, name))
        self.all_gaps = self._all_gaps()
        self.gaps = self._gaps_of_statements()
        self.links = self._links()

    def questions(self, seed: int) -> list[ClozeQuestion]:
        """Returns questions of two documents and of one document alternately, in an order drawn by a seed.

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

    def _all_gaps(self) -> list[ClozeGap]:
        """Returns the gaps that names, dates and numbers fill, of all statements in their order."""
        gaps = []
        for of_title in self.statements.values():
            for statement in of_title.values():
                gaps += [ClozeGap(statement, start, end) for start, end in spans(statement.text)]
        return gaps

    def _gaps_of_statements(self) -> dict[Statement, list[ClozeGap]]:
        """Returns the gaps of each statement of which questions are made.

        The answer of such a gap occurs once in the statements of its document and not in the title. No gap with the
        same surroundings has another answer.
        """
        unique = set(unambiguous(self.all_gaps))
        texts = {title: "\n".join(of_title).casefold() for title, of_title in self.statements.items()}
        gaps: dict[Statement, list[ClozeGap]] = defaultdict(list)
        for gap in self.all_gaps:
            title = folded(gap.statement.passage.title)
            words = WORD.findall(gap.masked(" "))
            occurs_once = texts[title].count(gap.answer.casefold()) == 1
            if len(words) >= FEWEST_WORDS and occurs_once and folded(gap.answer) not in title and gap in unique:
                gaps[gap.statement].append(gap)
        return gaps

    def _links(self) -> list[tuple[ClozeGap, str]]:
        """Returns links: gaps that the name of another document fills, each with the folded title of that document."""
        titles: dict[str, set[str]] = defaultdict(set)  # the folded titles, by the name of their documents
        for title, of_title in self.statements.items():
            first_statement = next(iter(of_title.values()), None)
            if first_statement:
                titles[first_statement.name].add(title)
        names_by_first_word: dict[str, list[str]] = defaultdict(list)
        for name, titles_of_name in titles.items():
            words = WORD.findall(name)
            # A name without capitals, such as `notes`, may stand in any text as an ordinary word.
            has_capital = name != name.casefold()
            if len(titles_of_name) == 1 and words and len(name) > 2 and has_capital:
                names_by_first_word[words[0]].append(name)
        links = []
        for title, of_title in self.statements.items():
            for statement in of_title.values():
                for name in _names_in(statement, names_by_first_word):
                    (linked_title,) = titles[name]
                    starts = _places(statement.text, name)
                    if linked_title == title or len(starts) != 1 or mentions(statement.name, name):
                        continue
                    gap = ClozeGap(statement, start=starts[0], end=starts[0] + len(name))
                    if len(WORD.findall(gap.masked(" "))) >= FEWEST_WORDS:
                        links.append((gap, linked_title))
        unique = set(unambiguous([*self.all_gaps, *(gap for gap, _ in links)]))
        return [(gap, title) for gap, title in links if gap in unique]

    def _simple(self, gap: ClozeGap) -> ClozeQuestion | None:
        """Returns the question of one document that asks for a gap; None if the question tells its answer."""
        quoted = _quoted(gap.masked(MARKS[0]), gap.statement.name)
        return self._question(f"What is {MARKS[0]}? {quoted}", gap.answer, (gap.statement,))

    def _linked(self, link: ClozeGap, title: str, draw: random.Random) -> ClozeQuestion | None:
        """Returns a drawn question of two documents; None if there is none.

        The name of the second document, whose folded title is `title`, fills the gap `link`; the question asks for a
        gap in the second document. The second sentence must not mention the first document, and the first sentence must
        not contain the answer.
        """
        questions = []
        first_quoted = _quoted(link.masked(MARKS[0]), link.statement.name)
        for statement in self.statements[title].values():
            for gap in self.gaps.get(statement, ()):
                text = _without_name(gap, link.answer)
                if text is None or mentions(statement.text, link.statement.name):
                    continue
                if folded(gap.answer) in folded(link.statement.text):
                    continue
                second_quoted = _quoted(text, MARKS[0])
                question_text = f"What is {MARKS[1]}? {first_quoted} {second_quoted}"
                question = self._question(question_text, gap.answer, (link.statement, statement))
                if question:
                    questions.append(question)
        if not questions:
            return None
        return draw.choice(questions)

    def _question(self, text: str, answer: str, statements: tuple[Statement, ...]) -> ClozeQuestion | None:
        """Returns a question; None if its text has the answer."""
        if folded(answer) in folded(text):
            return None
        return ClozeQuestion(text, answer, statements, self.sentences_of)


def _names_in(statement: Statement, names_by_first_word: dict[str, list[str]]) -> list[str]:
    """Returns the names that a statement mentions, in the order of their first words.

    A name that is a part of another mentioned name is left out.
    """
    mentioned = []
    for word in dict.fromkeys(WORD.findall(statement.text)):
        candidates = names_by_first_word.get(word, ())
        mentioned += [name for name in candidates if mentions(statement.text, name)]
    names = []
    for name in mentioned:
        is_part = any(name != longer and name in longer for longer in mentioned)
        if not is_part:
            names.append(name)
    return names


def unambiguous(gaps: Sequence[ClozeGap]) -> list[ClozeGap]:
    """Returns the gaps without those whose surroundings are also the surroundings of a gap with another answer."""
    answers: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for gap in gaps:
        answers[gap.surroundings].add(folded(gap.answer))
    return [gap for gap in gaps if len(answers[gap.surroundings]) == 1]


def _quoted(sentence: str, name: str) -> str:
    """Returns a sentence in quotation marks, after the name of its document if the sentence does not mention it."""
    if not name or mentions(sentence, name):
        return f'"{sentence}"'
    return f'{name}: "{sentence}"'


def _without_name(gap: ClozeGap, name: str) -> str | None:
    """Returns the sentence of a gap with (2) in the gap and (1) in place of a name.

    Returns None if the sentence then still has a word of the name, which would tell the name.
    """
    text = gap.masked(MARKS[1])
    for start in reversed(_places(text, name)):  # from the end on, so that earlier indices stay valid
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

    A `share` of the documents is drawn. The questions whose answers are in the drawn documents are to test on, all
    others to train on. If the share is between 0 and 1 and there are several documents, both lists have questions; if
    there is a single document, all its questions are to train on.
    """
    titles = list(dict.fromkeys(folded(question.statements[-1].passage.title) for question in questions))
    random.Random(f"{seed}/test").shuffle(titles)
    drawn_count = round(share * len(titles))
    if 0 < share < 1:
        drawn_count = min(max(drawn_count, 1), len(titles) - 1)
    held_out = set(titles[:drawn_count])
    training = []
    testing = []
    for question in questions:
        if folded(question.statements[-1].passage.title) in held_out:
            testing.append(question)
        else:
            training.append(question)
    return training, testing
