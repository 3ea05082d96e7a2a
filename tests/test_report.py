"""python -m r3lite.report on the files of real commands, and what it refuses."""

import builtins
import json
import re

import pytest

from r3lite import report
from r3lite.core.files import read_jsonl
from r3lite.evaluation.comparisons import compare
from r3lite.evaluation.scores import Marks
from r3lite.reports import png
from r3lite.reports.chart import MARKERS, Line, Lines
from r3lite.settings import ReportSettings
from tests.reports.conftest import entry, episode, jsonl


def evaluation(folder, ems):
    folder.mkdir()
    lines = [episode(str(i), em=em, f1=em, recall=1.0) for i, em in enumerate(ems)]
    (folder / "predictions.jsonl").write_text(jsonl(lines), encoding="utf-8")
    (folder / "scores.json").write_text(json.dumps({"n": len(ems), "em": entry(sum(ems) / len(ems))}), encoding="utf-8")
    return folder


def test_evaluations_of_the_same_questions_are_compared_with_the_first(tmp_path, capsys):
    a, b = evaluation(tmp_path / "a", [0.0, 0.0, 1.0, 0.0]), evaluation(tmp_path / "b", [1.0, 1.0, 1.0, 0.0])
    shorter = evaluation(tmp_path / "c", [1.0])
    assert report.main([str(a), str(b), str(shorter)]) == 0
    page = (a / "report.html").read_text(encoding="utf-8")
    marks = [[Marks.from_json(line) for line in read_jsonl(x / "predictions.jsonl")] for x in (a, b)]
    em = compare(*marks)["em"]
    table_row = f"<td>b minus a</td><td>{em['difference']:+.3f} ({em['low']:+.3f} to {em['high']:+.3f})</td>"
    assert em["difference"] == 0.5 and table_row in page and "c minus" not in page
    assert "KiB: a (evaluate, 4 questions), b (evaluate, 4 questions), c" in capsys.readouterr().out


def test_each_chart_becomes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    a = evaluation(tmp_path / "a", [0.0, 1.0])
    rows = [{"step": 1, "loss": 1.0, "grad_norm": 0.0}, {"step": 2, "loss": None, "grad_norm": 2.0}]
    (a / "metrics.jsonl").write_text(jsonl(rows), encoding="utf-8")
    assert report.main([str(a), "--png", str(tmp_path / "png"), "--output", str(tmp_path / "x.html")]) == 0
    pictures = {path.name: path.read_bytes() for path in (tmp_path / "png").iterdir()}
    assert pictures.keys() == {"scores.png", "loss.png", "grad-norm.png"}
    assert all(content.startswith(b"\x89PNG") and len(content) > 5000 for content in pictures.values())


def test_a_picture_has_the_gaps_of_the_page_and_shows_a_single_value():
    """It joined the values on both sides of a gap, and a line of one value was not there."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    lines = [Line("loss", [1, 2, 3, 4, 5], [1.0, 2.0, None, 4.0, 5.0]), Line("F1", [3], [2.0])]
    axes = figure.add_subplot()
    png._lines(Lines("x", "Loss", "", lines), axes)
    drawn = [list(line.get_xdata()) for line in axes.lines]
    assert drawn == [[1, 2], [4, 5], [3]]
    assert [line.get_marker() for line in axes.lines] == ["", "", "o"]
    assert axes.get_legend_handles_labels()[1] == ["loss", "F1"]


def test_the_runs_of_a_picture_differ_by_marker():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    lines = [Line(name, range(60), [1.0] * 60, colour=i, marker=i) for i, name in enumerate("ab")]
    png._lines(Lines("x", "Loss", "", lines), axes)
    assert [line.get_marker() for line in axes.lines] == ["o", "s"]
    assert [len(line.get_markevery()) for line in axes.lines] == [6, 6]
    assert len(png.MARKERS) == len(MARKERS)


def test_pictures_without_matplotlib_are_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    a, real = evaluation(tmp_path / "a", [1.0]), builtins.__import__

    def without(name, *arguments, **keywords):
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    assert report.main([str(a), "--png", str(tmp_path / "png")]) == 1
    assert "r3lite[plots]" in capsys.readouterr().err and not (a / "report.html").exists()


def test_watching_ends_with_the_run(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(jsonl([{"step": 1, "loss": 1.0}]), encoding="utf-8")
    refreshes = []

    def sleep(seconds):
        refreshes.append("refresh" in (folder / "report.html").read_text(encoding="utf-8"))
        if len(refreshes) == 2:
            (folder / "summary.json").write_text('{"steps": 1}', encoding="utf-8")

    monkeypatch.setattr(report.time, "sleep", sleep)
    assert report.main([str(folder), "--watch"]) == 0
    assert refreshes == [True, True] and "refresh" not in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [([], 2, "no runs given: pass one or more run folders"), (["nowhere"], 1, "nowhere is not a folder")],
)
def test_what_is_no_run_is_refused(capsys, argv, status, message):
    assert report.main(argv) == status
    assert message in capsys.readouterr().err


def test_a_file_alone_has_a_page(tmp_path, capsys):
    """`report FILE --model tiny --output x.html`, as in docs/report.md, ended in a traceback."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(jsonl([episode()]), encoding="utf-8")
    assert report.main([str(rows), "--model", "tiny", "--output", str(tmp_path / "x.html")]) == 0
    assert "rows, by tokens" in (tmp_path / "x.html").read_text(encoding="utf-8")
    assert report.main([str(rows)]) == 0  # in words: no preset names a model to count by, which would be downloaded
    assert "rows, by words" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_files_of_one_name_stand_side_by_side(tmp_path):
    """The last one took the place of the others."""
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "rows.jsonl").write_text(jsonl([episode()]), encoding="utf-8")
    files = [str(tmp_path / place / "rows.jsonl") for place in ("a", "b")]
    assert report.main([*files, "--output", str(tmp_path / "x.html")]) == 0
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "a/rows.jsonl" in page and "b/rows.jsonl" in page


