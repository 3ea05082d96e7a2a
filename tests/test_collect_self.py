"""`collect --source self`: a toy that says what its episodes' own streams draw from a script; the tiny checkpoint."""

import functools
import re
import shlex

import pytest
import torch

from r3lite import collect
from r3lite.assembly import collecting
from r3lite.core.episode import Failure
from r3lite.core.files import write_jsonl
from r3lite.core.invocation import resolve
from r3lite.datasets import self_taught
from r3lite.retrieval.retriever import build_retriever
from r3lite.rollout.engine import Engine
from r3lite.settings import CollectConfig, SftConfig
from tests.cold_start import WORLD
from tests.collecting import lines, read_rows
from tests.errors import shows
from tests.evaluating import answer, ask, question, token_of

NAMES = ("Ada", "Bob", "Cy", "Dee", "Eve", "Flo")


@pytest.fixture
def teach(toy, tmp_path, monkeypatch):
    """Runs `collect --source self` on six questions in blocks of two; each episode draws which of five ways it goes.

    Two ways are right, but for Flo.
    """
    rows = []
    for number, name in enumerate(NAMES):
        text = {"idx": 0, "title": name, "paragraph_text": f"{name} lives in {name}town.", "is_supporting": True}
        hops = [{"question": "Where?", "answer": name, "paragraph_support_idx": 0}] * (1 + number % 2)
        rows.append(
            question(name, 0, "Rome" if name == "Flo" else f"{name}town")
            | {"paragraphs": [text], "question_decomposition": hops}
        )
    write_jsonl(tmp_path / "six.jsonl", rows)
    ways = {}  # of each episode, by its stream

    def sample(engine, logits, batch):
        tokens = []
        for s, depth in zip(batch.sequences, batch.depths, strict=True):
            name = s.question.id
            where, town, right = f"Where does {name} live?", f"{name}town?", f"{name}town"
            drawn = ways.setdefault(s.stream, int(5 * s.stream.peek(0)))
            turns = (
                [ask(1, where), answer(2, right)],
                [ask(1, name), ask(2, town), answer(3, right)],
                [ask(1, where), answer(2, "Oslo")],
                [answer(1, right)],
                ["Who knows?"],
            )[drawn]
            tokens.append(token_of(engine.layout.tokenizer, turns[len(s.steps)], len(s.turn) + depth))
        return torch.tensor(tokens), torch.zeros(len(tokens))

    monkeypatch.setattr(Engine, "_sample", sample)
    monkeypatch.setattr(self_taught, "BLOCK", 2)

    def teach(output, *arguments):
        data = ["--data", str(tmp_path / "six.jsonl"), "--init-prompt", "prompts/tiny/init_prompt.txt"]
        flags = ["--source", "self", "--num-generations", "4"]
        return collect.main([*toy, *data, *flags, *arguments, "--output", str(output)])

    return teach


def contents(output):
    return [output.read_bytes(), output.with_name(f"{output.name}.rejected.jsonl").read_bytes()]


def stop_at(monkeypatch, owner, name, call):
    """Presses Ctrl-C when `name` of `owner` is called for the `call`th time."""
    work, calls = getattr(owner, name), []

    def stopped(*arguments, **named):
        calls.append(arguments)
        if len(calls) == call:
            raise KeyboardInterrupt
        return work(*arguments, **named)

    monkeypatch.setattr(owner, name, stopped)


