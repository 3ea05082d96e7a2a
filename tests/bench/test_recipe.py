"""The whole way as one command: its stages in their order, stopped and gone on with, their cost, and what is told."""

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from bench import card_settings, headroom, recipe, recipe_page
from r3lite.core.files import read_jsonl, shipped, write_jsonl
from r3lite.core.invocation import resolve
from r3lite.datasets.qa import read_questions
from r3lite.datasets.splits import without
from r3lite.settings import PpoConfig
from tests.commands import CONFIGS, argument

# Stands in for the commands: writes what each leaves in --output, and notes that it ran. It obeys files beside it:
# `fail` has the name of an output at which it fails, `stop` of one at which it has the bench stopped by SIGTERM, `none`
# of one for which no trajectory is kept.
STUB = """
import json, os, signal, sys, time
from pathlib import Path
here, (command, *words) = Path(__file__).parent, sys.argv[1:]
output = Path(words[words.index("--output") + 1])
with (here / "ran.jsonl").open("a") as file:
    file.write(json.dumps([command, *words]) + "\\n")
def told(name):
    return (here / name).exists() and (here / name).read_text() == output.name
if told("fail"):
    sys.exit(1)
if told("stop"):
    (here / "stop").unlink()
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
def write(name, *rows):
    output.mkdir(parents=True, exist_ok=True)
    (output / name).write_text("".join(json.dumps(row) + "\\n" for row in rows))
em = {"value": 0.25, "low": 0.125, "high": 0.5}
def lines(flag):
    files = words[words.index(flag) + 1].split(",")
    return [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
if command == "collect":
    excluded = {row["question"] for row in lines("--exclude")}
    rows = [row for row in lines("--data") if row["question"] not in excluded]
    rejected = [{"id": row["id"], "reasons": {}} for row in rows]
    output.with_name(output.name + ".rejected.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rejected))
    output.write_text("" if told("none") else "".join(json.dumps(row) + "\\n" for row in rows))
    sys.exit(told("none"))
elif command == "export":
    write("adapter_config.json", {})
elif "--compare" in words:
    write("comparison.json", {"metrics": {"em": {"difference": 0.125, "low": -0.25, "high": 0.375, "p": 0.5}}})
elif command == "evaluate":
    write("scores.json", {"n": 8, "em": em, "f1": em, "finish": {"answered": 8}})
    write("predictions.jsonl", {"reasoning_tokens": 30.0}, {"reasoning_tokens": 12.0})
else:
    write("metrics.jsonl", {"step": 6, "num_tokens": 100}, {"step": 7, "num_tokens": 250})
    write("summary.json", {})
"""


@pytest.fixture
def way(tmp_path, monkeypatch):
    """Runs the bench with the stub; what it returns are the exit status and the stages that ran, by their outputs."""
    (tmp_path / "stub.py").write_text(STUB)
    stub = [sys.executable, str(tmp_path / "stub.py")]
    monkeypatch.setattr(recipe.Stage, "command_line", lambda stage: [*stub, stage.command, *stage.arguments])
    monkeypatch.setattr(recipe, "POLL_SECONDS", 0.01)
    handler = signal.getsignal(signal.SIGTERM)
    for name, rows in (("train", TRAIN), ("dev", ("Dan", "Bo"))):
        questions = [{"id": row, "question": f"Who is {row}?", "answer": row} for row in rows]
        write_jsonl(tmp_path / f"{name}.jsonl", questions)
    files = f"{tmp_path / 'train.jsonl'},{tmp_path / 'dev.jsonl'}"
    places = ["--output", str(tmp_path / "way"), "--results", str(tmp_path / "results")]

    def run(*arguments, sets=("one",), weight=""):
        (tmp_path / "ran.jsonl").unlink(missing_ok=True)
        named = [word for name in sets for word in ("--set", f"{name}={files}{weight}")]
        status = recipe.main([*named, *places, "--model", "tiny", "--encoder", "hashing", *arguments])
        return status, [Path(words[words.index("--output") + 1]).name for words in ran(tmp_path)]

    yield run
    signal.signal(signal.SIGTERM, handler)


