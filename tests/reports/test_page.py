"""The page: whole, small, harmless whatever is in the files, and honest about what is not there."""

import re
from html.parser import HTMLParser

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.reports.chart import MARKERS
from r3lite.reports.data import read_data
from r3lite.reports.page import Report, html
from r3lite.reports.run import read_runs
from tests.reports.conftest import entry, episode, jsonl

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;"
VOID = {"meta", "br", "img"}


class Tags(HTMLParser):
    """Checks that tags are closed in order; collects them, and what they would fetch or run."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.names, self.attributes = [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page_of(*folders, **options) -> str:
    page = html(Report(read_runs([str(folder) for folder in folders])), "now", **options)
    Tags(page)
    return page


def test_nothing_in_the_files_becomes_markup(run_folder):
    names = "id title text analysis query answer fault question prediction right reward alarm type".split()  # noqa: SIM905
    hostile = {name: f"{name} {HOSTILE}" for name in names}
    document = {name: hostile[name] for name in ("id", "title", "text")}
    step = {name: hostile[name] for name in ("analysis", "query", "answer")}
    step |= {"documents": [document], "faults": [hostile["fault"]]}
    line = episode("x") | {name: hostile[name] for name in ("question", "prediction")}
    line |= {"answers": [hostile["right"]], "steps": [step], "gold_found": [hostile["id"]]}
    line |= {"em": 0.0, "recall": 0.5, "rewards": {hostile["reward"]: 1.0}}
    folder = run_folder(
        "a",
        metrics=[{"step": 1, f"rewards/{HOSTILE.replace('/', '')}/mean": 1.0, "guard/alarm": hostile["alarm"]}],
        episodes=[line],
        predictions=[line],
        scores={"n": 1, "em": entry(0.5), "by_type": {hostile["type"]: {"em": entry(0.1)}, "b": {"em": entry(0.2)}}},
    )
    page = page_of(folder)
    # All of an episode is shown twice: among the episodes and among the outputs.
    assert [name for name in names if page.count(f"{name} &lt;script&gt;") < 2] == ["alarm"]
    assert "alarm &lt;script&gt;" in page
    tags = Tags(page)
    assert not {"script", "img", "link", "iframe"} & set(tags.names)
    assert not [name for name, _ in tags.attributes if name.startswith("on") or name == "src"]
    assert all(value.startswith("#") for name, value in tags.attributes if name == "href")


def test_gold_documents_and_rewards_are_shown(run_folder):
    page = page_of(run_folder("a", metrics=[{"step": 1}], episodes=[episode("q", gold_found=["d1"])]))
    assert '<div class="document gold"><b>Rome</b> [d1] gold Rome is in Italy.</div>' in page
    assert "rewards: em 1" in page and 'class="right">Where is q?' in page
    plain = page_of(run_folder("b", metrics=[{"step": 1}], episodes=[episode("q")]))
    assert '<div class="document"><b>Rome</b> [d1] Rome' in plain


def test_the_queries_of_a_plan_are_shown_with_their_sources(run_folder):
    nodes = [{"query": "Rome <1>", "documents": [], "source": "News"}, {"query": "Oslo", "documents": []}]
    run = run_folder("a", metrics=[{"step": 1}], episodes=[episode(steps=[{"analysis": "Nodes:", "searches": nodes}])])
    page = page_of(run)
    assert "<b>query</b> Rome &lt;1&gt; (News)\n" in page and "<b>query</b> Oslo</div>" in page


def test_the_verification_of_an_answer_is_shown(run_folder):
    steps = [{"analysis": "So.", "verification": "[1] shows <it>.", "answer": "Italy"}]
    page = page_of(run_folder("a", metrics=[{"step": 1}], episodes=[episode(steps=steps)]))
    assert "So.\n<b>verification</b> [1] shows &lt;it&gt;.\n<b>answer</b> Italy" in page


def test_a_scale_is_called_logarithmic_only_if_it_is(run_folder):
    """A gradient norm of 0, as of a round that had nothing to teach, makes the scale linear."""
    for name, norm, suffix in (("a", 0.0, ""), ("b", 0.5, " <span>(log scale)</span>")):
        page = page_of(run_folder(name, metrics=[{"step": 1, "grad_norm": norm}, {"step": 2, "grad_norm": 2.0}]))
        assert f"<h3>Gradient norm, before clipping{suffix}</h3>" in page


def test_numbers_of_hops_are_in_order(run_folder):
    """As texts, 10 came before 2."""
    groups = {hops: {"em": entry(0.5)} for hops in ("2", "3", "10")}
    page = page_of(run_folder("a", "evaluate", scores={"n": 3, "em": entry(0.5), "by_hops": groups}))
    assert 'aria-label="Exact match by hops. a, 2: 0.5; a, 3: 0.5; a, 10: 0.5"' in page


def test_a_run_of_nothing_and_one_of_nan_say_so(run_folder):
    empty = page_of(run_folder("empty"))
    assert "nothing logged yet" in empty and "<svg" not in empty
    blank = page_of(run_folder("nan", metrics=[{"step": 1, "loss": 1.0}, {"step": 2, "loss": None, "reward": None}]))
    assert "no finite loss in 1 steps, such as step 2" in blank and "Reward of an episode" not in blank
    alarm = page_of(run_folder("alarm", metrics=[{"step": 7, "guard/alarm": "entropy"}]))
    assert "the collapse guard raised an alarm: entropy (step 7)" in alarm


def test_a_thousand_steps_take_less_than_two_megabytes(run_folder):
    names = ["loss", "reward", "reward_std", "kl", "entropy", "grad_norm", "learning_rate", "searches", "eval/f1"]
    names += [f"rewards/{i}/mean" for i in range(12)] + [f"time/{i}" for i in range(8)] + ["peak_memory_mib"]
    metrics = [{"step": s} | {name: s / 7 + len(name) for name in names} for s in range(1, 1001)]
    long = [episode(str(i), step, question="word " * 60) for step in (1, 1000) for i in range(64)]
    for line in long:
        line["steps"][0]["documents"] = [{"id": str(k), "title": "t", "text": "word " * 100} for k in range(10)]
    page = page_of(run_folder("a", metrics=metrics, episodes=long))
    assert 200_000 < len(page.encode()) < 2_000_000


def test_several_runs_share_charts_but_those_of_other_commands_have_their_own(run_folder):
    folders = [run_folder(name, metrics=[{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]) for name in "ab"]
    page = page_of(*folders)
    assert page.count("<h3>Loss") == 1 and 'aria-label="Loss. a: from 1 to 2; b: from 1 to 2"' in page
    # They differed by colour alone: printed in black, all were the same. Each run has a marker at both steps and in the
    # legend.
    assert [page.count(f'd="{shape}"') for shape in MARKERS[:3]] == [3, 3, 0]
    assert not any(f'd="{shape}"' in page_of(folders[0]) for shape in MARKERS)
    sft = run_folder("c", "sft", metrics=[{"step": 1, "loss": 3.0}])
    assert page_of(*folders, sft).count("<h3>Loss") == 2


def test_kinds_of_answers_and_scores_are_shown(run_folder):
    wrong = {"em": 0.0, "recall": 0.5, "prediction": "no"}
    lines = [episode("a", em=1.0, recall=1.0), episode("b", **wrong), episode("c", **wrong, finish="malformed")]
    scores = {"n": 3, "em": entry(1 / 3), "em_full_recall": entry(0.5) | {"n": 1}}
    page = page_of(run_folder("a", "evaluate", predictions=lines, scores=scores))
    rows = re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", page)
    assert {("right", "1", "33.3%"), ("malformed", "1", "33.3%")} <= set(rows)
    assert ("wrong, with some gold paragraphs found", "1", "33.3%") in rows
    assert "exact match</td><td>0.333 (0.233 to 0.433)" in page
    assert "EM, full recall</td><td>0.500 (0.400 to 0.600)" in page
    none = page_of(run_folder("b", "evaluate", predictions=lines, scores=scores | {"em_full_recall": None}))
    assert "EM, full recall" not in none


def test_a_page_that_is_watched_is_loaded_anew(run_folder):
    folder = run_folder("a", metrics=[{"step": 1, "loss": 1.0}])
    assert '<meta http-equiv="refresh" content="10">' in page_of(folder, reload_seconds=10)
    assert "refresh" not in page_of(folder)


def test_lengths_of_a_file_are_counted(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    rows = [{"id": str(i), "question": "word " * n, "answers": ["one two"]} for i, n in enumerate([3, 3, 14])]
    rows[0]["steps"] = episode()["steps"]
    path.write_text(jsonl(rows), encoding="utf-8")
    data_file = read_data(path, lambda text: len(text.split()), "words")
    assert len(data_file.sizes) == 3 and data_file.of("question") == [3, 3, 14]
    assert data_file.of("answer") == [1, 2, 2]  # that of the last step, else the first right one
    assert data_file.of("steps") == [2] and data_file.of("documents") == [4] and data_file.of("analyses") == [2]
    page = html(Report([], [data_file]), "now")
    Tags(page)
    assert "data, 3 rows" in page
    # Bins of 2 from 2 on: two rows in the first one, one in the last.
    label = re.search(r'aria-label="Questions\. ([^"]*)"', page)[1]
    assert "2+: 2" in label and "14+: 1" in label


@pytest.mark.parametrize(
    ("line", "words"), [("[]", "not a JSON object"), ('{"text": "x"}', "has no rows with a question")]
)
def test_a_file_of_something_else_is_refused(tmp_path, line, words):
    path = tmp_path / "x.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(R3LiteError, match=words):
        read_data(path, len, "words")
