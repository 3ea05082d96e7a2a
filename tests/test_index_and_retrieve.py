"""`index` and `retrieve` as they are called, and recall on real questions."""

import json
import re

import pytest

from r3lite import index, retrieve
from r3lite.core.episode import Document
from r3lite.core.files import shipped, sole_writer, write_jsonl
from r3lite.datasets.qa import read_questions
from r3lite.retrieval import remote
from r3lite.retrieval.lexical import Lexical
from tests.errors import shows

HOTPOT = ("hotpotqa/train_100.json", "hotpotqa/corpus_994.jsonl")
MUSIQUE = ("musique/train_100.jsonl", "musique/corpus_1890.jsonl")


def recall(folder):
    result = json.loads((folder / "recall.json").read_text())
    assert {"2", "5", "10"} <= result["recall"].keys()
    return result["n"], result["recall"]["5"]


def test_index_then_retrieve_on_the_sample_world(tmp_path, capsys):
    data, corpus = str(shipped("data", "world", "test.jsonl")), str(shipped("data", "world", "corpus.jsonl"))
    folder = str(tmp_path / "index")
    assert index.main(["--corpus", corpus, "--encoder", "hashing", "--output", folder]) == 0
    out = capsys.readouterr().out
    assert "passages/s" in out
    flags = ["--data", data, "--encoder", "hashing", "--limit", "50"]
    assert retrieve.main([*flags, "--index", folder, "--output", str(tmp_path / "a")]) == 0
    assert "recall@10" in capsys.readouterr().out
    assert retrieve.main([*flags, "--corpus", corpus, "--output", str(tmp_path / "b"), "--top-k", "20"]) == 0
    assert recall(tmp_path / "a") == recall(tmp_path / "b")
    assert "20" in json.loads((tmp_path / "b" / "recall.json").read_text())["recall"]
    # One of the two to four gold articles is named in the question itself.
    assert recall(tmp_path / "a")[1] >= (1 / 2 + 1 / 3 + 1 / 4) / 3
    assert retrieve.main([*flags, "--retriever", "golden", "--output", str(tmp_path / "c")]) == 0
    assert recall(tmp_path / "c") == (50, 1.0)


def test_failures_name_cause_and_remedy(tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "1", "title": "T", "text": "x"}\n{"id": "2"}\n')
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"id": "1", "question": "Who?", "answer": "Me"}\n')
    corpus = str(shipped("data", "world", "corpus.jsonl"))
    output = ["--output", str(tmp_path / "out")]
    for main, arguments, words in (
        (index.main, ["--corpus", str(bad), "--encoder", "hashing"], f"{bad}, line 2: text is missing"),
        (index.main, ["--corpus", corpus, "--encoder", str(tmp_path / "none")], "--encoder hashing needs no download"),
        (retrieve.main, ["--data", str(plain), "--encoder", "hashing"], "has gold paragraphs"),
    ):
        assert main([*arguments, *output]) == 1
        error = capsys.readouterr().err
        assert words in error
        assert "Traceback" not in error
        assert len(error.strip().splitlines()) == 2  # cause and remedy
    assert not (tmp_path / "out").exists()


