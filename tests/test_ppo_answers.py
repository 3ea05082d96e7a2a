"""`ppo --learn answer` on the tiny checkpoint: contexts, their ends, what is refused, exact resuming."""

import json
from pathlib import Path

import pytest

from r3lite import ppo
from r3lite.assembly.answer_round import check
from r3lite.core.config import UsageError
from r3lite.core.files import shipped
from r3lite.core.invocation import resolve
from r3lite.memory import workloads
from r3lite.settings import PpoConfig
from tests.cold_start import assert_same_runs, logged

WORLD = shipped("data", "world")
SIZES = "--batch-size 4 --num-generations 6 --mini-batch-size 24 --micro-batch-size 4 --max-steps 3 --save-every 1"


def arguments(cold: Path, output: Path, *extra_flags: str) -> list[str]:
    """Three rounds of at most four contexts with six ends each. Each query gets the gold paragraphs."""
    data = ["--data", str(WORLD / "train.jsonl"), "--limit", "40", "--retriever", "golden"]
    data += ["--max-new-tokens", "64", "--temperature", "0.8"]
    answers = ["--learn", "answer", "--algorithm", "dr-grpo", "--adapter", str(cold / "sft"), "--output", str(output)]
    return ["--preset", "tiny", *SIZES.split(), *data, *answers, *extra_flags]


@pytest.fixture(scope="module")
def finished(cold):
    """An uninterrupted run."""
    assert ppo.main(arguments(cold, cold / "answers")) == 0
    return cold / "answers"


def test_the_ends_of_a_context_differ_in_their_last_step_alone(finished):
    episodes = logged(finished, "episodes.jsonl")
    assert {episode["step"] for episode in episodes} == {1, 2, 3}
    contexts = [episodes[i : i + 6] for i in range(0, len(episodes), 6)]
    for ends in contexts:
        earlier = [end["steps"][:-1] for end in ends]
        assert all(steps == earlier[0] for steps in earlier)
    assert any(len({json.dumps(end["steps"][-1]) for end in ends}) > 1 for ends in contexts)


def test_every_context_has_all_gold_paragraphs_and_exact_match_alone_is_paid(finished):
    for episode in logged(finished, "episodes.jsonl"):
        if episode["finish"] == "searching":
            assert episode["rewards"] is None
        else:
            assert episode["rewards"]["recall"] == 1.0
            assert sum(episode["step_rewards"]) == episode["rewards"]["em"]


def test_groups_without_variance_are_left_out(finished):
    episodes = logged(finished, "episodes.jsonl")
    for start in range(0, len(episodes), 6):
        ends = episodes[start : start + 6]
        rewards = {end["rewards"]["em"] for end in ends if end["rewards"]}
        assert [end["learned"] for end in ends] == [len(rewards) == 2] * 6


def test_metrics_say_what_contexts_and_ends_do(finished):
    records = logged(finished, "metrics.jsonl")
    for record in records:
        assert 0 < record["contexts/full_recall"] <= record["contexts/recall"] <= 1
        assert record["contexts/episodes"] >= 4
        assert 0 <= record["ends/searching_ratio"] <= 1
        assert record["completions/mean_length"] <= 64  # tokens of one turn, and not of an episode
        assert record["searches"] > 0
        assert ("grad_norm" in record) == (record["groups/mixed"] > 0)  # else there is nothing to learn from
        assert ("grad_norm" in record) == (record["contexts/zero_std"] < 1)
    assert any("grad_norm" in record for record in records)


def test_stopped_and_resumed_equals_uninterrupted(finished, cold, tmp_path):
    run = arguments(cold, tmp_path / "run")
    assert ppo.main([*run, "--stop-after", "2"]) == 0
    assert ppo.main([*run, "--resume", "auto"]) == 0
    assert_same_runs(finished, tmp_path / "run", total=3)


def config_of(*flags: str) -> PpoConfig:
    return resolve("ppo", PpoConfig(), ["--data", "x.jsonl", *flags])


def test_the_presets_other_rewards_go_with_the_choice():
    reward = config_of("--preset", "hotpotqa", "--learn", "answer").reward
    assert (reward.outcome_em, reward.outcome_f1, reward.process_recall, reward.format_reward) == (1.0, 0.0, 0.0, 0.0)
    check(config_of("--preset", "hotpotqa", "--learn", "answer"))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--algorithm", "ppo"], "ppo cannot"),
        (["--algorithm", "reinforce++"], "reinforce++ cannot"),
        (["--algorithm", "luffy", "--traces", "t.jsonl"], "luffy cannot"),
        (["--algorithm", "exgrpo"], "exgrpo cannot"),
        (["--algorithm", "dgpo", "--teacher", "tiny"], "dgpo cannot"),
        (["--algorithm", "grpo", "--expand-limit", "2"], "--expand-limit 0"),
        (["--algorithm", "dapo"], "--refill-limit 0"),
        (["--algorithm", "grpo", "--retriever", "none"], "--retriever is none"),
        (["--algorithm", "grpo", "--format", "solution"], "--format that searches"),
        (["--algorithm", "grpo", "--rollout-server", "http://a:1"], "--rollout-server"),
        (["--algorithm", "grpo", "--process-recall", "0.1"], "remove --process-recall"),
        (["--algorithm", "grpo", "--format-reward", "0.1"], "remove --format-reward"),
        (["--algorithm", "grpo", "--outcome-f1", "0.1"], "remove --outcome-f1"),
        (["--algorithm", "grpo", "--rewards", "conciseness=1"], "remove --rewards"),
        (["--algorithm", "grpo", "--outcome-em", "0"], "--outcome-em above 0"),
    ],
)
def test_what_makes_no_sense_beside_it_is_refused(flags, named):
    with pytest.raises(UsageError, match=named.replace("+", r"\+")):
        check(config_of("--learn", "answer", *flags))


def test_questions_without_gold_paragraphs_are_an_error_with_its_remedy(cold, tmp_path, capsys):
    data = tmp_path / "plain.jsonl"
    data.write_text('{"id": "1", "question": "Who?", "answer": "Ann"}\n', encoding="utf-8")
    search = ["--retriever", "semantic", "--index", str(cold / "index"), "--data", str(data)]
    assert ppo.main(arguments(cold, tmp_path / "run", *search)) == 1
    assert "1 of 1 questions have none" in capsys.readouterr().err


def test_a_round_without_a_context_says_so(cold, tmp_path, capsys):
    """A corpus without the gold paragraphs: 64 questions are drawn, not for ever."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "x", "title": "Nothing", "text": "Nothing is here."}\n', encoding="utf-8")
    assert ppo.main(arguments(cold, tmp_path / "run", "--retriever", "semantic", "--corpus", str(corpus))) == 1
    assert "none of 64 episodes retrieved every gold paragraph" in capsys.readouterr().err


def test_the_plan_knows_that_only_a_turn_is_sampled_and_the_rest_is_shared():
    flags = [
        "--model",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "--learn",
        "answer",
        "--algorithm",
        "grpo",
        "--max-length",
        "1000",
    ]
    config = config_of(*flags, "--max-new-tokens", "100", "--batch-size", "3", "--num-generations", "5")
    work = workloads.rl_workload(config, critic=False)
    assert (work.episodes, work.writes, work.shared, work.reads) == (15, 100, 900, 900)
    assert (work.contexts.episodes, work.contexts.trains) == (3, False)
