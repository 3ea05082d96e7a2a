"""`ppo --algorithm verifree` on the tiny checkpoint: rewards are likelihoods, and what is learned from them."""

import json
from dataclasses import dataclass

import pytest
import torch

from r3lite import ppo
from r3lite.assembly.answer_likelihood import LikelihoodRound, LikelihoodSampler, SplitEnd, right_answer, split
from r3lite.assembly.answer_round import check
from r3lite.core.config import UsageError
from r3lite.core.episode import ANSWERED, Question, Step
from r3lite.core.token_record import TokenRecord
from r3lite.datasets.trajectories import read_rows
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.rewards.reward import EpisodeReward
from r3lite.rl.algorithms.verifree import VeriFree
from r3lite.rl.batch import Batch
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms
from r3lite.settings import LengthSettings, ProtocolSettings
from tests.cold_start import WORLD, logged
from tests.test_ppo_answers import config_of


@dataclass
class Measured:
    """The right answers of a run, in the order in which they were measured."""

    record: TokenRecord
    likelihood: float
    logprobs: list[float]  # of the answer's tokens, computed from all logits of a pass over the record alone
    text: str


@pytest.fixture(scope="module")
def trial(cold, tmp_path_factory):
    """Two rounds with demonstrated contexts: what was measured, the batches with advantages, and the run's folder."""
    output = tmp_path_factory.mktemp("verifree") / "run"
    measured = []
    batches = []
    likelihoods_of = LikelihoodSampler._likelihoods
    with_advantages = VeriFree.with_advantages

    def spy_likelihoods(self, answers):
        likelihoods = likelihoods_of(self, answers)
        model = self.engine.model
        tokenizer = self.engine.layout.tokenizer
        for record, likelihood in zip(answers, likelihoods, strict=True):
            with torch.no_grad():
                logits = model.logits(model(torch.tensor([record.tokens])))[0, :, : tokenizer.size]
            logprobs = torch.log_softmax(logits.float() / self.config.sampling.temperature, -1)
            places = [i for i, is_action in enumerate(record.action_mask) if is_action]
            of_tokens = [float(logprobs[i - 1, record.tokens[i]]) for i in places]
            text = tokenizer.decode([record.tokens[i] for i in places])
            measured.append(Measured(record, likelihood, of_tokens, text))
        return likelihoods

    def spy_advantages(self, batch: Batch) -> Batch:
        result = with_advantages(self, batch)
        if batch.off_policy is not None:  # else it is the rehearsal
            batches.append(result)
        return result

    flags = ["--preset", "tiny", "--data", str(WORLD / "train.jsonl"), "--index", str(cold / "index")]
    flags += ["--adapter", str(cold / "sft"), "--algorithm", "verifree", "--contexts", str(cold / "rows.jsonl")]
    flags += ["--batch-size", "6", "--num-generations", "4", "--max-steps", "2", "--mini-batch-size", "4096"]
    flags += ["--kl-budget", "0.01", "--dtype", "fp32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LikelihoodSampler, "_likelihoods", spy_likelihoods)
        patch.setattr(VeriFree, "with_advantages", spy_advantages)
        assert ppo.main([*flags, "--output", str(output)]) == 0
    return measured, batches, output


def test_the_demonstrations_are_read_once(cold, tmp_path, monkeypatch):
    """They were read for the questions, and again for the contexts."""
    files = []

    def spy_rows(file, *args, **kwargs):
        files.append(file)
        return read_rows(file, *args, **kwargs)

    monkeypatch.setattr("r3lite.datasets.rl_questions.read_rows", spy_rows)
    flags = ["--preset", "tiny", "--data", str(WORLD / "train.jsonl"), "--index", str(cold / "index")]
    flags += ["--adapter", str(cold / "sft"), "--algorithm", "verifree", "--contexts", str(cold / "rows.jsonl")]
    flags += ["--batch-size", "2", "--num-generations", "2", "--max-steps", "1", "--dtype", "fp32"]
    assert ppo.main([*flags, "--output", str(tmp_path / "run")]) == 0
    assert files == [str(cold / "rows.jsonl")]


def test_the_reward_is_the_probability_of_the_right_answer(trial):
    measured, _, _ = trial
    assert len(measured) > 10
    for answer in measured:
        assert answer.text.startswith(" ") and not answer.text.startswith("  ")
        assert answer.record.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
        likelihood = float(torch.tensor(answer.logprobs).sum().exp())
        assert answer.likelihood == pytest.approx(likelihood, rel=1e-3, abs=1e-7)


def test_analyses_are_compared_and_right_answers_weigh_as_much_as_they_are_likely(trial):
    measured, batches, _ = trial
    likelihoods = torch.tensor([answer.likelihood for answer in measured]).tolist()
    assert len(batches) == 2
    for batch in batches:
        episode_advantages = batch.advantages.sum(-1) / batch.action_mask.sum(-1)  # [B]
        weights = batch.advantages[batch.off_policy].amax(-1)  # of each right answer
        assert set(weights.tolist()) <= set(likelihoods) and float(weights.max()) > 0
        assert set(batch.advantages[batch.off_policy].unique().tolist()) == {0.0, *weights.tolist()}
        for group in batch.groups.unique():
            of_group = batch.groups == group
            analyses = episode_advantages[of_group & ~batch.off_policy]
            assert float(analyses.sum()) == pytest.approx(0, abs=1e-5)
            assert not batch.off_policy[of_group][0]
        assert bool((episode_advantages[~batch.off_policy] != 0).any())


def test_metrics_and_episodes_have_likelihoods_as_rewards(trial):
    _, _, output = trial
    records = logged(output, "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert 0 < record["reward"] < 1
        assert record["rewards/outcome/mean"] == pytest.approx(record["reward"])
        assert record["contexts/recall"] == record["contexts/full_recall"] == 1
        assert record["grad_norm"] > 0 and record["time/likelihood"] > 0
    assert records[1]["kl_budget/kl"] != 0
    for episode in logged(output, "episodes.jsonl"):
        if episode["rewards"] is not None:
            assert episode["rewards"]["em"] in (0, 1)
            assert sum(episode["step_rewards"]) == episode["rewards"]["outcome"] <= 1
            assert sum(map(bool, episode["step_rewards"])) <= 1


def test_right_answers_become_more_likely(cold, tmp_path):
    """Six rounds on the same four questions."""
    flags = ["--preset", "tiny", "--data", str(WORLD / "train.jsonl"), "--limit", "4", "--retriever", "golden"]
    flags += ["--adapter", str(cold / "sft"), "--algorithm", "verifree", "--contexts", str(cold / "rows.jsonl")]
    flags += ["--batch-size", "4", "--num-generations", "8", "--max-steps", "6", "--mini-batch-size", "4096"]
    flags += ["--learning-rate", "1e-3", "--warmup", "0", "--dtype", "fp32", "--max-new-tokens", "64"]
    assert ppo.main([*flags, "--output", str(tmp_path / "run")]) == 0
    rewards = [record["reward"] for record in logged(tmp_path / "run", "metrics.jsonl")]
    assert rewards[0] < 0.8 and min(rewards[-3:]) > rewards[0] + 0.15


def test_contexts_are_those_of_the_demonstrations(trial, cold):
    _, _, output = trial
    demonstrated = {}
    for line in (cold / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        demonstrated[row["id"]] = [step["query"] for step in row["steps"][:-1]]
    for episode in logged(output, "episodes.jsonl"):
        assert [step["query"] for step in episode["steps"][:-1]] == demonstrated[episode["id"]]


R3_TURN = "Step 2:\nThe problem analysis: It is Rome.\nThe final answer:"


def end_of(layout: Layout, text: str, answer: str = "Rome") -> Sequence:
    """Returns a sequence whose last turn, the second, has a text."""
    tokenizer = layout.tokenizer
    prompt = tokenizer.encode("Which city?")
    turn = tokenizer.encode(text)
    return Sequence(
        Question("1", "Which city?", (answer, "Roma")),
        tokens=[*prompt, *turn],
        action_mask=[False] * len(prompt) + [True] * len(turn),
        steps=[Step("a"), Step("b", answer="Milan")],
        turn_start=len(prompt),
        finish=ANSWERED,
        stream=Uniforms(""),
    )


def layout_of(tokenizer, **settings) -> Layout:
    return Layout(tokenizer, build_protocol(ProtocolSettings(**settings)), LengthSettings())


@pytest.mark.parametrize(
    ("settings", "analysis", "sampled", "right"),
    [
        ({}, R3_TURN, " Milan", " Rome"),
        # In the middle of a line the words of the heading are plain text, before it and in the answer.
        ({}, R3_TURN.replace("It is", "The final answer: is not"), " Milan", " Rome"),
        ({}, R3_TURN, " The final answer: Milan\nand The final answer: more", " Rome"),
        ({"format": "tags"}, "<think> It is Rome. </think><answer>", " Milan </answer>", " Rome </answer>"),
        (
            {"format": "tags", "tags": "lenient"},
            "<think> It is </think><Answer>",
            "Milan</Answer>",
            " Rome </answer>",
        ),
        ({"format": "dag"}, "A: Rome\nThe final answer:", " Milan", " Rome"),
    ],
)
def test_an_end_is_split_where_its_answer_begins(tokenizer, settings, analysis, sampled, right):
    layout = layout_of(tokenizer, **settings)
    end = end_of(layout, analysis + sampled)
    split_end = split(end, layout)
    start = len(split_end.analysis.tokens)
    assert layout.tokenizer.decode(end.tokens[end.turn_start : start]) == analysis
    assert split_end.analysis.tokens == end.tokens[:start] == split_end.with_answer.tokens[:start]
    assert split_end.analysis.action_mask == end.action_mask[:start]
    assert not any(split_end.with_answer.action_mask[:start]) and all(split_end.with_answer.action_mask[start:])
    answer = split_end.with_answer.tokens[start:]
    if layout.protocol.user_turns:
        assert answer.pop() == layout.tokenizer.stop_id
    assert layout.tokenizer.decode(answer) == right
    if not layout.protocol.plans:  # else parsing needs the episode's plan
        text = layout.tokenizer.decode([*end.tokens[end.turn_start : start], *answer])
        assert layout.protocol.parse(text, [Step("a")]).answer == "Rome"


@pytest.mark.parametrize(
    ("settings", "answer"),
    [({}, "The final answer: yes"), ({"format": "tags"}, "the <answer> tag"), ({}, "Rome")],
)
def test_the_whole_right_answer_is_taken(tokenizer, settings, answer):
    """Behind the last heading stood only the end of an answer that has the words of the heading."""
    layout = layout_of(tokenizer, **settings)
    step = Step("-", answer=answer)
    text = layout.protocol.render(step, 2)
    right = right_answer(end_of(layout, text, answer), layout)
    if layout.protocol.user_turns:
        right.pop()
    assert text.endswith(layout.tokenizer.decode(right)) and answer in layout.tokenizer.decode(right)


def test_an_end_without_the_heading_or_without_room_is_not_split(tokenizer):
    layout = layout_of(tokenizer)
    assert split(end_of(layout, "Step 2:\nThe problem analysis: The final answer: Rome"), layout) is None
    end = end_of(layout, f"{R3_TURN} Milan")
    length = len(split(end, layout).with_answer.tokens)
    for max_length, fits in ((length, True), (length - 1, False)):
        shorter = Layout(layout.tokenizer, layout.protocol, LengthSettings(max_length=max_length))
        assert (split(end, shorter) is not None) == fits


def test_ends_without_an_answer_are_learned_and_those_without_a_reward_are_not():
    """Two groups of three ends; the second one is not learned from."""

    def end(token: int) -> Sequence:
        mask = [False, True, True]
        return Sequence(
            Question("1", "?", ("a",)),
            tokens=[1, token, token],
            action_mask=mask,
            logprobs=[-1.0, -2.0],
            stream=Uniforms(""),
        )

    ends = [end(token) for token in range(2, 8)]
    paid = [0.25, None, 0.0, 0.5, 0.5, 0.5]
    rewards = [None if p is None else EpisodeReward([p], {"em": 0.0}, p) for p in paid]
    split_ends = {}
    for i in (0, 3, 4, 5):
        answer = TokenRecord(tokens=[1, i + 2, 9], action_mask=[False, False, True], logprobs=[-3.0])
        split_ends[i] = SplitEnd(ends[i].first(2), answer)
    this_round = LikelihoodRound(
        sequences=ends, rewards=rewards, groups=[0, 0, 0, 1, 1, 1], learned_groups={0}, split_ends=split_ends
    )
    rollouts = this_round.rollouts()
    assert [rollout.record.tokens for rollout in rollouts] == [[1, 2], [1, 2, 9], [1, 4, 4]]
    assert [rollout.off_policy for rollout in rollouts] == [False, True, False]
    assert [rollout.token_rewards for rollout in rollouts] == [[(1, 0.25)], [(2, 0.25)], [(2, 0.0)]]
    assert [rollout.record.logprobs for rollout in rollouts] == [[-1.0], [-3.0], [-1.0, -2.0]]
    advantages = VeriFree(config_of("--algorithm", "verifree").rl, LengthSettings()).with_advantages(Batch.of(rollouts))
    assert advantages.advantages.tolist() == [[0, 0.25, 0], [0, 0, 0.25], [0, -0.25, -0.25]]


def test_the_choice_implies_last_turns_and_exact_match_alone():
    config = config_of("--preset", "hotpotqa", "--algorithm", "verifree")
    reward = config.reward
    assert (config.rl.learn, config.rl.kl_beta) == ("answer", 0.0)
    assert (reward.outcome_em, reward.outcome_f1, reward.process_recall, reward.format_reward) == (1.0, 0.0, 0.0, 0.0)
    check(config)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--learn", "episode"], "verifree learns last turns: pass --learn answer"),
        (["--refill-limit", "2"], "--refill-limit"),
        (["--process-recall", "0.1"], "remove --process-recall"),
    ],
)
def test_what_makes_no_sense_beside_it_is_refused(flags, named):
    with pytest.raises(UsageError, match=named):
        check(config_of("--algorithm", "verifree", *flags))
