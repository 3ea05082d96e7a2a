"""Question readers: formats by content, bad rows by place, sub-questions by rule, hub strings without a network."""

import json
import os
import subprocess
import sys
import types

import pytest

from r3lite.datasets import hub
from r3lite.datasets.hops import natural, relation_question
from r3lite.datasets.qa import read_questions
from r3lite.episode import Document
from r3lite.errors import R3LiteError

HOTPOT = {
    "_id": "h1",
    "question": "Kate Ramsay is a character of a soap opera created by who?",
    "answer": "Reg Watson",
    "type": "bridge",
    "supporting_facts": [["Neighbours", 1], ["Kate Ramsay", 0], ["Kate Ramsay", 9]],
    "context": [
        ["Neighbours", ["Neighbours is a soap opera.", " It was created by Reg Watson."]],
        ["Ramsay Street", ["A street."]],
        ["Kate Ramsay", ["Kate Ramsay is a character of \"Neighbours\".", " She was played by Ashleigh Brewer."]],
    ],
}  # fmt: skip
TWO_WIKI = {
    "_id": "w1",
    "question": "Where was the director of Brenn born?",
    "answer": "Oslo",
    "type": "compositional",
    "supporting_facts": [["Brenn (film)", 0], ["Ann Dahl", 0]],
    "context": [
        ["Brenn (film)", ["Brenn is a film.", "It was directed by Ann Dahl."]],
        ["Ann Dahl", ["Ann Dahl was born in Oslo.", "She made films."]],
    ],
    "evidences": [["Brenn", "director", "Ann Dahl"], ["Ann Dahl", "place of birth", "Oslo"]],
}
MUSIQUE = {
    "id": "2hop__1",
    "question": "Where was the director of Brenn born?",
    "answer": "Oslo",
    "answer_aliases": ["Kristiania", "Oslo"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Ann Dahl", "paragraph_text": "Ann Dahl was born in Oslo.", "is_supporting": True},
        {"idx": 1, "title": "Ann Dahl", "paragraph_text": "Another one.", "is_supporting": False},
        {"idx": 2, "title": "Brenn", "paragraph_text": "A film by Ann Dahl.", "is_supporting": True},
    ],
    "question_decomposition": [
        {"id": 7, "question": "Brenn >> director", "answer": "Ann Dahl", "paragraph_support_idx": 2},
        {"id": 8, "question": "where was #1 born", "answer": "Oslo", "paragraph_support_idx": 0},
    ],
}


def write(path, rows, array=False):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text(f"[{', '.join(lines)}]" if array else "\n".join(lines) + "\n", encoding="utf-8")
    return path


def paragraph(**changes):
    """MUSIQUE with the first paragraph changed."""
    first, *others = MUSIQUE["paragraphs"]
    return MUSIQUE | {"paragraphs": [first | changes, *others]}


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
    official, hubs = read_questions(write(tmp_path / "a.txt", [HOTPOT, columnar(HOTPOT)], array))
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
    assert second == f"Given Neighbours: {HOTPOT['question']}"


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
        ("What is known about The Exies?", "Formed in 1997.", "The Exies"),
        ("What is known about Circus Diablo?", "Formed in 2006.", "Circus Diablo (band)"),
    ]


def test_a_number_sign_in_a_question_is_no_reference(tmp_path):
    question = read_questions(write(tmp_path / "a.json", [HOTPOT | {"question": "Who had a #1 hit?"}]))[0]
    assert all("#" not in h.question and "No. 1 hit" in h.question for h in question.hops)


def test_without_two_gold_paragraphs_there_is_no_decomposition(tmp_path):
    question = read_questions(write(tmp_path / "a.json", [HOTPOT | {"supporting_facts": [["Kate Ramsay", 0]]}]))[0]
    assert question.hops == () and question.hop_count == 1


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


