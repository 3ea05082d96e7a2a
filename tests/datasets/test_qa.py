"""Question readers: formats by content, sub-questions from their facts, bad rows by place."""

import json
import sys

import pytest

from r3lite.core.answer_match import exact_match
from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_jsonl
from r3lite.datasets.qa import read_questions
from tests.errors import raises
from tests.question_rows import HOTPOT, MUSIQUE, TWO_WIKI, write


def paragraph(**changes):
    """MUSIQUE with the first paragraph changed."""
    first, *other_paragraphs = MUSIQUE["paragraphs"]
    return MUSIQUE | {"paragraphs": [first | changes, *other_paragraphs]}


def columnar(row):
    """The same row as the hub's copies of HotpotQA lay it out."""
    titles, sentences = zip(*row["context"], strict=True)
    fact_titles, sent_ids = zip(*row["supporting_facts"], strict=True)
    return {k: v for k, v in row.items() if k != "_id"} | {
        "id": row["_id"],
        "context": {"title": list(titles), "sentences": list(sentences)},
        "supporting_facts": {"title": list(fact_titles), "sent_id": list(sent_ids)},
    }


def texts(question):
    return [(h.question, h.answer, h.document.title) for h in question.hops]


@pytest.mark.parametrize("array", [True, False])
def test_hotpotqa_reads_the_same_in_both_layouts(tmp_path, array):
    official, hubs = read_questions(write(tmp_path / "a.txt", [HOTPOT], array)) + read_questions(
        write(tmp_path / "b.txt", [columnar(HOTPOT)], array)
    )
    assert official == hubs
    assert (official.id, official.gold_by, official.hop_count) == ("h1", "title", 2)
    assert [d.id for d in official.documents] == ["h1/0", "h1/1", "h1/2"]
    assert official.documents[0].text == "Neighbours is a soap opera. It was created by Reg Watson."
    assert {d.title for d in official.gold} == {"Neighbours", "Kate Ramsay"}


def test_a_bridge_question_starts_where_the_answer_is_not(tmp_path):
    question = read_questions(write(tmp_path / "a.json", [HOTPOT], array=True))[0]
    (first, bridge, first_title), (second, answer, second_title) = texts(question)
    assert (first_title, second_title) == ("Kate Ramsay", "Neighbours")
    assert (bridge, answer) == ("Neighbours", "Reg Watson")
    assert "Neighbours" not in first  # what only the paragraphs say is not asked for before it is found
    assert second == "#1"
    assert [hop.evidence for hop in question.hops] == [
        ('Kate Ramsay is a character of "Neighbours".',),
        ("It was created by Reg Watson.",),
    ]


def test_a_comparison_asks_for_each_entity_in_the_question_s_order(tmp_path):
    row = HOTPOT | {
        "question": "Which band is older, The Exies or Circus Diablo (band)?",
        "answer": "The Exies",
        "type": "comparison",
        "supporting_facts": [["Circus Diablo (band)", 0], ["The Exies", 0]],
        "context": [["Circus Diablo (band)", ["Formed in 2006."]], ["The Exies", ["Formed in 1997.", " In LA."]]],
    }
    question = read_questions(write(tmp_path / "a.json", [row], array=True))[0]
    assert texts(question) == [
        ("The Exies", "Formed in 1997.", "The Exies"),
        ("Circus Diablo", "Formed in 2006.", "Circus Diablo (band)"),
    ]


def test_a_number_sign_in_a_question_is_no_reference(tmp_path):
    question = read_questions(write(tmp_path / "a.json", [HOTPOT | {"question": "Who had a #1 hit?"}]))[0]
    assert [h.question for h in question.hops] == ["Who had a No. 1 hit?", "#1"]


def test_one_gold_paragraph_is_a_hop_if_it_has_the_answer(tmp_path):
    question = read_questions(write(tmp_path / "a.json", [HOTPOT | {"supporting_facts": [["Kate Ramsay", 0]]}]))[0]
    assert question.hops == () and question.hop_count == 1
    row = HOTPOT | {"supporting_facts": [["Kate Ramsay", 0]], "answer": "Neighbours"}
    question = read_questions(write(tmp_path / "b.json", [row]))[0]
    assert texts(question) == [("Kate Ramsay", "Neighbours", "Kate Ramsay")]
    assert question.hops[0].evidence == ('Kate Ramsay is a character of "Neighbours".',)