def ran(folder: Path) -> list[list[str]]:
    path = folder / "ran.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def recorded_runs(folder: Path) -> list[dict]:
    return json.loads((folder / "results" / "recipe.json").read_text())["runs"]


def evaluated(label: str) -> list[str]:
    """The outputs of the evaluation of a model after the cold start."""
    return [f"evaluate-{label}-one", f"compare-{label}-one", f"over-sft-{label}-one"]


TRAIN = ("Al", "Bo", "Cy", "Di", "Ed", "Flo")  # with seed 0 Ed alone is of half 1; Bo is in the dev file
ROOT = Path(recipe.__file__).parent.parent
COMMANDS_OF_THE_PAGE = re.findall(r"^python -m (\S+) (.*)$", (ROOT / "docs" / "recipe.md").read_text("utf-8"), re.M)
COLD = [
    *("evaluate-rag-one", "evaluate-gold-one", "compare-gold-one", "gold-one.jsonl"),
    *("sft", "evaluate-sft-one", "compare-sft-one"),
]
SELF = [
    *("half1", *evaluated("half1"), "half2", *evaluated("half2")),
    *("own-self-half1-one.jsonl", "own-self-half2-one.jsonl"),
    *("self", *evaluated("self"), "self-control", *evaluated("self-control")),
]
SHORT = ("--baselines", "rag", "gold")


def test_the_stages_of_the_whole_way_in_their_order(way, tmp_path):
    status, outputs = way(*SHORT, "--then", "self", "rl", "--limit", "8")
    rl = ["half1-rl", *evaluated("half1-rl")]
    assert status == 0 and outputs == [*COLD, *SELF, *rl]
    words = dict(zip(outputs, ran(tmp_path), strict=True))
    rag, gold, over, collect, sft, cold = ran(tmp_path)[:6]
    folder = tmp_path / "way"
    assert (argument(rag, "--baseline"), argument(gold, "--baseline"), argument(rag, "--limit")) == ("rag", "gold", "8")
    assert over[2:4] == [str(folder / "evaluate-rag-one"), str(folder / "evaluate-gold-one")]
    assert (argument(collect, "--source"), argument(collect, "--exclude")) == ("gold", str(tmp_path / "dev.jsonl"))
    assert argument(cold, "--adapter") == str(folder / "sft")
    with_cold = words["over-sft-self-one"]
    assert with_cold[2:4] == [str(folder / "evaluate-sft-one"), str(folder / "evaluate-self-one")]
    assert argument(sft, "--sources") == f"{folder / 'gold-one.jsonl'}=1"
    assert argument(words["half1"], "--sources") == f"{folder / 'gold-one-half1.jsonl'}=1"
    assert argument(words["half1-rl"], "--adapter") == str(folder / "half1")
    assert argument(words["evaluate-half1-rl-one"], "--adapter") == str(folder / "half1-rl")
    trained = [words[label] for label in ("sft", "half1", "half2", "self", "self-control", "half1-rl")]
    assert {argument(line, "--resume") for line in trained} == {"auto"}
    sampling = [rag, collect, words["own-self-half1-one.jsonl"]]
    assert {argument(line, "--preset") for line in [*trained, *sampling]} == {"hotpotqa"}


def test_plain_rag_is_evaluated_before_what_is_compared_with_it(way):
    """With `--baselines gold rag`, gold was compared with an evaluation that did not exist yet."""
    status, outputs = way("--baselines", "gold", "rag")
    assert (status, outputs) == (0, COLD)


def self_questions(words: list[str]) -> set[str]:
    """The questions of a `collect`: those of its file that stand in no file of --exclude."""
    files = argument(words, "--exclude").split(",")
    return {q.text for q in without(read_questions(argument(words, "--data")), files)}