def test_right_episodes_are_kept_and_all_others_counted(tmp_path, teach, capsys):
    output = tmp_path / "own.jsonl"
    assert teach(output) == 0
    rows = read_rows(output)  # refuses what is not well-formed
    assert {row.source for row in rows} == {"self"}
    assert all(row.steps[-1].answer == f"{row.id}town" and row.steps[0].documents for row in rows)
    of_question = [[row.id for row in rows].count(name) for name in NAMES]
    assert max(of_question) == 2 and min(of_question) == 0
    rejected = {r["id"]: r["reasons"] for r in lines(tmp_path / "own.jsonl.rejected.jsonl")}
    assert [sum(rejected[name].values()) + n for name, n in zip(NAMES, of_question)] == [4] * 6
    table = capsys.readouterr().out
    assert re.search(rf"questions +6\ntrajectories kept +{len(rows)}\n", table)
    for reason in ("wrong answer", "nothing retrieved", r"malformed step \(no_step_heading\)"):
        assert re.search(rf"rejected: {reason} +\d", table)
    assert re.search(r"episodes sampled +24\n", table)
    yields = re.findall(r"yield at \d hops? +(\d+) of 3 questions \(.*\), (\d+) trajectories", table)
    assert [int(question_count) for question_count, _ in yields] == [sum(map(bool, of_question[i::2])) for i in (0, 1)]
    assert [int(trajectory_count) for _, trajectory_count in yields] == [sum(of_question[i::2]) for i in (0, 1)]


def test_a_model_that_does_not_know_the_format_is_told_what_to_do_next(tmp_path, teach, monkeypatch, capsys):
    """The error said `the table above shows why`, and no more."""

    def sample(engine, logits, batch):
        tokens = []
        for sequence, depth in zip(batch.sequences, batch.depths, strict=True):
            turn = answer(1, "Ljungby")
            if sequence.question.id == "Bob":
                turn = "Who knows?"
            tokens.append(token_of(engine.layout.tokenizer, turn, len(sequence.turn) + depth))
        return torch.tensor(tokens), torch.zeros(len(tokens))

    monkeypatch.setattr(Engine, "_sample", sample)
    example = ["--init-prompt", "prompts/init_prompt.txt", "--worked-example", "--limit", "3"]
    assert teach(tmp_path / "own.jsonl", *example) == 1
    error = capsys.readouterr().err
    copied = "answer copied from the prompt's worked example (8)"
    assert f"no trajectory was kept: {copied}, malformed step (no_step_heading) (4)" in error
    assert "Pass --adapter RUN" in error
    gold, training = [shlex.split(line) for line in error.splitlines() if "python -m" in line]
    assert gold[2] == "r3lite.collect" and training[2] == "r3lite.sft"
    settings = resolve("collect", CollectConfig(), gold[3:])
    assert (settings.collect.source, settings.data.data) == ("gold", str(tmp_path / "six.jsonl"))
    assert resolve("sft", SftConfig(), training[3:]).data.data == settings.common.output
    write_jsonl(tmp_path / "corpus.jsonl", [{"id": "1", "title": "Ada", "text": "Ada is old."}])
    corpus = ["--corpus", str(tmp_path / "corpus.jsonl"), "--encoder", "hashing"]
    assert teach(tmp_path / "other.jsonl", *example, *corpus) == 1
    error = capsys.readouterr().err
    assert f"--corpus {tmp_path / 'corpus.jsonl'} --encoder hashing" in error
    assert "--source documents --output demonstrations.jsonl" in error


