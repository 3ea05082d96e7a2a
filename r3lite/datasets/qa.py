"""Question sets: HotpotQA, 2WikiMultiHopQA, MuSiQue and plain question-and-answer rows, recognised by content.

Owns the meaning of a row of each data set. Knows neither corpora nor retrieval; `hops.py` makes the sub-questions that
a data set lacks, `rows.py` makes rows of files.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.records import WHOLE, Record, number_text
from r3lite.datasets import hops
from r3lite.datasets.rows import Item, converted_rows

ANSWERS = ("answer", "answers", "golden_answers")


def read_questions(data: str | Path, limit: int | None = None, skip_bad_rows: bool = False) -> list[Question]:
    """Returns the first `limit` questions of a file (JSON array, JSON lines or parquet) or of a data set of the hub.

    A bad row raises R3LiteError with file, line (or row) and reason; with `skip_bad_rows` bad rows are left out and
    their number is printed. MuSiQue's unanswerable questions are left out too, and counted.
    """
    return read_with_rows(
        data,
        make=lambda question, _: question,
        limit=limit,
        skip_bad_rows=skip_bad_rows,
    )


def read_with_rows(
    data: str | Path, make: Callable[[Question, Record], Item], limit: int | None, skip_bad_rows: bool
) -> list[Item]:
    """Returns `make(question, row)` for each question that `read_questions` would return and the row it is from."""
    unanswerable = 0
    places: dict[str, str] = {}  # where the question with each id stands, such as `dev.json, row 3`

    def convert(row: Record, default_id: str) -> Item | None:
        nonlocal unanswerable
        if not row.flag("answerable", True):
            unanswerable += 1
            return None
        question = question_from_row(row, default_id)
        where = row.source.where
        if places.setdefault(question.id, where) != where:
            raise row.error(f"duplicate id {question.id!r}, also in {places[question.id]}")
        return make(question, row)

    questions = converted_rows(data, convert, limit=limit, skip_bad_rows=skip_bad_rows)
    if unanswerable:
        print(f"{data}: skipped {unanswerable} unanswerable questions", file=sys.stderr)
    if not questions:
        raise R3LiteError(
            f"{data} has no usable question",
            "Pass HotpotQA, 2WikiMultiHopQA, MuSiQue or your own.",
            code="no-usable-questions",
        )
    return questions


def question_from_row(row: Record, default_id: str = "") -> Question:
    """Returns the question of one row of any supported data set; raises InvalidRecord."""
    reader = _plain
    if "paragraphs" in row and "question_decomposition" in row:
        reader = _musique
    elif "context" in row and "supporting_facts" in row:
        reader = _hotpot
    id = row.identifier(row.first("_id", "id"), default_id)
    return reader(row, id)


def _text(row: Record, key: str) -> str:
    return " ".join(row.text(key).split())


def plain_answers(row: Record, *keys: str) -> tuple[str, ...]:
    """Returns the answers of a row, without repetition: those under the first of the keys that it has, and the aliases
    of MuSiQue.

    Without `keys`, the keys are ANSWERS. An answer is text or a number, which becomes text. Raises InvalidRecord if
    there is no answer.
    """
    if not keys:
        keys = ANSWERS
    key = row.first(*keys)
    value = row.values.get(key)
    if isinstance(value, dict):  # SQuAD and its relatives have {"text": [...]}
        value = row.record(key).items("text")
    if value is None:
        value = []
    elif not isinstance(value, list):
        value = [value]
    texts = []
    for answer in value:
        is_finite = type(answer) is not float or math.isfinite(answer)
        if type(answer) not in (str, int, float) or not is_finite:
            raise row.wrong(key, "text, a number or a list of them")
        text = answer
        if not isinstance(answer, str):
            text = number_text(answer)
        texts.append(" ".join(text.split()))
    if not any(texts):
        raise row.error(f"no answer ({', '.join(map(repr, keys))}){row.keys_in_words()}")
    texts += [" ".join(alias.split()) for alias in row.texts("answer_aliases", ())]
    return tuple(dict.fromkeys(text for text in texts if text))


def _plain(row: Record, id: str) -> Question:
    """Returns a question with its answers. Its `type` is the row's `task`, which decides how the reward `combined`
    scores an answer."""
    return Question(
        id,
        text=_text(row, "question"),
        answers=plain_answers(row),
        type=row.text("task", "", blank=True).strip(),
    )


def _musique(row: Record, id: str) -> Question:
    """Returns a question of MuSiQue.

    Gold are the paragraphs that the decomposition names or, if it names none, those marked `is_supporting`. They are
    told apart by text, as many share a title.
    """
    documents: dict[int, Document] = {}
    supporting = []
    for paragraph in row.records("paragraphs"):
        index = paragraph.whole("idx")
        if index in documents:
            raise row.error(f"duplicate idx {index} in paragraphs")
        title = paragraph.text("title", blank=True)
        text = paragraph.text("paragraph_text", blank=True)
        documents[index] = Document(f"{id}/{index}", title, text)
        if paragraph.flag("is_supporting", False):
            supporting.append(documents[index])
    decomposition = []
    for hop in row.records("question_decomposition"):
        index = hop.whole("paragraph_support_idx", None)
        if index is not None and index not in documents:
            raise row.error(f"paragraph_support_idx is {index}, but no paragraph has that idx")
        document = None
        if index is not None:
            document = documents[index]
        sub_question = hops.natural(hop.text("question"))
        answer = " ".join(_text_or_number(hop, "answer").split())
        decomposition.append(hops.from_paragraph(sub_question, answer, document))
    gold = [hop.document for hop in decomposition if hop.document]
    if not gold:
        gold = supporting
    gold_by_id = {document.id: document for document in gold}
    return Question(
        id,
        text=_text(row, "question"),
        answers=plain_answers(row),
        documents=tuple(documents.values()),
        gold=tuple(gold_by_id.values()),
        gold_by="text",
        hops=tuple(decomposition),
    )


def _text_or_number(row: Record, key: str) -> str:
    """Returns the text under a key, or the number there as text; raises InvalidRecord for anything else."""
    value = row.values.get(key)
    if type(value) in (int, float) and math.isfinite(row.number(key)):
        return number_text(value)
    return row.text(key)


def _hotpot(row: Record, id: str) -> Question:
    """Returns a question of HotpotQA or 2WikiMultiHopQA, from an official row or a columnar one.

    Gold are the paragraphs that the supporting facts name.
    """
    context = _context(row)
    supporting: dict[str, list[int]] = {}  # numbers of sentences, by the titles of their paragraphs
    for title, number in _entries(row, "supporting_facts", columns=("title", "sent_id")):
        if not isinstance(title, str) or type(number) is not int or not 0 <= number <= WHOLE:
            raise row.error("supporting_facts is not a list of pairs: title, sentence number")
        supporting.setdefault(title, []).append(number)
    separator = _separator(context)
    documents = []
    gold = []
    sentences_of: dict[str, list[str]] = {}  # supporting sentences, by the titles of the gold paragraphs
    for i, (title, sentences) in enumerate(context):
        document = Document(f"{id}/{i}", title, separator.join(sentences))
        documents.append(document)
        if title in supporting and title not in sentences_of:
            gold.append(document)
            sentences_of[title] = _supporting_sentences(sentences, supporting[title])
    question = Question(
        id,
        text=_text(row, "question"),
        answers=plain_answers(row),
        documents=tuple(documents),
        gold=tuple(gold),
        gold_by="title",
        type=row.text("type", "", blank=True).strip(),
    )
    decomposition = hops.from_evidences(question, _evidences(row), sentences_of)
    if not decomposition:
        decomposition = hops.from_supporting(question, sentences_of)
    return replace(question, hops=decomposition)


def _context(row: Record) -> list[list]:
    """Returns the title and the sentences of each paragraph; raises InvalidRecord if they are something else."""
    context = _entries(row, "context", columns=("title", "sentences"))
    for title, sentences in context:
        if not isinstance(title, str) or not isinstance(sentences, list):
            raise row.error("context is not a list of pairs: title, list of sentences")
        if not all(isinstance(sentence, str) for sentence in sentences):
            raise row.error("a sentence in context is not text")
    return context


def _separator(context: list[list]) -> str:
    """Returns the text between the sentences of a paragraph.

    HotpotQA's sentences begin with a space, 2WikiMultiHopQA's do not.
    """
    for _, sentences in context:
        if any(sentence[:1].isspace() for sentence in sentences[1:]):
            return ""
    return " "


def _supporting_sentences(sentences: list[str], numbers: list[int]) -> list[str]:
    """Returns the sentences of a paragraph with these numbers (from 0); its first sentence if it has none of them.

    Some supporting facts of HotpotQA name a sentence past the end of the paragraph.
    """
    supporting = [sentences[i] for i in sorted(set(numbers)) if 0 <= i < len(sentences)]
    if not supporting:
        supporting = sentences[:1]
    return [" ".join(sentence.split()) for sentence in supporting]


def _evidences(row: Record) -> list[list[str]]:
    """Returns subject, relation and object of each evidence; none if the row has no evidences."""
    if "evidences" not in row:
        return []
    evidences = []
    for evidence in _entries(row, "evidences", columns=("fact", "relation", "entity")):
        texts = []
        for part in evidence:
            if type(part) in (int, float):
                part = number_text(part)
            elif not isinstance(part, str):
                raise row.error("evidences is not a list of triples: subject, relation, object")
            texts.append(" ".join(part.split()))
        evidences.append(texts)
    return evidences


def _entries(row: Record, key: str, columns: tuple[str, ...]) -> list[list]:
    """Returns a list of entries, each a list with a value for each of the columns.

    Some copies of the data sets on the hub have an object of columns instead, and some JSON text.
    """
    value = row.parsed(key)
    if isinstance(value, dict):
        lists = [value.get(column) for column in columns]
        are_lists = all(isinstance(column, list) for column in lists)
        if not are_lists or len({len(column) for column in lists}) > 1:
            raise row.error(f"the columns of {key} are not lists of equal length: {', '.join(columns)}")
        return [list(entry) for entry in zip(*lists, strict=True)]
    width = len(columns)
    problem = f"{key} is not a list of lists of {width}: {', '.join(columns)}"
    if not isinstance(value, list):
        raise row.error(problem)
    for entry in value:
        if not isinstance(entry, list) or len(entry) != width:
            raise row.error(problem)
    return value