def test_2wiki_hops_come_from_its_evidences(tmp_path):
    packed = TWO_WIKI | {k: json.dumps(TWO_WIKI[k]) for k in ("context", "supporting_facts", "evidences")}
    for row in (TWO_WIKI, packed):
        question = read_questions(write(tmp_path / "a.json", [row], array=True))[0]
        assert texts(question) == [
            ("Who is the director of Brenn?", "Ann Dahl", "Brenn (film)"),
            ("Where was #1 born?", "Oslo", "Ann Dahl"),
        ]
        # 2WikiMultiHopQA's sentences do not bring their own spaces.
        assert question.documents[0].text == "Brenn is a film. It was directed by Ann Dahl."


@pytest.mark.parametrize(
    ("question", "named"), [("Who made Brenn?", False), ("Who made Brenn, and was Ann Dahl?", True)]
)
def test_one_of_several_answers_of_a_2wiki_hop_is_not_given_away(tmp_path, question, named):
    """The second hop asked for Ann Dahl by her name, which only the first one finds."""
    evidences = [["Brenn", "director", "Ann Dahl"], ["Brenn", "director", "Bo Eik"], *TWO_WIKI["evidences"][1:]]
    row = TWO_WIKI | {"question": question, "evidences": evidences}
    (read,) = read_questions(write(tmp_path / "a.json", [row], array=True))
    assert ("Ann Dahl" in read.hops[1].question) == named
    assert ("#1" in read.hops[1].question) == (not named)


def test_musique_hops_and_gold_paragraphs(tmp_path):
    question = read_questions(write(tmp_path / "a.jsonl", [MUSIQUE]))[0]
    assert texts(question) == [
        ("Who is the director of Brenn?", "Ann Dahl", "Brenn"),
        ("Where was #1 born?", "Oslo", "Ann Dahl"),
    ]
    assert question.answers == ("Oslo", "Kristiania")
    assert [d.id for d in question.gold] == ["2hop__1/2", "2hop__1/0"]
    # One title has several paragraphs: the title alone does not make one a gold one.
    assert question.gold_index(Document("x", "Ann Dahl", "Ann Dahl was  born in Oslo.")) == 1
    assert question.gold_index(Document("x", "Ann Dahl", "Another one.")) is None


def test_musique_s_unanswerable_questions_are_left_out_and_counted(tmp_path, capsys):
    rows = [MUSIQUE, MUSIQUE | {"answerable": False}]
    assert len(read_questions(write(tmp_path / "a.jsonl", rows))) == 1
    assert "1 unanswerable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"answer": " Oslo "}, ("Oslo",)),
        ({"answer": ["Oslo", "Kristiania", "Oslo"]}, ("Oslo", "Kristiania")),
        ({"answers": ["Oslo"]}, ("Oslo",)),
        ({"answers": {"text": ["Oslo"]}}, ("Oslo",)),
        ({"golden_answers": ["Oslo"]}, ("Oslo",)),
        ({"answer": 1998}, ("1998",)),
    ],
)
def test_plain_rows(tmp_path, fields, answers):
    question = read_questions(write(tmp_path / "a.jsonl", [{"id": 3, "question": "Where?"} | fields]))[0]
    assert (question.id, question.text, question.answers) == ("3", "Where?", answers)
    assert question.documents == question.gold == question.hops == ()


