"""Question sets: HotpotQA, 2WikiMultiHopQA, MuSiQue and plain question-and-answer rows, recognised by content.

Owns what a row of each data set means. Knows neither corpora nor retrieval; `hops.py` makes the sub-questions that a
data set lacks, `rows.py` makes rows of files.
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
    """The first `limit` questions of a file (JSON array, JSON lines or parquet) or of a data set of the hub.

    A bad row raises R3LiteError with file, line (or row) and reason; with `skip_bad_rows` bad rows are left out and
    their number is printed. MuSiQue's unanswerable questions are left out too, and counted.
    """
    return read_with_rows(data, lambda question, _: question, limit, skip_bad_rows)


def read_with_rows(
    data: str | Path, make: Callable[[Question, Record], Item], limit: int | None, skip_bad_rows: bool
) -> list[Item]:
    """What `make` makes of each question and its row, of those that `read_questions` reads."""
    unanswerable = 0
    ids: dict[str, str] = {}

    def convert(row: Record, default_id: str) -> Item | None:
        nonlocal unanswerable
        if not row.flag("answerable", True):
            unanswerable += 1
            return None
        question = question_from_row(row, default_id)
        where = row.source.where
        if ids.setdefault(question.id, where) != where:
            raise row.error(f"duplicate id {question.id!r}, also in {ids[question.id]}")
        return make(question, row)

    questions = converted_rows(data, convert, limit, skip_bad_rows)
    if unanswerable:
        print(f"{data}: skipped {unanswerable} unanswerable questions", file=sys.stderr)
    if not questions:
        raise R3LiteError(f"{data} has no usable question", "Pass HotpotQA, 2WikiMultiHopQA, MuSiQue or your own.")
    return questions


def question_from_row(row: Record, default_id: str = "") -> Question:
    """The question of one row of any supported data set; raises InvalidRecord."""
    reader = _plain
    if "paragraphs" in row and "question_decomposition" in row:
        reader = _musique
    elif "context" in row and "supporting_facts" in row:
        reader = _hotpot
    return reader(row, row.identifier(row.first("_id", "id"), default_id))


def _text(row: Record, key: str) -> str:
    return " ".join(row.text(key).split())


def plain_answers(row: Record, *keys: str) -> tuple[str, ...]:
    """The first of the keys (ANSWERS) that is there: text, a number or a list of them; and MuSiQue's aliases."""
    key = row.first(*(keys := keys or ANSWERS))
    found = row.values.get(key)
    if isinstance(found, dict):  # SQuAD and its relatives have {"text": [...]}
        found = row.record(key).items("text")
    texts = []
    for answer in found if isinstance(found, list) else [] if found is None else [found]:
        if type(answer) not in (str, int, float) or (type(answer) is float and not math.isfinite(answer)):
            raise row.wrong(key, "text, a number or a list of them")
        text = answer if isinstance(answer, str) else number_text(answer)
        texts.append(" ".join(text.split()))
    if not any(texts):
        raise row.error(f"no answer ({', '.join(map(repr, keys))})")
    texts += [" ".join(alias.split()) for alias in row.texts("answer_aliases", ())]
    return tuple(dict.fromkeys(t for t in texts if t))


def _plain(row: Record, id: str) -> Question:
    """A question and its answers, and perhaps a `task`, by which the reward `combined` chooses."""
    return Question(id, _text(row, "question"), plain_answers(row), type=row.text("task", "", blank=True).strip())


def _musique(row: Record, id: str) -> Question:
    """MuSiQue: the supporting paragraphs are named by the decomposition; one title has many paragraphs."""
    documents: dict[int, Document] = {}
    gold = []
    for paragraph in row.records("paragraphs"):
        index = paragraph.whole("idx")
        if index in documents:
            raise row.error(f"duplicate idx {index} in paragraphs")
        title, text = paragraph.text("title", blank=True), paragraph.text("paragraph_text", blank=True)
        documents[index] = Document(f"{id}/{index}", title, text)
        gold += [documents[index]] * paragraph.flag("is_supporting", False)
    found = []
    for hop in row.records("question_decomposition"):
        support = hop.whole("paragraph_support_idx", None)
        if support is not None and support not in documents:
            raise row.error(f"paragraph_support_idx is {support}, but no paragraph has that idx")
        document = documents[support] if support is not None else None
        asked, answer = hops.natural(hop.text("question")), " ".join(_spoken(hop, "answer").split())
        found.append(hops.from_paragraph(asked, answer, document))
    gold = {d.id: d for d in [h.document for h in found if h.document] or gold}
    asked, answers, paragraphs = _text(row, "question"), plain_answers(row), tuple(documents.values())
    return Question(id, asked, answers, paragraphs, tuple(gold.values()), gold_by="text", hops=tuple(found))