def test_questions_as_a_data_set_has_them_have_an_overview(tmp_path, capsys):
    """An array, whose rows r3lite.collect did not write."""
    row = {"_id": "a", "question": "Who is it?", "answer": "Ann Dahl", "supporting_facts": [["A", 0]]}
    row["context"] = [["A", ["One two three."]], ["B", ["Four."]]]
    (tmp_path / "dev.json").write_text(json.dumps([row, row | {"_id": "b"}]), encoding="utf-8")
    assert report.main([str(tmp_path / "dev.json"), "--output", str(tmp_path / "x.html")]) == 0
    assert "dev.json (data, 2 questions)" in capsys.readouterr().out
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    histograms = dict(re.findall(r'aria-label="([^".]*)\. dev.json, (\d+): 2"', page))
    assert histograms == {
        "Questions": "3", "Documents of a row": "4", "Answers": "2", "Paragraphs of a question": "2",
        "Gold paragraphs of a question": "1",
    }  # fmt: skip


def test_an_array_in_one_long_line_has_an_overview(tmp_path, monkeypatch):
    """HotpotQA's half a gigabyte is one line, which was longer than a line of JSON lines may be."""
    rows = [{"id": str(i), "question": "Who is it?", "answer": "Ann Dahl"} for i in range(9)]
    (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    monkeypatch.setattr("r3lite.core.files.MAX_TEXT", 200)
    data = report.read_file(tmp_path / "train.json", report.count_words, "words")
    assert data.label == "data, 9 questions"


def test_differences_are_drawn_by_the_seed(tmp_path):
    """--seed had no effect."""
    a, b = evaluation(tmp_path / "a", [0.0, 0.0, 1.0] * 9), evaluation(tmp_path / "b", [1.0, 0.0, 0.0] * 5 + [0.0] * 12)
    settings = ReportSettings(runs=(str(a), str(b)))
    marks = [[Marks.from_json(line) for line in read_jsonl(x / "predictions.jsonl")] for x in (a, b)]
    for seed in (0, 7):
        (first_name, difference), *other_pairs = report.read(settings, seed).differences.values()
        assert first_name == "a" and not other_pairs and difference == compare(*marks, seed)
    assert compare(*marks, 0) != compare(*marks, 7)


def test_questions_at_which_the_retriever_failed_are_in_no_difference_and_no_share(tmp_path):
    """They counted as wrong answers, so that an outage looked like a worse model."""
    a, b = evaluation(tmp_path / "a", [1.0, 0.0, 1.0]), evaluation(tmp_path / "b", [0.0, 0.0, 1.0])
    lines = [line.values for line in read_jsonl(b / "predictions.jsonl")]
    lines[0]["failure"] = "status 503"
    (b / "predictions.jsonl").write_text(jsonl(reversed(lines)), encoding="utf-8")  # in another order, as well
    assert report.main([str(a), str(b)]) == 0
    page = (a / "report.html").read_text(encoding="utf-8")
    assert "<td>b minus a</td><td>+0.000 (+0.000 to +0.000)</td>" in page
    assert "<td>right</td><td>1</td><td>50.0%</td>" in page
    assert "<td>the retriever failed</td><td>1</td><td>-</td>" in page


def test_an_outage_of_a_whole_evaluation_is_a_note_of_the_page(tmp_path):
    a, b = evaluation(tmp_path / "a", [1.0]), evaluation(tmp_path / "b", [0.0])
    (line,) = read_jsonl(b / "predictions.jsonl")
    (b / "predictions.jsonl").write_text(jsonl([line.values | {"failure": "status 503"}]), encoding="utf-8")
    assert report.main([str(a), str(b)]) == 0
    page = (a / "report.html").read_text(encoding="utf-8")
    assert "b: at each of the 1 questions the retriever failed" in page and "b minus a" not in page
