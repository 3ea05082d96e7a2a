"""`ppo --learn turn` on the tiny checkpoint: its contexts, what is rewarded, what is refused, exact resuming."""

import json
from pathlib import Path

import pytest

from r3lite import ppo
from r3lite.assembly.answer_round import check
from r3lite.assembly.turn_round import TurnSampler
from r3lite.core.config import UsageError
from r3lite.core.episode import ANSWERED, SEARCHING, Document, Failure, Question, Step
from r3lite.core.files import shipped
from r3lite.core.invocation import resolve
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms
from r3lite.settings import PpoConfig
from tests.cold_start import logged, same

WORLD = shipped("data", "world")
ENDS = 4


def arguments(cold: Path, output: Path) -> list[str]:
    """Two rounds of six contexts with four ends each."""
    sizes = f"--batch-size 6 --num-generations {ENDS} --mini-batch-size 24 --max-steps 2 --save-every 1"
    data = [
        "--data",
        str(WORLD / "train.jsonl"),
        "--index",
        str(cold / "index"),
        "--contexts",
        str(cold / "rows.jsonl"),
    ]
    turns = ["--learn", "turn", "--algorithm", "dr-grpo", "--adapter", str(cold / "sft"), "--output", str(output)]
    return ["--preset", "tiny", "--dtype", "fp32", *sizes.split(), *data, *turns]


@pytest.fixture(scope="module")
def finished(cold):
    """An uninterrupted run."""
    assert ppo.main(arguments(cold, cold / "turns")) == 0
    return cold / "turns"


def test_contexts_are_beginnings_of_demonstrations(finished, cold):
    demonstrated = {}
    for line in (cold / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        demonstrated[row["id"]] = [(step["analysis"], step.get("query")) for step in row["steps"]]
    lengths = set()
    for episode in logged(finished, "episodes.jsonl"):
        context = [(step["analysis"], step.get("query")) for step in episode["steps"][:-1]]
        demonstration = demonstrated[episode["id"]]
        assert context == demonstration[: len(context)]
        lengths.add((len(context), len(demonstration)))
    assert any(length + 1 < of_demonstration for length, of_demonstration in lengths)
    assert any(length + 1 == of_demonstration for length, of_demonstration in lengths)


def test_a_query_is_rewarded_as_long_as_a_gold_paragraph_is_missing_and_then_the_answer(finished):
    rewarded = {"query": 0, "answer": 0}
    for episode in logged(finished, "episodes.jsonl"):
        rewards = episode["rewards"]
        assert sum(episode["step_rewards"]) == rewards["process"] + rewards["outcome"]
        assert not any(episode["step_rewards"][:-1])
        if rewards["recall"] == 1:
            assert rewards["process"] == 0 and rewards["outcome"] == rewards["em"]
            if episode["finish"] == "searching":
                assert rewards["outcome"] == 0
            rewarded["answer"] += bool(rewards["outcome"])
        else:
            assert rewards["outcome"] == 0
            if rewards["process"]:
                assert rewards["process"] == 1 and episode["finish"] == "searching"
                rewarded["query"] += 1
    assert rewarded["query"] and rewarded["answer"]


def test_metrics_say_how_often_a_query_finds_what_is_missing(finished):
    episodes = logged(finished, "episodes.jsonl")
    records = logged(finished, "metrics.jsonl")
    assert 0 < sum(record["contexts/full_recall"] for record in records) < 2
    for record in records:
        of_round = [episode["rewards"] for episode in episodes if episode["step"] == record["step"]]
        found = [rewards["process"] for rewards in of_round if rewards["recall"] < 1]
        assert record["ends/found_ratio"] == pytest.approx(sum(found) / len(found))
        assert "grad_norm" in record


def test_stopped_and_resumed_equals_uninterrupted(finished, cold, tmp_path):
    run = arguments(cold, tmp_path / "run")
    assert ppo.main([*run, "--stop-after", "1"]) == 0
    assert ppo.main([*run, "--resume", "auto"]) == 0
    same(finished, tmp_path / "run", total=2)


FIRST = Document("1", "Ann", "Ann was born in Rome.")
SECOND = Document("2", "Rome", "Rome is in Italy.")
QUESTION = Question("q", "In which country was Ann born?", ("Italy",), gold=(FIRST, SECOND))


def end_of(context: list[Document], query: str | None = None, answer: str | None = None) -> Sequence:
    """An end whose context has these documents, and whose turn searches or answers."""
    if query is None:
        turn = Step("b", answer=answer)
        finish = ANSWERED
    else:
        turn = Step.asking("b", query)
        finish = SEARCHING
    return Sequence(QUESTION, steps=[Step.asking("a", "Ann", context), turn], finish=finish, stream=Uniforms(""))


def retrieve(pairs):
    outcomes = {"Rome": [SECOND], "Ann": [FIRST], "both": [FIRST, SECOND], "fails": Failure("no answer")}
    return [outcomes[query] for _, query in pairs]


@pytest.mark.parametrize(
    ("end", "reward"),
    [
        (end_of([FIRST], query="Rome"), 2.0),
        (end_of([FIRST], query="both"), 2.0),
        (end_of([FIRST], query="Ann"), 0.0),
        (end_of([], query="Ann"), 2.0),
        (end_of([FIRST], answer="Italy"), 0.0),  # a guess
        (end_of([FIRST], query="fails"), None),
        (end_of([FIRST, SECOND], answer="Italy"), 2.0),
        (end_of([FIRST, SECOND], answer="Rome"), 0.0),
        (end_of([FIRST, SECOND], query="Rome"), 0.0),  # not needed
    ],
)
def test_the_reward_of_a_turn(end, reward):
    config = config_of("--learn", "turn", "--algorithm", "dr-grpo", "--contexts", "rows.jsonl", "--outcome-em", "2")
    sampler = TurnSampler(config, [QUESTION], engine=None, retrieve=retrieve, judge=None, contexts={"q": []})
    scored = sampler.score(1, [end], [0])
    if reward is None:
        assert scored.rewards == [None]
    else:
        assert scored.rewards[0].by_step == [0.0, reward] and scored.rewards[0].signal == reward


def config_of(*flags: str) -> PpoConfig:
    return resolve("ppo", PpoConfig(), ["--data", "x.jsonl", *flags])


def test_rewards_of_a_preset_go_with_the_choice():
    config = config_of("--preset", "hotpotqa", "--learn", "turn", "--contexts", "rows.jsonl")
    reward = config.reward
    assert (reward.outcome_em, reward.outcome_f1, reward.process_recall, reward.format_reward) == (1.0, 0.0, 0.0, 0.0)
    check(config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm", "dr-grpo"], "--learn turn learns turns of demonstrations: pass --contexts"),
        (["--algorithm", "verifree", "--contexts", "rows.jsonl"], "verifree learns last turns: pass --learn answer"),
        (["--algorithm", "ppo", "--contexts", "rows.jsonl"], "--learn turn compares the ends of a context, which ppo"),
        (["--algorithm", "dr-grpo", "--retriever", "none"], "--learn turn needs retrieved documents"),
        (["--algorithm", "dr-grpo", "--contexts", "rows.jsonl", "--outcome-f1", "1"], "--learn turn pays --outcome-em"),
    ],
)
def test_what_makes_no_sense_beside_it_is_refused(flags, message):
    with pytest.raises(UsageError, match=message):
        check(config_of("--learn", "turn", *flags))