def _spoken(row: Record, key: str) -> str:
    """Text, or a number as text."""
    value = row.values.get(key)
    if type(value) in (int, float) and math.isfinite(row.number(key)):
        return number_text(value)
    return row.text(key)


def _hotpot(row: Record, id: str) -> Question:
    """HotpotQA and 2WikiMultiHopQA, official or columnar: gold are the paragraphs that supporting facts name."""
    context = _pairs(row, "context", "title", "sentences")
    for title, sentences in context:
        if not isinstance(title, str) or not isinstance(sentences, list):
            raise row.error("context is not a list of pairs: title, list of sentences")
        if not all(isinstance(sentence, str) for sentence in sentences):
            raise row.error("a sentence in context is not text")
    # HotpotQA's sentences begin with a space, 2WikiMultiHopQA's do not.
    spaced = any(s[:1].isspace() for _, sentences in context for s in sentences[1:])
    supporting: dict[str, list[int]] = {}
    for title, sentence in _pairs(row, "supporting_facts", "title", "sent_id"):
        if not isinstance(title, str) or type(sentence) is not int or not 0 <= sentence <= WHOLE:
            raise row.error("supporting_facts is not a list of pairs: title, sentence number")
        supporting.setdefault(title, []).append(sentence)
    texts = [("" if spaced else " ").join(sentences) for _, sentences in context]
    documents = [Document(f"{id}/{i}", title, text) for i, ((title, _), text) in enumerate(zip(context, texts))]
    gold, sentences_of = [], {}
    for document, (title, sentences) in zip(documents, context):
        if title in supporting and title not in sentences_of:
            gold.append(document)
            # Some supporting facts of HotpotQA name a sentence past the end of the paragraph.
            named = [sentences[i] for i in sorted(set(supporting[title])) if 0 <= i < len(sentences)]
            sentences_of[title] = [" ".join(s.split()) for s in named or sentences[:1]]
    asked, answers, kind = _text(row, "question"), plain_answers(row), row.text("type", "", blank=True).strip()
    question = Question(id, asked, answers, tuple(documents), tuple(gold), gold_by="title", type=kind)
    evidences = _pairs(row, "evidences", "fact", "relation", "entity") if "evidences" in row else []
    if not all(isinstance(part, str) or type(part) in (int, float) for evidence in evidences for part in evidence):
        raise row.error("evidences is not a list of triples: subject, relation, object")
    texts = [[part if isinstance(part, str) else number_text(part) for part in evidence] for evidence in evidences]
    evidences = [[" ".join(text.split()) for text in parts] for parts in texts]
    found = hops.from_evidences(question, evidences, sentences_of) or hops.from_supporting(question, sentences_of)
    return replace(question, hops=found)


def _pairs(row: Record, key: str, *columns: str) -> list[list]:
    """A list of short lists, which some hub copies keep as columns, and some as JSON text."""
    value = row.parsed(key)
    if isinstance(value, dict):
        lists = [value.get(column) for column in columns]
        if not all(isinstance(column, list) and len(column) == len(lists[0] or []) for column in lists):
            raise row.error(f"the columns of {key} are not lists of equal length: {', '.join(columns)}")
        return [list(entry) for entry in zip(*lists, strict=True)]
    if not isinstance(value, list) or not all(isinstance(v, list) and len(v) == len(columns) for v in value):
        raise row.error(f"{key} is not a list of lists of {len(columns)}: {', '.join(columns)}")
    return value