def test_the_self_round_samples_no_question_with_the_adapter_that_learned_it(way, tmp_path):
    """It sampled the questions that were left over, for which no demonstration could be made."""
    _, outputs = way("--baselines", "--then", "self", sets=("one", "two"))
    words = dict(zip(outputs, ran(tmp_path), strict=True))
    for name in ("one", "two"):
        for half, other_half in (("half1", "half2"), ("half2", "half1")):
            sample = words[f"own-self-{half}-{name}.jsonl"]
            assert argument(sample, "--adapter") == str(tmp_path / "way" / other_half)
            assert (argument(sample, "--source"), argument(sample, "--num-generations")) == ("self", "4")
            assert self_questions(sample) == sft_questions(words[half]) != set()
            assert not self_questions(sample) & sft_questions(words[other_half])
    questions = {f"Who is {name}?" for name in TRAIN} - {"Who is Bo?"}
    assert sft_questions(words["half1"]) | sft_questions(words["half2"]) == questions


def test_the_files_of_a_set_share_its_weight_by_their_numbers_of_rows(way, tmp_path):
    """Of five questions one is of half 1: it has a tenth of the rows, and as large a share."""
    _, outputs = way("--baselines", "--then", "self", weight=",3")
    words = dict(zip(outputs, ran(tmp_path), strict=True))
    folder = tmp_path / "way"
    shares = {"gold-one": "1.5", "own-self-half1-one": "0.3", "own-self-half2-one": "1.2"}
    assert argument(words["self"], "--sources") == ",".join(f"{folder / name}.jsonl={w}" for name, w in shares.items())
    assert "--adapter" not in words["self"]  # from the base


def test_a_half_of_which_no_sample_is_right_is_left_out(way, tmp_path):
    """`collect` fails then, although nothing is wrong; it does as well if it was stopped before the first right one."""
    (tmp_path / "none").write_text("own-self-half1-one.jsonl")
    status, outputs = way("--baselines", "--then", "self", weight=",3")
    assert status == 0
    sources = argument(dict(zip(outputs, ran(tmp_path), strict=True))["self"], "--sources")
    assert sources.replace(str(tmp_path / "way"), "") == "/gold-one.jsonl=1.66667,/own-self-half2-one.jsonl=1.33333"
    assert way("--baselines", "--then", "self", weight=",3") == (0, [])


def test_samples_of_some_questions_of_which_none_is_right_are_not_all(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"id": row, "question": f"Who is {row}?", "answer": row} for row in TRAIN])
    output = tmp_path / "samples.jsonl"
    arguments = ["--source", "self", "--data", str(tmp_path / "train.jsonl"), "--output", str(output)]
    stage = recipe.Stage("samples", "collect", arguments, output, grows=True)
    assert not stage.is_empty()
    output.write_text("")
    for count, empty in ((5, False), (6, True)):
        rejected = [{"id": row, "reasons": {"wrong answer": 4}} for row in TRAIN[:count]]
        write_jsonl(tmp_path / "samples.jsonl.rejected.jsonl", rejected)
        assert stage.is_empty() is empty


def test_the_control_of_the_self_round_takes_as_many_steps_on_gold_alone(way, tmp_path):
    flags = ["--flags", "sft=--epochs 2 --max-length 900"]
    _, outputs = way("--baselines", "--then", "self", *flags)
    words = dict(zip(outputs, ran(tmp_path), strict=True))
    control, cold = words["self-control"], words["sft"]
    assert argument(control, "--sources") == argument(cold, "--sources")
    assert (argument(control, "--max-steps"), argument(control, "--max-length")) == ("7", "900")
    # sft refuses both.
    assert "--epochs" not in control and argument(words["self"], "--epochs") == argument(cold, "--epochs") == "2"
    assert {"over-sft-self-control-one", "evaluate-self-control-one"} <= set(outputs)


def rl_questions(words: list[str]) -> set[str]:
    """The questions of a `ppo`: those of its sources that stand in no file of --exclude."""
    config = resolve("ppo", PpoConfig(), ["--config", argument(words, "--config")])
    files = argument(words, "--exclude").split(",")
    return {q.text for entry in config.mixture.sources for q in without(read_questions(entry["file"]), files)}


def sft_questions(words: list[str]) -> set[str]:
    """The questions of the trajectories of an `sft`."""
    files = [entry.rpartition("=")[0] for entry in argument(words, "--sources").split(",")]
    return {row.text("question") for file in files for row in read_jsonl(Path(file))}