def test_a_run_that_was_killed_goes_on_to_what_an_uninterrupted_one_writes(tmp_path, teach, monkeypatch, capsys):
    """Killed while a block is sampled, between its two files, in a line of either; gone on with in larger blocks."""
    uninterrupted = tmp_path / "whole.jsonl"
    output = tmp_path / "own.jsonl"
    rejected = tmp_path / "own.jsonl.rejected.jsonl"
    assert teach(uninterrupted) == 0
    table = capsys.readouterr().out.partition("written to")[0]
    with monkeypatch.context() as patched:
        stop_at(patched, Engine, "run", call=2)
        assert teach(output) == 130
    assert len(lines(rejected)) == 2 and contents(uninterrupted)[0].startswith(output.read_bytes())
    with monkeypatch.context() as patched:
        stop_at(patched, self_taught, "append_jsonl", call=2)
        assert teach(output) == 130
    assert len(lines(rejected)) == 2 and {r["id"] for r in lines(output)} > {"Ada", "Bob"}
    capsys.readouterr()
    monkeypatch.setattr(self_taught, "BLOCK", 4)
    assert teach(output) == 0
    assert contents(output) == contents(uninterrupted)
    assert capsys.readouterr().out.partition("written to")[0] == table
    for path in (rejected, output):
        rejected.write_bytes(b"".join(rejected.read_bytes().splitlines(keepends=True)[:3]))
        path.write_bytes(path.read_bytes()[:-9])
        assert teach(output) == 0
        assert contents(output) == contents(uninterrupted)
        assert f"{path}: removed the incomplete last line" in capsys.readouterr().err
    # With nothing left to do, no model is loaded.
    capsys.readouterr()
    monkeypatch.setattr(collecting, "build_engine", lambda *_, **__: pytest.fail("loaded"))
    assert teach(output) == 0
    assert contents(output) == contents(uninterrupted)
    assert capsys.readouterr().out.partition("written to")[0] == table


def test_the_tiny_checkpoint_samples_the_same_whether_it_was_killed_or_not(tmp_path, monkeypatch):
    """The prompts are those of an untrained model, so that nothing is kept: all that it said is compared."""
    monkeypatch.setattr(self_taught, "BLOCK", 2)
    arguments = ["--preset", "tiny", "--source", "self", "--data", str(WORLD / "train.jsonl"), "--limit", "4"]
    arguments += ["--num-generations", "3", "--max-new-tokens", "40", "--temperature", "1"]
    run = Engine.run
    tokens_by_seed = {}

    def heard(self, questions, seeds, retrieve, progress):
        sequences = run(self, questions, seeds, retrieve, progress)
        for seed, sequence in zip(seeds, sequences, strict=True):
            assert tokens_by_seed.setdefault(seed, sequence.tokens) == sequence.tokens
        return sequences

    monkeypatch.setattr(Engine, "run", heard)
    assert collect.main([*arguments, "--output", str(tmp_path / "whole.jsonl")]) == 1
    assert len(tokens_by_seed) == 12 and len({tuple(tokens) for tokens in tokens_by_seed.values()}) > 6
    with monkeypatch.context() as patched:
        stop_at(patched, Engine, "run", call=2)
        assert collect.main([*arguments, "--output", str(tmp_path / "own.jsonl")]) == 130
    assert collect.main([*arguments, "--output", str(tmp_path / "own.jsonl")]) == 1
    assert len(tokens_by_seed) == 12 and contents(tmp_path / "own.jsonl") == contents(tmp_path / "whole.jsonl")


def test_more_questions_are_sampled_and_other_settings_refused(tmp_path, teach, capsys):
    output = tmp_path / "own.jsonl"
    assert teach(output, "--limit", "4") == 0
    first = contents(output)
    for changed, message in (
        (["--temperature", "0.9"], "temperature (was 0.7, is 0.9)"),
        (["--max-hops", "2"], "max_hops (was"),
    ):
        assert teach(output, *changed) == 1
        assert message in capsys.readouterr().err and contents(output) == first
    assert teach(output) == 0
    assert all(content.startswith(prefix) for content, prefix in zip(contents(output), first))
    assert [r["id"] for r in lines(tmp_path / "own.jsonl.rejected.jsonl")] == list(NAMES)