def test_bad_lines_of_a_corpus_are_skipped_on_demand(tmp_path, capsys):
    """--skip-bad-rows did not reach corpora."""
    corpus, data = tmp_path / "corpus.jsonl", str(shipped("data", "world", "test.jsonl"))
    corpus.write_text('{"id": "1", "title": "T", "text": "x"}\n{"id": "2"}\n')
    options = ["--corpus", str(corpus), "--encoder", "hashing", "--skip-bad-rows"]
    assert index.main([*options, "--output", str(tmp_path / "i")]) == 0
    assert len((tmp_path / "i" / "passages.jsonl").read_text().splitlines()) == 1
    assert retrieve.main([*options, "--data", data, "--limit", "2", "--output", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().err.count("skipped 1 bad lines") == 2


def test_an_output_that_cannot_be_written_is_refused_before_the_corpus_is_read(tmp_path, capsys):
    """Hours of encoding were lost where the index could not be written in the end."""
    (tmp_path / "file").write_text("no corpus")
    assert index.main(["--corpus", str(tmp_path / "file"), "--output", str(tmp_path / "file" / "i")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(("files", "lexical", "hybrid"), [(HOTPOT, 0.765, 0.765), (MUSIQUE, 0.49, 0.49)])
def test_bm25_on_real_questions_comes_near_the_reference(shared, tmp_path, files, lexical, hybrid):
    """0.775 and 0.498 with English stop words and a stemmer; hashing beside it must not spoil it."""
    data, corpus = (str(shared / "data" / name) for name in files)
    flags = ["--data", data, "--corpus", corpus, "--encoder", "hashing"]
    for name, minimum_recall in (("lexical", lexical), ("hybrid", hybrid)):
        assert retrieve.main([*flags, "--retriever", name, "--output", str(tmp_path / name)]) == 0
        assert recall(tmp_path / name)[1] >= minimum_recall


def test_one_query_is_shown_with_scores_and_sources(tmp_path, capsys):
    corpus = str(shipped("data", "world", "corpus.jsonl"))
    flags = ["--corpus", corpus, "--encoder", "hashing", "--top-k", "2", "--query"]
    data = ["--data", str(shipped("data", "world", "test.jsonl"))]
    for name, source in (("lexical", "lexical"), ("hybrid", r"semantic\+lexical"), ("semantic", "semantic")):
        assert retrieve.main([*flags, "Who directed Tentor Trulgol?", "--retriever", name]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert re.fullmatch(rf"  1  \d+\.\d{{4}}  {source}  \[\S+\] Tentor Trulgol", lines[0])
        assert "directed the film Tentor Trulgol" in lines[1] and len(lines) == 4
    assert retrieve.main([*flags, "zebra", "--retriever", "lexical"]) == 0
    assert capsys.readouterr().out == "nothing found\n"
    assert retrieve.main([*flags, "x", "--gap-report", str(tmp_path / "g.json")]) == 2
    assert shows(capsys.readouterr().err, "setting-unused", "--gap-report", "without --query")
    for wrong in (["--retriever", "golden"], ["--context", "question"]):
        assert retrieve.main(["--query", "x", *wrong, *data]) == 2
        assert shows(capsys.readouterr().err, "query-without-index")
    assert retrieve.main(["--query", "x", "--encoder", "hashing"]) == 1
    assert shows(capsys.readouterr().err, "nothing-to-search")


def test_a_document_without_a_score_is_shown(capsys, monkeypatch):
    """A server that gives no scores made --query fail with a traceback."""
    document = Document("7", "Blue Harbor", "A film.", source="http://here/retrieve")
    monkeypatch.setattr(remote, "remote_retriever", lambda setup, top_k: lambda pairs: [[document]])
    assert retrieve.main(["--retriever", "http://here/retrieve", "--query", "x"]) == 0
    assert capsys.readouterr().out == "  1  -  http://here/retrieve  [7] Blue Harbor\n     A film.\n"


def test_a_folder_where_recall_cannot_be_written_is_refused_before_the_questions_are_read(tmp_path, capsys):
    (tmp_path / "file").write_text("no questions")
    arguments = ["--data", str(tmp_path / "file"), "--encoder", "hashing", "--output", str(tmp_path / "file" / "r")]
    assert retrieve.main(arguments) == 1
    assert shows(capsys.readouterr().err, "system-error", str(tmp_path / "file"))


def test_gaps_of_a_corpus_are_reported_with_what_they_cost(tmp_path, capsys):
    data, gold = str(shipped("data", "world", "test.jsonl")), {}
    for question in read_questions(data, 20):
        gold |= {d.title: d for d in question.gold}
    lost = sorted(gold)[0]
    lines = shipped("data", "world", "corpus.jsonl").read_text().splitlines()
    corpus, report = tmp_path / "corpus.jsonl", tmp_path / "new" / "gaps.json"
    corpus.write_text("\n".join(line for line in lines if json.loads(line)["title"] != lost))
    flags = ["--data", data, "--limit", "20", "--corpus", str(corpus), "--retriever", "lexical"]
    assert retrieve.main([*flags, "--gap-report", str(report), "--output", str(tmp_path / "r")]) == 0
    gaps = json.loads(report.read_text())
    out = capsys.readouterr().out
    lacking = [q for q in read_questions(data, 20) if lost in {d.title for d in q.gold}]
    assert [q["id"] for q in gaps["questions"]] == [q.id for q in lacking] and lacking
    assert gaps["n"] == 20 and gaps["missing"] == len(lacking)
    assert gaps["best_recall"] == pytest.approx(1 - sum(1 / len(q.gold) for q in lacking) / 20)
    assert recall(tmp_path / "r")[1] <= gaps["best_recall_at"]["5"]
    of_questions = f"in {len(gaps['questions'])} of {gaps['n']} questions"
    assert f"the corpus lacks {gaps['missing']} of {gaps['gold']} gold paragraphs, {of_questions}\n" in out
    assert retrieve.main([*flags, "--gap-report", str(report), "--output", str(tmp_path / "s")]) == 1
    assert "already exists" in capsys.readouterr().err and not (tmp_path / "s").exists()


def test_questions_at_which_the_retriever_failed_are_left_out(tmp_path, capsys, monkeypatch):
    """They would count as questions whose paragraphs it does not find."""
    search = Lexical.search

    def sometimes(self, queries, k, own_places=None):
        if len(queries) > 1 or any(query in bad for query in queries):
            raise RuntimeError("can't allocate memory")
        return search(self, queries, k, own_places)

    data = str(shipped("data", "world", "test.jsonl"))
    flags = ["--data", data, "--limit", "6", "--corpus", str(shipped("data", "world", "corpus.jsonl"))]
    bad = [q.text for q in read_questions(data, 6)][2:4]
    monkeypatch.setattr(Lexical, "search", sometimes)
    assert retrieve.main([*flags, "--retriever", "lexical", "--output", str(tmp_path / "r")]) == 0
    captured = capsys.readouterr()
    assert recall(tmp_path / "r")[0] == 4 and "(2 left out because the retriever failed)" in captured.out
    assert captured.err.count("warning: the retriever failed: RuntimeError: can't allocate memory") == 1
    bad = [q.text for q in read_questions(data, 6)]
    assert retrieve.main([*flags, "--retriever", "lexical", "--output", str(tmp_path / "s")]) == 1
    assert "failed on every question" in capsys.readouterr().err and not (tmp_path / "s").exists()


def test_a_missing_corpus_or_question_file_is_a_usage_error(capsys):
    for main, flag in ((index.main, "--documents or --corpus"), (retrieve.main, "--data")):
        assert main([]) == 2
        assert f"{flag} is missing" in capsys.readouterr().err


@pytest.mark.parametrize(("files", "minimum_recall"), [(HOTPOT, 0.75), (MUSIQUE, 0.49)])
def test_hashing_on_real_questions_is_no_worse_than_bm25_by_much(shared, tmp_path, files, minimum_recall):
    """BM25's recall@5 is 0.775 and 0.498 on these."""
    data, corpus = (str(shared / "data" / name) for name in files)
    assert retrieve.main(["--data", data, "--corpus", corpus, "--encoder", "hashing", "--output", str(tmp_path)]) == 0
    n, recall_at_5 = recall(tmp_path)
    assert n == 100
    assert recall_at_5 >= minimum_recall


@pytest.mark.slow
@pytest.mark.parametrize(("files", "semantic", "hybrid"), [(HOTPOT, 0.785, 0.815), (MUSIQUE, 0.622, 0.572)])
def test_minilm_on_real_questions_reaches_the_reference(shared, minilm, tmp_path, files, semantic, hybrid):
    data, corpus = (str(shared / "data" / name) for name in files)
    assert (
        index.main(["--corpus", corpus, "--encoder", str(minilm), "--output", str(tmp_path / "i"), "--device", "cpu"])
        == 0
    )
    flags = ["--data", data, "--index", str(tmp_path / "i"), "--encoder", str(minilm)]
    for name, reference in (("semantic", semantic), ("hybrid", hybrid)):
        assert retrieve.main([*flags, "--retriever", name, "--output", str(tmp_path / name)]) == 0
        assert recall(tmp_path / name)[1] == pytest.approx(reference, abs=0.005)


def test_an_index_is_replaced_by_one_of_the_same_corpus_only_and_it_is_said(tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    other_corpus = tmp_path / "other.jsonl"
    corpus.write_text('{"id": "1", "title": "T", "text": "x"}\n')
    other_corpus.write_text('{"id": "1", "title": "T", "text": "y"}\n')
    options = ["--encoder", "hashing", "--output", str(tmp_path / "i")]
    assert index.main(["--corpus", str(corpus), *options]) == 0
    assert "replacing" not in capsys.readouterr().out
    assert index.main(["--corpus", str(corpus), *options]) == 0
    assert "replacing   the index of the same corpus" in capsys.readouterr().out
    assert index.main(["--corpus", str(other_corpus), *options]) == 1
    error = capsys.readouterr().err
    assert shows(error, "index-corpus-differs") and "Pass another --output" in error
    assert '"x"' in (tmp_path / "i" / "passages.jsonl").read_text()


def test_an_earlier_measurement_is_not_written_over(tmp_path, capsys):
    flags = ["--data", str(shipped("data", "world", "test.jsonl")), "--encoder", "hashing", "--limit", "2"]
    assert retrieve.main([*flags, "--output", str(tmp_path)]) == 0
    first_measurement = (tmp_path / "recall.json").read_bytes()
    assert retrieve.main([*flags, "--limit", "3", "--output", str(tmp_path)]) == 1
    assert shows(capsys.readouterr().err, "output-exists", "recall.json")
    assert (tmp_path / "recall.json").read_bytes() == first_measurement


def test_an_index_that_another_process_builds_is_not_built_a_second_time(tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "T", "text": "It is here."}\n')
    arguments = ["--corpus", str(corpus), "--encoder", "hashing", "--output", str(tmp_path / "index")]
    with sole_writer(tmp_path / "index", folder=False):
        assert index.main(arguments) == 1
    assert "another process" in capsys.readouterr().err and not (tmp_path / "index").exists()
    assert index.main(arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]


def test_an_index_made_with_a_relative_encoder_is_searched_from_any_folder(minilm, tmp_path, monkeypatch, capsys):
    """The encoder's path was kept as it was typed."""
    corpus = tmp_path / "corpus.jsonl"
    write_jsonl(corpus, [{"id": "1", "title": "Ada", "text": "Ada signed the lease."}])
    command = ["--corpus", str(corpus), "--output", str(tmp_path / "index"), "--encoder", minilm.name]
    monkeypatch.chdir(minilm.parent)
    assert index.main(command) == 0
    manifest = tmp_path / "index" / "manifest.json"
    made_before = manifest.read_text().replace(str(minilm), minilm.name)
    assert made_before != manifest.read_text()
    assert index.main(command) == 0
    monkeypatch.chdir(tmp_path)
    assert retrieve.main(["--index", str(tmp_path / "index"), "--query", "lease"]) == 0
    assert "Ada signed the lease." in capsys.readouterr().out
    manifest.write_text(made_before)  # an index of before this change, which is still replaced
    monkeypatch.chdir(minilm.parent)
    assert index.main(command) == 0


def test_a_folder_named_like_the_hashing_encoder_is_no_encoder(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "corpus.jsonl", [{"id": "1", "title": "Ada", "text": "Ada signed the lease."}])
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert index.main(["--corpus", "corpus.jsonl", "--encoder", "hashing", "--output", "hashing"]) == 0


def test_a_full_disk_is_an_error_with_a_remedy_and_what_was_encoded_stays(tmp_path, monkeypatch, capsys):
    """FAISS raises a bare RuntimeError, which ended in a traceback; and hours of encoding were gone with it."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "T", "text": "It is here."}\n')

    def full(vectors, path):
        raise RuntimeError("Error in void faiss::WRITEANDCHECK\nwrite error: No space left on device")

    arguments = ["--corpus", str(corpus), "--encoder", "hashing", "--output", str(tmp_path / "index")]
    with monkeypatch.context() as patched:
        patched.setattr("faiss.write_index", full)
        assert index.main(arguments) == 1
    stderr = capsys.readouterr().err
    assert "cannot be written: write error: No space left on device" in stderr and "Free disk space" in stderr
    assert index.main(arguments) == 0 and "1 were already encoded" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]


def test_a_folder_of_documents_becomes_an_index_that_all_retrievers_search(tmp_path, capsys):
    docs, folder = tmp_path / "docs", str(tmp_path / "index")
    docs.mkdir()
    (docs / "films.md").write_text(
        "# Films\n## Brenn\nAnn Dahl\ndirected Brenn.\n## Tor\nBo made it.\n", encoding="utf-8"
    )
    (docs / "latin.txt").write_bytes("Käse".encode("latin-1"))
    arguments = ["--documents", str(docs), "--encoder", "hashing", "--output", folder]
    assert index.main(arguments) == 0
    stdout = capsys.readouterr().out
    assert (
        "documents   1 (0 duplicate passages)" in stdout
        and "  1 not in UTF-8: latin.txt" in stdout
        and "passages    2\n" in stdout
        and "skipped     1, listed in skipped.jsonl of the index" in stdout
    )
    skipped = (tmp_path / "index" / "skipped.jsonl").read_text(encoding="utf-8")
    assert json.loads(skipped)["path"] == "latin.txt"
    for name in ("semantic", "lexical", "hybrid"):
        flags = ["--index", folder, "--encoder", "hashing", "--retriever", name, "--query", "Who directed Brenn?"]
        assert retrieve.main(flags) == 0
        lines = capsys.readouterr().out.splitlines()
        assert re.search(r"  \[films\.md#[0-9a-f]{16}\] Films > Brenn$", lines[0])
        assert lines[1] == "     Ann Dahl directed Brenn."
    assert index.main(arguments) == 0  # again, over an index with skipped.jsonl
    (docs / "tor.txt").write_text("Bo lives.", encoding="utf-8")
    capsys.readouterr()
    assert index.main(["--add", str(docs), "--encoder", "hashing", "--output", folder]) == 0
    assert "skipped     1\n" in capsys.readouterr().out  # not listed: skipped.jsonl is that of the first folder
    assert index.main([*arguments, "--corpus", "x.jsonl"]) == 2
    assert "remove one" in capsys.readouterr().err
    assert index.main([*arguments, "--chunk-tokens", "32", "--chunk-overlap", "17"]) == 2
    assert shows(capsys.readouterr().err, "chunk-overlap", "17")