def test_reinforcement_learning_asks_no_question_of_a_dev_file_or_of_its_demonstrations(way, tmp_path):
    """A model that was trained on a question may answer it from memory, and RL made that a habit. Only the questions
    without a demonstration were left to it then: those that no search answers."""
    assert way("--baselines", "--then", "rl", "--cross-fit", sets=("one", "two"), weight=",2.5")[0] == 0
    cold, half1, half2 = (words for words in ran(tmp_path) if words[0] == "sft")
    rl1, rl2 = (words for words in ran(tmp_path) if words[0] == "ppo")
    gold = [tmp_path / "way" / f"gold-{name}.jsonl" for name in ("one", "two")]
    assert argument(cold, "--sources") == ",".join(f"{path}=2.5" for path in gold)
    config = resolve("ppo", PpoConfig(), ["--config", argument(rl1, "--config")])
    assert [(s["name"], s["file"], s["weight"], s["type"]) for s in config.mixture.sources] == [
        (name, str(tmp_path / "train.jsonl"), 1.0, "qa") for name in ("one", "two")
    ]
    train = {f"Who is {name}?" for name in TRAIN} - {"Who is Bo?"}
    for taught, reinforced in ((half1, rl1), (half2, rl2)):
        assert argument(reinforced, "--adapter") == argument(taught, "--output")
        assert (
            sft_questions(taught) and rl_questions(reinforced) and not sft_questions(taught) & rl_questions(reinforced)
        )
        assert rl_questions(reinforced) == train - sft_questions(taught)
    assert sft_questions(half1) | sft_questions(half2) == sft_questions(cold) == train


def test_cross_fitting_ends_with_the_mean_of_both_adapters(way, tmp_path):
    labels = ["half1", "half1-rl", "half2", "half2-rl", "rl-mean"]
    outputs = [[label, f"evaluate-{label}-one", f"over-sft-{label}-one"] for label in labels]
    stages = ["--baselines", "--then", "rl"]
    assert way(*stages) == (0, ["gold-one.jsonl", "sft", "evaluate-sft-one", *outputs[0], *outputs[1]])
    assert way(*stages, "--cross-fit") == (0, [*outputs[2], *outputs[3], *outputs[4]])
    export, last, _ = ran(tmp_path)[-3:]
    folder = tmp_path / "way"
    assert export[0] == "export" and "--adapter" not in export
    assert argument(export, "--average") == f"{folder / 'half1-rl'},{folder / 'half2-rl'}"
    assert argument(last, "--adapter") == argument(export, "--output") == str(folder / "rl-mean")
    assert [score["model"] for score in recorded_runs(tmp_path)[0]["scores"]] == ["sft", *labels]
    assert way(*stages, "--cross-fit") == (0, [])


def test_the_self_round_and_reinforcement_learning_share_the_adapters_of_the_halves(way, tmp_path):
    halves = ["half1", "half2"]
    for stages, labels in (
        (["self", "rag-sft", "rl"], [*halves, "self", "self-control", "rag-sft", "half1-rl", "half2-rl", "rl-mean"]),
        (["rl", "self"], ["half1", "half1-rl", "half2", "half2-rl", "rl-mean", "self", "self-control"]),
    ):
        settings, _ = recipe.parse(["--set", "a=b,c", "--then", *stages, "--cross-fit"], "")
        assert settings.labels() == ["sft", *labels]
    assert way("--baselines", "--then", "rl", "--cross-fit")[0] == 0
    _, outputs = way("--baselines", "--then", "rl", "self", "--cross-fit")
    assert outputs[:3] == ["own-self-half1-one.jsonl", "own-self-half2-one.jsonl", "self"]


def test_halves_are_the_same_in_all_files_and_differ_by_seed():
    questions = [f"Who directed film {i}?" for i in range(400)]
    first = [recipe.half_of(question, 0) for question in questions]
    assert set(first) == {1, 2} and 150 < first.count(1) < 250
    assert [recipe.half_of(f" who directed THE film  {i}", 0) for i in range(400)] == first
    assert 100 < sum(recipe.half_of(q, 1) == half for q, half in zip(questions, first)) < 300