def test_limit_stops_before_a_later_bad_row(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "Q?", "answer": "a"}, "{bad"])
    assert [q.id for q in read_questions(path, limit=1)] == ["a-1"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{not json", "not JSON"),
        ('["a list"]', "not a JSON object"),
        ({"question": "Q?"}, "no answer"),
        ({"question": " ", "answer": "a"}, "'question' is missing or blank"),
        ({k: v for k, v in HOTPOT.items() if k != "answer"}, "no answer"),
        (HOTPOT | {"context": [["only a title"]]}, "HotpotQA format"),
        (MUSIQUE | {"paragraphs": MUSIQUE["paragraphs"][:1]}, "supported by paragraph 2"),
        (MUSIQUE | {"paragraphs": [{"idx": 0}]}, "MuSiQue format: KeyError: 'title'"),
        # Text that is none was found out by the retriever, with a traceback.
        (paragraph(title=None), "the title of document 2hop__1/0 is not text"),
        (paragraph(paragraph_text=None), "the text of document 2hop__1/0 is not text"),
        (HOTPOT | {"context": [*HOTPOT["context"], [None, ["A street."]]]}, "the title of document h1/3 is not text"),
        (HOTPOT | {"context": [*HOTPOT["context"], [7, ["A street."]]]}, "the title of document h1/3 is not text"),
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
    assert "1 bad rows skipped" in capsys.readouterr().err


def test_a_bad_element_of_an_array_is_named_by_its_row(tmp_path):
    for bad, reason in (("7", "not a JSON object"), (HOTPOT | {"question": "\ud83d"}, "it holds half of a surrogate")):
        path = write(tmp_path / "a.json", [HOTPOT, bad], array=True)
        with pytest.raises(R3LiteError, match=f"row 2: {reason}") as error:
            read_questions(path)
        assert "--skip-bad-rows" in error.value.remedy
        assert len(read_questions(path, skip_bad_rows=True)) == 1


def test_a_cut_array_is_never_taken_for_a_whole_one(tmp_path):
    whole = json.dumps([HOTPOT, HOTPOT])
    for end in (len(whole) - 1, len(whole) // 2 + 40):
        (tmp_path / "a.json").write_text(whole[:end])
        with pytest.raises(R3LiteError, match="row"):
            read_questions(tmp_path / "a.json", skip_bad_rows=True)


def test_a_file_without_questions_is_refused(tmp_path):
    with pytest.raises(R3LiteError, match="no usable question"):
        read_questions(write(tmp_path / "a.json", [], array=True))


@pytest.mark.parametrize(
    ("written", "natural_form"),
    [
        ("Hello Love >> performer", "Who is the performer of Hello Love?"),
        ("#1 >> located in or next to body of water", "Which body of water is #1 located in or next to?"),
        ("Midway, #2 , #1 >> country", "What is the country of Midway, #2, #1?"),
        ("#1 >> capital of", "What is #1 the capital of?"),
        ("X >> owned by", "What is X owned by?"),
        ("X >> record label", "What is the record label of X?"),
        ("Who is #3 's mother?", "Who is #3's mother?"),
        ("how many publix stores are in #3", "How many publix stores are in #3?"),
        ("Who was the first president of #1 ?", "Who was the first president of #1?"),
    ],
)  # fmt: skip
def test_musique_sub_questions_read_naturally(written, natural_form):
    assert natural(written) == natural_form


def test_relations_with_a_preposition_stay_readable():
    assert relation_question("Kant", "influenced by") == "What is Kant influenced by?"


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
    passages = [Document.from_json(json.loads(line)) for line in (folder / corpus).read_text("utf-8").splitlines()]
    by_text = {(d.title, d.text) for d in passages}
    assert len(questions) == 100 and all(q.hops for q in questions)
    for question in questions:
        assert len({d.id for d in question.documents}) == len(question.documents)
        assert all((d.title, d.text) in by_text for d in question.documents)
        assert question.gold_found(question.documents) == set(range(len(question.gold)))
        titles = {d.title for d in question.gold}
        assert question.gold_found(p for p in passages if p.title in titles) == set(range(len(question.gold)))


def test_parquet_reads_like_json(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([columnar(HOTPOT)]), tmp_path / "a.parquet")
    (question,) = read_questions(tmp_path / "a.parquet")
    assert question == read_questions(write(tmp_path / "a.json", [HOTPOT]))[0]


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(R3LiteError, match=r"pip install 'r3lite\[hub\]'"):
        read_questions(tmp_path / "a.parquet")


def test_a_missing_file_is_named():
    with pytest.raises(R3LiteError, match="there is no such file"):
        read_questions("no/such/file.json")


@pytest.mark.parametrize(
    ("files", "subset", "split", "picked"),
    [
        (["distractor/train-00000-of-00002.parquet", "distractor/train-00001-of-00002.parquet",
          "fullwiki/train-00000-of-00001.parquet"], "distractor", "train",
         ["distractor/train-00000-of-00002.parquet", "distractor/train-00001-of-00002.parquet"]),
        (["hotpotqa/dev.jsonl", "hotpotqa/train.jsonl", "nq/dev.jsonl"], "hotpotqa", "dev", ["hotpotqa/dev.jsonl"]),
        (["musique_ans_v1.0_train.jsonl", "musique_full_v1.0_train.jsonl"], "musique_ans", "train",
         ["musique_ans_v1.0_train.jsonl"]),
        (["data/train-0.parquet", "data/train.json"], "", "train", ["data/train.json"]),
        (["x/validation/0000.parquet", "x/train/0000.parquet"], "", "train", ["x/train/0000.parquet"]),
    ],
)  # fmt: skip
def test_files_of_a_hub_split(files, subset, split, picked):
    assert hub.pick(files, "name", subset, split) == picked


def test_a_split_in_several_subsets_or_in_none_is_refused():
    with pytest.raises(R3LiteError, match="several subsets: a, b"):
        hub.pick(["a/train.json", "b/train.json"], "name", "", "train")
    with pytest.raises(R3LiteError, match="there is a/train"):
        hub.pick(["a/train.json"], "name", "a", "test")
    with pytest.raises(R3LiteError, match="a loading script is never run"):
        hub.pick([], "name", "a", "test")


@pytest.mark.parametrize("revision", [None, hub.CONVERTED])
def test_a_hub_string_downloads_and_reads(tmp_path, monkeypatch, revision):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    write(tmp_path / "train.jsonl", [HOTPOT])
    asked = []

    def dataset_info(self, repo_id, revision=None, timeout=None):
        names = ["README.md", "evil.pkl", "load.py"]
        names += ["sub/train.jsonl", "sub/test.jsonl"] if revision == wanted else []
        return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=n) for n in names])

    def download(repo_id, filename, repo_type, revision, etag_timeout):
        asked.append((repo_id, filename, repo_type, revision))
        return str(tmp_path / "train.jsonl")

    wanted = revision
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert [q.id for q in read_questions("owner/set,sub,train")] == ["h1"]
    assert asked == [("owner/set", "sub/train.jsonl", "dataset", revision)]


def test_a_hub_string_without_a_network_says_what_to_put_where():
    """A server that is not there stands for a machine without a network; the variable is read at import."""
    code = "from r3lite.datasets.qa import read_questions; read_questions('hotpotqa/hotpot_qa,distractor,train')"
    for setting in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | setting, capture_output=True, text=True, timeout=60
        )
        assert "R3LiteError: the data set 'hotpotqa/hotpot_qa' cannot be fetched" in done.stderr
        assert "hotpot_train_v1.1.json" in done.stderr and "--data" in done.stderr