def test_a_file_is_not_gone_on_with_when_what_is_read_has_changed(tmp_path, teach, capsys):
    """One file had the trajectories of two prompts, of two adapters, or of two corpora."""
    output = tmp_path / "own.jsonl"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Now: {question}", encoding="utf-8")
    assert teach(output, "--init-prompt", str(prompt), "--limit", "2") == 0
    first = contents(output)
    prompt.write_text("Then: {question}", encoding="utf-8")
    assert teach(output, "--init-prompt", str(prompt)) == 1
    assert shows(capsys.readouterr().err, "inputs-changed", "the prompts")
    assert contents(output) == first
    settings = tmp_path / "own.jsonl.config.toml"
    config_lines = settings.read_text(encoding="utf-8").splitlines()
    assert config_lines[-1].startswith("# inputs: {") and "the model of --model" in config_lines[-1]
    settings.write_text("\n".join(config_lines[:-1]), encoding="utf-8")  # as an earlier version left it
    assert teach(output, "--init-prompt", str(prompt), "--limit", "4") == 0
    prompt.write_text("Now: {question}", encoding="utf-8")
    assert teach(output, "--init-prompt", str(prompt)) == 1
    assert shows(capsys.readouterr().err, "inputs-changed", "the prompts")


def test_questions_of_an_evaluation_are_left_out_whatever_the_source(tmp_path, teach, capsys):
    dev = tmp_path / "dev.jsonl"
    held_out = tmp_path / "other.jsonl"
    rows = lines(tmp_path / "six.jsonl")
    write_jsonl(dev, rows[:3])
    write_jsonl(held_out, [{"question": "Where does dee LIVE", "answer": "?"}])
    exclude = ["--exclude", f"{dev},{held_out}"]
    gold = ["--preset", "tiny", "--data", str(tmp_path / "six.jsonl"), "--output", str(tmp_path / "gold.jsonl")]
    for main in (functools.partial(collect.main, [*gold, *exclude]), lambda: teach(tmp_path / "self.jsonl", *exclude)):
        assert main() == 0
        assert "--exclude: left out 4 of 6 questions (3 by id, 1 by text)" in capsys.readouterr().err
    assert [r["id"] for r in lines(tmp_path / "gold.jsonl")] == ["Eve"]  # Flo's answer stands in no paragraph
    assert [r["id"] for r in lines(tmp_path / "self.jsonl.rejected.jsonl")] == ["Eve", "Flo"]
    dev_bytes = dev.read_bytes()
    assert teach(dev, *exclude) == 1
    assert shows(capsys.readouterr().err, "output-is-input", "--exclude") and dev.read_bytes() == dev_bytes


def test_a_question_at_which_the_retriever_failed_is_asked_again_next_time(tmp_path, teach, monkeypatch, capsys):
    broken = {"Bob"}

    def build(setup):
        retrieve = build_retriever(setup)
        return lambda pairs: [Failure("no room") if p[0].id in broken else retrieve([p])[0] for p in pairs]

    output, rejected = tmp_path / "own.jsonl", tmp_path / "own.jsonl.rejected.jsonl"
    monkeypatch.setattr(collecting, "build_retriever", build)
    assert teach(output) == 0
    assert re.search(r"the retriever failed \(will be retried\) +1\n", capsys.readouterr().out)
    assert [r["id"] for r in lines(rejected)] == [name for name in NAMES if name != "Bob"]
    broken.clear()
    assert teach(output) == 0
    assert lines(rejected)[-1]["id"] == "Bob" and len(lines(rejected)) == 6
    broken.update(NAMES)
    assert teach(tmp_path / "none.jsonl") == 1
    assert "the retriever failed: no room" in capsys.readouterr().err


def test_greedy_episodes_of_one_question_would_all_be_the_same(tmp_path, teach, capsys):
    for temperature in ("0", "1e-6"):
        assert teach(tmp_path / "own.jsonl", "--temperature", temperature) == 2
        assert shows(capsys.readouterr().err, "greedy-samples")


def test_the_memory_of_a_3b_in_nf4_is_planned_within_4_gib(capsys):
    assert collect.main(["--source", "self", "--preset", "laptop-4gb-3b", "--dry-run"]) == 0
    peak, budget = re.search(r"peak ([\d,]+) MiB \(sample\) of a budget of ([\d,]+)", capsys.readouterr().out).groups()
    assert int(peak.replace(",", "")) < int(budget.replace(",", "")) == 4096