def test_plain_rag_is_fine_tuned_and_asked_as_it_was_trained(way, tmp_path):
    flags = ["collect=--limit 4", "rag=--max-document-tokens 90", "sft=--epochs 2", "rag-sft=--learning-rate 1e-4"]
    status, outputs = way("--baselines", "rag", "--then", "rag-sft", "--flags", *flags)
    assert status == 0 and outputs[-5:] == ["rag-one.jsonl", "rag-sft", *evaluated("rag-sft")]
    rag, _, cold, *_ = ran(tmp_path)
    collect, sft, evaluate, over_rag, over_cold = ran(tmp_path)[-5:]
    folder = tmp_path / "way"
    for words in (rag, collect, evaluate):
        settings = [argument(words, flag) for flag in ("--baseline", "--top-k", "--max-document-tokens", "--model")]
        assert settings == ["rag", "5", "90", "tiny"]
    assert (argument(collect, "--exclude"), argument(collect, "--limit")) == (str(tmp_path / "dev.jsonl"), "4")
    assert argument(sft, "--sources") == f"{folder / 'rag-one.jsonl'}=1" and "--adapter" not in sft
    assert (argument(sft, "--epochs"), argument(sft, "--learning-rate")) == ("2", "1e-4")
    assert argument(evaluate, "--adapter") == str(folder / "rag-sft")
    assert over_rag[2:4] == [str(folder / f"evaluate-{label}-one") for label in ("rag", "rag-sft")]
    assert over_cold[2:4] == [str(folder / f"evaluate-{label}-one") for label in ("sft", "rag-sft")]
    assert cold[0] == "sft" and "--learning-rate" not in cold
    page = (tmp_path / "results" / "recipe.md").read_text()
    assert "| plain RAG, fine-tuned | 0.250 (0.125 to 0.500) |" in page and "one, over cold start" in page


def test_a_way_that_was_stopped_goes_on_and_is_one_run(way, tmp_path, capsys):
    (tmp_path / "stop").write_text("sft")
    assert way(*SHORT) == (143, COLD[:5])
    (run,) = recorded_runs(tmp_path)
    assert (run["complete"], run["stopped"]) == (False, "interrupted") and len(run["scores"]) == 2
    assert "**Not complete**: interrupted." in (tmp_path / "results" / "recipe.md").read_text()
    first = {stage["stage"]: stage for stage in run["stages"]}["sft"]
    assert first["starts"] == 1 and first["seconds"] < 30  # it was ended, not waited for
    assert way(*SHORT) == (0, COLD[4:])
    (run,) = recorded_runs(tmp_path)
    stage = {stage["stage"]: stage for stage in run["stages"]}["sft"]
    assert run["complete"] and (stage["starts"], stage["tokens"], stage["steps"]) == (2, 250, 7)
    assert stage["seconds"] > first["seconds"] and stage["complete"] and len(stage["commits"]) == 1
    assert way(*SHORT) == (0, []) and len(recorded_runs(tmp_path)) == 1
    assert way(*SHORT, "--then", "self") == (0, SELF)
    labels = ["rag", "gold", "sft", "half1", "half2", "self", "self-control"]
    assert [score["model"] for score in recorded_runs(tmp_path)[0]["scores"]] == labels


def test_a_stage_that_fails_ends_the_way_and_is_named(way, tmp_path, capsys):
    (tmp_path / "fail").write_text("gold-one.jsonl")
    assert way(*SHORT) == (1, COLD[:4])
    assert "the stage gold-one failed with status 1" in capsys.readouterr().err
    assert recorded_runs(tmp_path)[0]["stopped"] == "the stage gold-one failed with status 1"
    (tmp_path / "fail").unlink()
    assert way(*SHORT) == (0, COLD[3:]) and recorded_runs(tmp_path)[0]["complete"]