def test_a_whole_number_that_a_table_made_a_float_is_the_number(tmp_path):
    """Normalized, 1987.0 is 19870: "1987" was wrong, and "19870" right."""
    answers = (1987.0, [12.0, 1.5], -0.0)
    rows = [{"id": str(i), "question": "When?", "answer": answer} for i, answer in enumerate(answers)]
    questions = read_questions(write(tmp_path / "plain.jsonl", rows))
    assert [question.answers for question in questions] == [("1987",), ("12", "1.5"), ("0",)]
    assert exact_match("1987", questions[0].answers) == 1 and exact_match("19870", questions[0].answers) == 0
    steps = [MUSIQUE["question_decomposition"][0] | {"answer": 1987.0}, *MUSIQUE["question_decomposition"][1:]]
    (question,) = read_questions(write(tmp_path / "m.jsonl", [MUSIQUE | {"question_decomposition": steps}]))
    assert question.hops[0].answer == "1987"
    facts = [[*fact[:2], 1987.0] for fact in TWO_WIKI["evidences"]]
    (question,) = read_questions(write(tmp_path / "2.json", [TWO_WIKI | {"evidences": facts}], array=True))
    (plain,) = read_questions(
        write(tmp_path / "3.json", [TWO_WIKI | {"evidences": [[*f[:2], "1987"] for f in facts]}], array=True)
    )
    assert question.hops == plain.hops


