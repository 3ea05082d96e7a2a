"""Question sets: HotpotQA, 2WikiMultiHopQA, MuSiQue and plain question-and-answer rows, told apart by content.

Owns what a row of each data set means. Knows neither corpora nor retrieval; `hops.py` makes the sub-questions that a
data set lacks, `rows.py` makes rows of files.
"""

import json
import sys
from pathlib import Path

from r3lite.datasets import hops
from r3lite.datasets.rows import BadRow, converted_rows
from r3lite.episode import Document, Hop, Question
from r3lite.errors import R3LiteError
from r3lite.files import half_pair


def read_questions(data: str | Path, limit: int | None = None, skip_bad_rows: bool = False) -> list[Question]:
    """The first `limit` questions of a file (JSON array, JSON lines or parquet) or of a hub string `name,subset,split`.

    A bad row raises R3LiteError with file, line (or row) and reason; with `skip_bad_rows` bad rows are left out and
    their number is printed. MuSiQue's unanswerable questions are left out too, and counted.
    """
    unanswerable = 0

    def convert(row: dict, default_id: str) -> Question | None:
        nonlocal unanswerable
        if row.get("answerable") is False:
            unanswerable += 1
            return None
        return question_from_json(row, default_id)

    questions = converted_rows(data, convert, limit, skip_bad_rows)
    if unanswerable:
        print(f"{data}: {unanswerable} unanswerable questions left out", file=sys.stderr)
    if not questions:
        remedy = "Name a HotpotQA, 2WikiMultiHopQA, MuSiQue or question-and-answer file."
        raise R3LiteError(f"{data} holds no usable question", remedy)
    return questions


def question_from_json(row: dict, default_id: str = "") -> Question:
    """The question of one row of any supported data set; raises BadRow."""
    reader = _plain
    if "paragraphs" in row and "question_decomposition" in row:
        reader = _musique
    elif "context" in row and "supporting_facts" in row:
        reader = _hotpot
    try:
        return reader(row, str(row.get("_id") or row.get("id") or default_id))
    except BadRow:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        name = {_plain: "question-and-answer", _musique: "MuSiQue", _hotpot: "HotpotQA"}[reader]
        raise BadRow(f"not a row in {name} format: {type(error).__name__}: {error}") from error


def _text(row: dict, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{key!r} is missing or blank")
    return " ".join(value.split())


def _answers(row: dict) -> tuple[str, ...]:
    """`answer` (with MuSiQue's `answer_aliases`), `answers` or `golden_answers`: text, a number or a list of them."""
    found = next((row[k] for k in ("answer", "answers", "golden_answers") if row.get(k) is not None), [])
    # SQuAD and its relatives have {"text": [...]}.
    found = found.get("text", []) if isinstance(found, dict) else found
    found = [*(found if isinstance(found, (list, tuple)) else [found]), *(row.get("answer_aliases") or [])]
    texts = [" ".join(str(a).split()) for a in found if isinstance(a, (str, int, float))]
    texts = list(dict.fromkeys(t for t in texts if t))
    if not texts:
        raise BadRow("it has no answer ('answer', 'answers' or 'golden_answers')")
    return tuple(texts)


def _plain(row: dict, id: str) -> Question:
    return Question(id=id, text=_text(row, "question"), answers=_answers(row))


def _musique(row: dict, id: str) -> Question:
    """MuSiQue: the supporting paragraphs are named by the decomposition; one title has many paragraphs."""
    documents = {p["idx"]: Document(f"{id}/{p['idx']}", p["title"], p["paragraph_text"]) for p in row["paragraphs"]}
    found = []
    for hop in row["question_decomposition"]:
        support = hop.get("paragraph_support_idx")
        if support is not None and support not in documents:
            raise BadRow(f"a hop is supported by paragraph {support}, which is not there")
        document = documents[support] if support is not None else None
        found.append(Hop(hops.natural(hop["question"]), " ".join(str(hop["answer"]).split()), document))
    gold = [documents[p["idx"]] for p in row["paragraphs"] if p.get("is_supporting")]
    gold = [h.document for h in found if h.document] or gold
    return Question(
        id=id,
        text=_text(row, "question"),
        answers=_answers(row),
        documents=tuple(documents.values()),
        gold=tuple({d.id: d for d in gold}.values()),
        gold_by="text",
        hops=tuple(found),
    )


def _hotpot(row: dict, id: str) -> Question:
    """HotpotQA and 2WikiMultiHopQA, official or columnar: gold are the paragraphs that supporting facts name."""
    context, facts = _unpacked(row["context"]), _unpacked(row["supporting_facts"])
    context = _pairs(context, "title", "sentences") if isinstance(context, dict) else context
    facts = _pairs(facts, "title", "sent_id") if isinstance(facts, dict) else facts
    # HotpotQA's sentences begin with a space, 2WikiMultiHopQA's do not.
    spaced = any(s[:1].isspace() for _, sentences in context for s in sentences[1:])
    supporting: dict[str, list[int]] = {}
    for title, sentence in facts:
        supporting.setdefault(title, []).append(int(sentence))
    documents, gold = [], []
    sentences_of: dict[str, list[str]] = {}
    for index, (title, sentences) in enumerate(context):
        document = Document(f"{id}/{index}", title, ("" if spaced else " ").join(sentences))
        documents.append(document)
        if title in supporting and title not in sentences_of:
            gold.append(document)
            # Some supporting facts of HotpotQA name a sentence past the end of the paragraph.
            named = [sentences[i] for i in sorted(set(supporting[title])) if 0 <= i < len(sentences)]
            sentences_of[title] = [" ".join(s.split()) for s in named or sentences[:1]]
    question = Question(
        id=id,
        text=_text(row, "question"),
        answers=_answers(row),
        documents=tuple(documents),
        gold=tuple(gold),
        gold_by="title",
    )
    evidences = _unpacked(row.get("evidences") or [])
    if isinstance(evidences, dict):
        evidences = list(zip(*evidences.values()))
    found = hops.from_evidences(question, evidences) or hops.from_supporting(
        question, str(row.get("type")), sentences_of
    )
    return Question(**{**vars(question), "hops": found})


def _unpacked(value):
    """A nested field, which some hub copies keep as JSON text."""
    if not isinstance(value, str):
        return value
    unpacked = json.loads(value)
    if problem := half_pair(value, unpacked):
        raise BadRow(problem)
    return unpacked


def _pairs(columns: dict, *names: str) -> list[tuple]:
    return list(zip(*(columns[n] for n in names), strict=True))