def test_trajectories_of_the_model_that_a_killed_run_left_are_gone_on_with(way, tmp_path):
    """They are written a block at a time: that the file is there does not say that it is whole."""
    (tmp_path / "stop").write_text("own-self-half1-one.jsonl")
    assert way(*SHORT, "--then", "self")[0] == 143
    (tmp_path / "way" / "own-self-half1-one.jsonl").write_text('{"id": "half"}\n')
    assert way(*SHORT, "--then", "self")[1][0] == "own-self-half1-one.jsonl"
    assert way(*SHORT, "--then", "self") == (0, [])


def test_other_settings_are_another_way(way, tmp_path, capsys):
    assert way(*SHORT)[0] == 0
    assert way(*SHORT, "--seed", "1") == (1, [])
    assert "holds a way with other settings: seed (was 0, is 1)" in capsys.readouterr().err
    assert len(recorded_runs(tmp_path)) == 1


def test_the_untrained_model_is_asked_in_steps(way, tmp_path):
    assert way("--baselines", "untrained")[1][0] == "evaluate-untrained-one"
    assert not {"--baseline", "--adapter"} & set(ran(tmp_path)[0])
    assert "| r3lite's steps without training |" in (tmp_path / "results" / "recipe.md").read_text()


def test_flags_may_be_added_for_stages_that_did_not_begin(way, tmp_path, capsys):
    assert way(*SHORT)[0] == 0
    assert way(*SHORT, "--then", "rl", "--flags", "ppo=--max-steps 3")[1][4] == "half1-rl"
    assert argument(ran(tmp_path)[4], "--max-steps") == "3"
    assert way(*SHORT, "--then", "rl", "--flags", "ppo=--max-steps 3", "sft=--epochs 2") == (1, [])
    assert "the stage sft was begun with other flags" in capsys.readouterr().err


def test_flags_reach_the_stages_that_they_are_for(way, tmp_path):
    assert way(*SHORT, "--then", "self", "--flags", "rag=--top-k 5", "self=--keep 1", "evaluate=--max-hops 2")[0] == 0
    with_flag = [[Path(argument(w, "--output")).name for w in ran(tmp_path) if f in w] for f in ("--top-k", "--keep")]
    assert with_flag == [["evaluate-rag-one"], ["own-self-half1-one.jsonl", "own-self-half2-one.jsonl"]]
    assert sum("--max-hops" in words for words in ran(tmp_path)) == 7


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "one=train.jsonl"], "--set one: write it as NAME=TRAIN,DEV"),
        (["--set", "a=b,c,much"], "--set: a weight is a number"),
        (["--set", "a/b=train.jsonl,dev.jsonl"], "--set a/b: write it as"),
        (["--set", "a=b,c", "--flags", "stf=--epochs 2"], "--flags stf: write it as KIND=FLAGS"),
        (["--set", "a=b,c", "--then", "rl", "self", "rl"], "--then has rl twice"),
        (["--set", "a=b,c", "--then", "self", "rl", "self"], "--then has self twice"),
        (["--set", "a=b,c", "--then", "self", "--cross-fit"], "--cross-fit works only with --then rl"),
    ],
)
def test_arguments_that_are_wrong_are_named(capsys, arguments, says):
    with pytest.raises(SystemExit):
        recipe.main(arguments)
    assert says in capsys.readouterr().err