def test_limit_stops_before_a_later_bad_row(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "Q?", "answer": "a"}, "{bad"])
    assert [q.id for q in read_questions(path, limit=1)] == ["a-1"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{not json", "not JSON"),
        ('["a list"]', "not a JSON object"),
        ({"question": "Q?"}, "no answer"),
        ({"question": " ", "answer": "a"}, "question is blank"),
        ({"question": "Q?", "answer": "a", "task": ["coding"]}, "task is ['coding'], not text"),
        ({k: v for k, v in HOTPOT.items() if k != "answer"}, "no answer"),
        (HOTPOT | {"context": [["only a title"]]}, "context is not a list of lists of 2"),
        (MUSIQUE | {"paragraphs": MUSIQUE["paragraphs"][:1]}, "paragraph_support_idx is 2"),
        (MUSIQUE | {"paragraphs": [{"idx": 0}]}, "title is missing"),
        # Text that is none was found out by the retriever, with a traceback.
        (paragraph(title=None), "paragraphs[0].title is missing"),
        (paragraph(paragraph_text=None), "paragraphs[0].paragraph_text is missing"),
        (HOTPOT | {"context": [*HOTPOT["context"], [None, ["A street."]]]}, "context is not a list of pairs"),
        (HOTPOT | {"context": [*HOTPOT["context"], [7, ["A street."]]]}, "context is not a list of pairs"),
        (HOTPOT | {"question": "\ud83d"}, "half of a surrogate pair"),
        (HOTPOT | {"context": json.dumps([["\ud83d", ["A street."]]])}, "half of a surrogate pair"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_reason_or_counted(tmp_path, capsys, bad, reason):
    good = {"question": "Q?", "answer": "a"}
    path = write(tmp_path / "a.jsonl", [good, bad, good])
    with pytest.raises(R3LiteError) as caught:
        read_questions(path)
    assert f"{path}, line 2: " in caught.value.cause and reason in caught.value.cause
    assert "--skip-bad-rows" in caught.value.remedy
    assert len(read_questions(path, skip_bad_rows=True)) == 2
    assert "skipped 1 bad rows" in capsys.readouterr().err


def test_a_bad_element_of_an_array_is_named_by_its_row(tmp_path):
    for bad, reason in (("7", "not a JSON object"), (HOTPOT | {"question": "\ud83d"}, "contains half of a surrogate")):
        path = write(tmp_path / "a.json", [HOTPOT, bad], array=True)
        with pytest.raises(R3LiteError, match=f"row 2: {reason}") as error:
            read_questions(path)
        assert "--skip-bad-rows" in error.value.remedy
        assert len(read_questions(path, skip_bad_rows=True)) == 1


def test_a_cut_array_is_never_taken_for_a_whole_one(tmp_path):
    array = json.dumps([HOTPOT, HOTPOT])
    for end in (len(array) - 1, len(array) // 2 + 40):
        (tmp_path / "a.json").write_text(array[:end])
        with pytest.raises(R3LiteError, match="row"):
            read_questions(tmp_path / "a.json", skip_bad_rows=True)


def test_a_file_without_questions_is_refused(tmp_path):
    with raises(R3LiteError, "no-rows"):
        read_questions(write(tmp_path / "a.json", [], array=True))


@pytest.mark.parametrize(
    ("data", "corpus"),
    [
        ("hotpotqa/train_100.json", "hotpotqa/corpus_994.jsonl"),
        ("musique/train_100.jsonl", "musique/corpus_1890.jsonl"),
    ],
)
def test_gold_paragraphs_are_in_the_corpus(shared, data, corpus):
    folder = shared / "data"
    questions = read_questions(folder / data)
    passages = [Document.from_json(record) for record in read_jsonl(folder / corpus)]
    by_text = {(d.title, d.text) for d in passages}
    assert len(questions) == 100 and all(q.hops for q in questions)
    for question in questions:
        assert len({d.id for d in question.documents}) == len(question.documents)
        assert all((d.title, d.text) in by_text for d in question.documents)
        assert question.gold_indices(question.documents) == set(range(len(question.gold)))
        titles = {d.title for d in question.gold}
        assert question.gold_indices(p for p in passages if p.title in titles) == set(range(len(question.gold)))


def test_parquet_reads_like_json(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([columnar(HOTPOT)]), tmp_path / "a.parquet")
    (question,) = read_questions(tmp_path / "a.parquet")
    assert question == read_questions(write(tmp_path / "a.json", [HOTPOT]))[0]


def as_json(value, depth: int):
    """Lists of lists of JSON texts, as the package `datasets` keeps values of several types."""
    return json.dumps(value) if depth == 0 else [as_json(item, depth - 1) for item in value]


def test_parquet_of_mixed_lists_reads_like_json(tmp_path):
    """Version 5 of `datasets` writes the leaves of mixed lists as JSON texts, of a type that pyarrow knows since 19."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [HOTPOT, TWO_WIKI | {"answer": 1987}]
    leaf = pyarrow.field("element", pyarrow.string(), metadata={b"ARROW:extension:name": b"arrow.json"})
    pairs = pyarrow.list_(pyarrow.field("element", pyarrow.list_(leaf)))
    names = {"_id": pyarrow.string(), "question": pyarrow.string(), "type": pyarrow.string()}
    fields = [pyarrow.field(name, kind) for name, kind in names.items()]
    fields += [pyarrow.field("answer", leaf.type, metadata=leaf.metadata)]
    fields += [pyarrow.field(name, pairs) for name in ("supporting_facts", "context")]
    columns = [[row[name] for row in rows] for name in names]
    columns.append([as_json(row["answer"], 0) for row in rows])
    columns += [[as_json(row[name], 2) for row in rows] for name in ("supporting_facts", "context")]
    arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, fields, strict=True)]
    table = pyarrow.Table.from_arrays(arrays, schema=pyarrow.schema(fields))
    parquet.write_table(table, tmp_path / "a.parquet")
    expected = [{key: value for key, value in row.items() if key != "evidences"} for row in rows]
    questions = read_questions(tmp_path / "a.parquet")
    assert questions == read_questions(write(tmp_path / "a.json", expected))
    assert [question.answers for question in questions] == [("Reg Watson",), ("1987",)]


def test_parquet_with_text_that_is_not_json_is_a_bad_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    field = pyarrow.field("answer", pyarrow.string(), metadata={b"ARROW:extension:name": b"arrow.json"})
    schema = pyarrow.schema([pyarrow.field("question", pyarrow.string()), field])
    columns = {"question": ["Who?", "When?"], "answer": ['"Ada', '"1987"']}
    parquet.write_table(pyarrow.table(columns, schema=schema), tmp_path / "a.parquet")
    with pytest.raises(R3LiteError, match=r"a\.parquet, row 1: not JSON"):
        read_questions(tmp_path / "a.parquet")
    assert [q.answers for q in read_questions(tmp_path / "a.parquet", skip_bad_rows=True)] == [("1987",)]


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with raises(R3LiteError, "package-missing", "r3lite[hub]"):
        read_questions(tmp_path / "a.parquet")


def test_a_missing_file_is_named():
    with raises(R3LiteError, "data-absent"):
        read_questions("no/such/file.json")


def test_types_are_the_data_sets_own(tmp_path):
    plain = {"question": "Who?", "answer": "Ada", "type": "bridge"}  # of rows without supporting facts nothing is known
    rows = [HOTPOT, TWO_WIKI, {k: v for k, v in HOTPOT.items() if k != "type"} | {"_id": "h2"}, MUSIQUE, plain]
    rows += [{"question": "Sort a list.", "answer": "sorted(x)", "task": " coding "}]
    questions = read_questions(write(tmp_path / "a.jsonl", rows))
    assert [q.type for q in questions] == ["bridge", "compositional", "", "", "", "coding"]


TABLES = [
    ("q.csv", "question,answer\nWho is it?,Ann\n", "Who is it?"),
    ("q.csv", "\ufeffQuestion;Answer;Note\r\nWho, if any?;Ann;\r\n", "Who, if any?"),
    ("q.csv", "sep=|\nquestion|answer\nWho?|Ann\n", "Who?"),
    ("q.CSV", 'answer,question\nAnn,"Who, in\n""Brenn""?"\n', 'Who, in "Brenn"?'),
    ("q.tsv", 'question\tanswer\nWho is "it"?\tAnn\n', 'Who is "it"?'),
]


@pytest.mark.parametrize(("name", "content", "question"), TABLES)
def test_questions_in_a_table(tmp_path, name, content, question):
    """CSV was `line 1: not JSON`."""
    (tmp_path / name).write_bytes(content.encode())
    (read,) = read_questions(tmp_path / name)
    assert (read.id, read.text, read.answers) == ("q-1", question, ("Ann",))


def test_a_table_gives_ids_and_leaves_out_empty_cells(tmp_path):
    (tmp_path / "q.csv").write_text("id,question,answer,task\n7,Who?,Ann,\n8,Where?,1.50,poem\n", encoding="utf-8")
    assert [(q.id, q.text, q.answers, q.type) for q in read_questions(tmp_path / "q.csv")] == [
        ("7", "Who?", ("Ann",), ""),
        ("8", "Where?", ("1.50",), "poem"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "code", "values"),
    [
        ("q.csv", b"question,answer\nWho, if any?,Ann\n", "bad-row", ["row 1: 3 cells, but 2 columns", "quotation"]),
        ("q.csv", b"Who?,Ann\nWhere?,Oslo\n", None, ["row 1: ", "question", "The first line must name the columns"]),
        ("q.csv", b"Query,Response\nWho?,Ann\n", "bad-record", ["row 1: question is missing", "'query', 'response'"]),
        ("q.csv", b"question,reply\nWho?,Ann\n", "bad-record", ["row 1: no answer", "'question', 'reply'"]),
        ("q.csv", b"question,answer,answer\nWho?,a,b\n", "column-twice", ["2 columns named answer"]),
        ("q.csv", b"question,answer\nWho?,\xfc\n", "file-unreadable", ["CSV in UTF-8"]),
        ("q.csv", b'question,answer\n"Who?,a\n', "not-a-table", ["q.csv is not a table"]),
        ("q.csv", b"", "no-rows", ["q.csv is empty: it has no row", "such as question,answer"]),
        ("q.csv", b"question,answer\n", "no-rows", ["q.csv is empty: it has no row", "each further line is a row"]),
        ("q.jsonl", b"\n", "no-rows", ["q.jsonl is empty: it has no row"]),
        ("q.jsonl", b'{"question": "Who?", "answer": "Ann", "answerable": false}\n', "no-usable-questions", []),
        ("q.txt", b"question,answer\nWho?,Ann\n", "data-format-unknown", ["q.txt is neither JSON", ".csv or .tsv"]),
        ("q.xlsx", b"PK\x03\x04", "data-format-unknown", ["Save it as CSV"]),
    ],
)
def test_a_table_that_cannot_be_read_says_what_it_must_be(tmp_path, name, content, code, values):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(R3LiteError) as error:
        read_questions(tmp_path / name)
    assert code in (None, error.value.code)
    assert [value for value in values if value not in str(error.value)] == []


def test_a_table_whose_columns_are_named_is_not_told_to_name_them(tmp_path):
    (tmp_path / "q.csv").write_text("question,answer\nWho?,\n", encoding="utf-8")
    with raises(R3LiteError, "bad-record", "row 1: no answer") as error:
        read_questions(tmp_path / "q.csv")
    assert "must name the columns" not in str(error.value)
    assert "Empty in this row: answer. Fix or remove the row" in error.value.remedy