def test_what_is_recorded_and_shown(way, tmp_path, capsys):
    assert way(*SHORT, "--model-name", "Small", "--flags", "sft=--epochs 2", sets=("one", "two"))[0] == 0
    (run,) = recorded_runs(tmp_path)
    assert run["section"] == "way: Small, seed 0" and run["sets"]["two"] == ["train.jsonl", "dev.jsonl"]
    assert run["preset_values"]["top_k"] == 3 and run["flags"] == {"sft": "--epochs 2"}
    assert {"commit", "threads", "precision", "processor", "date"} <= run.keys()
    assert str(tmp_path) not in json.dumps(run | {"stages": []})
    stages = {stage["stage"]: stage for stage in run["stages"]}
    assert stages["evaluate-rag-one"]["tokens"] == 42 and stages["gold-one"]["trajectories"] == 5
    assert 1 < stages["sft"]["peak_mib"] < 100_000
    stdout = capsys.readouterr().out
    em, over = "0.250 (0.125 to 0.500)", "+0.125 (-0.250 to +0.375)"
    assert f"| plain RAG | {em} | {em} | 0.250 |  |  |" in stdout
    assert f"| cold start | {em} | {em} | 0.250 | {over} | {over} |" in stdout
    page = (tmp_path / "results" / "recipe.md").read_text()
    assert stdout.strip().splitlines()[-1] in page and "Flags: sft: `--epochs 2`." in page
    titles = {
        "self": "self round",
        "self-control": "cold start, with the steps of the self round",
        "half2-rl": "cold start on half 2, then reinforcement learning",
        "rl-mean": "reinforcement learning, then mean of both halves",
        "rag-sft": "plain RAG, fine-tuned",
    }
    assert {label: recipe_page.title(label) for label in titles} == titles


def test_the_page_has_commands_of_every_stage():
    """Without any, nothing of the page would be tested."""
    stages = {f"r3lite.{name}" for name in ("prepare", "collect", "sft", "ppo", "evaluate")}
    benches = {f"bench.{name}" for name in ("headroom", "recipe", "card")}
    assert {module for module, _ in COMMANDS_OF_THE_PAGE} == stages | benches


@pytest.mark.parametrize(("module", "words"), COMMANDS_OF_THE_PAGE)
def test_every_command_of_the_page_is_understood(module, words):
    if module == "bench.recipe":
        settings, _ = recipe.parse(shlex.split(words), "")
        assert (settings.then, settings.model) == (("rag-sft", "rl"), "Qwen/Qwen2.5-0.5B-Instruct")
        return
    if module == "bench.card":
        settings, _ = card_settings.parse(shlex.split(words), "")
        assert (list(settings.adapters), settings.minutes, settings.limit) == ([0, 1], 8.0, 400)
        return
    if module == "bench.headroom":
        config, _ = headroom.parse(shlex.split(words))
        assert (config.rl.num_generations, config.sampling.temperature) == (8, 0.7)
        return
    name = module.removeprefix("r3lite.")
    resolve(name, CONFIGS[name][0], shlex.split(words))


@pytest.mark.slow
def test_the_commands_themselves_take_what_they_are_given(tmp_path, capsys):
    world = shipped("data", "world")
    rows = [row.values for row in read_jsonl(world / "train.jsonl")]
    write_jsonl(tmp_path / "train.jsonl", rows[:12])
    write_jsonl(tmp_path / "dev.jsonl", rows[11:15])
    sets = ["--set", f"world={tmp_path / 'train.jsonl'},{tmp_path / 'dev.jsonl'}"]
    stage_flags = [
        "collect=--limit 8",
        "sft=--max-steps 2",
        "self=--num-generations 2",
        "ppo=--max-steps 1 --batch-size 2 --num-generations 2 --algorithm grpo",
    ]
    places = ["--output", str(tmp_path / "way"), "--results", str(tmp_path / "results")]
    arguments = [*sets, "--preset", "tiny", "--dtype", "fp32", "--baselines", "rag"]
    arguments += ["--then", "rag-sft", "self", "rl", "--cross-fit"]
    handler = signal.getsignal(signal.SIGTERM)
    assert recipe.main([*arguments, "--flags", *stage_flags, *places]) == 0
    signal.signal(signal.SIGTERM, handler)
    (run,) = recorded_runs(tmp_path)
    assert run["complete"] and run["model"] == "tiny" and [s["n"] for s in run["scores"]] == [4] * 10
    trajectories = {s["stage"]: s.get("trajectories") for s in run["stages"]}
    assert trajectories["gold-world"] == trajectories["rag-world"] == 8
    trained = ("sft", "rag-sft", "half1", "half1-rl", "half2", "half2-rl", "self", "self-control")
    tokens = {s["stage"]: s.get("tokens") for s in run["stages"]}
    assert all(tokens[label] for label in trained)
    assert "over_sft" in run["scores"][-1] and run["scores"][-1]["model"] == "rl-mean"
