"""The trial with the probability of the right answer as reward: what is learned, and with which weights."""

import pytest
import torch

from bench import answer_likelihood
from bench.answer_likelihood import Demonstrations, GivenAdvantages, LikelihoodTrainer, balanced
from r3lite.core.episode import Question
from r3lite.rl.batch import Batch
from r3lite.training import metrics
from tests.cold_start import WORLD


def test_yes_and_no_are_equally_frequent_in_each_data_set():
    answers = {"a": ["yes", "No", "no", "no", "Rome"], "b": ["yes", "Paris"]}
    questions = []
    for source, of_source in answers.items():
        for i, answer in enumerate(of_source):
            questions.append(Question(f"{source}{i}", f"{source}{i}?", (answer,), source=source))
    chosen = [(question.source, question.answers[0].lower()) for question in balanced(questions)]
    assert chosen == [("a", "yes"), ("a", "no"), ("a", "rome"), ("b", "paris")]


@pytest.fixture(scope="module")
def trial(cold, tmp_path_factory):
    """Two rounds on the tiny model: the records of the right answers with their probabilities, and the batches."""
    output = tmp_path_factory.mktemp("likelihood") / "run"
    measured = []
    batches = []
    likelihoods = LikelihoodTrainer._likelihoods
    with_advantages = GivenAdvantages.with_advantages

    def spy_likelihoods(self, records):
        result = likelihoods(self, records)
        model = self.learner.model
        for record, p in zip(records, result, strict=True):
            with torch.no_grad():
                logits = model.logits(model(torch.tensor([record.tokens])))[0, :, : self.learner.vocabulary]
            by_token = torch.log_softmax(logits.float() / self.learner.temperature, -1)
            places = [i for i, is_action in enumerate(record.action_mask) if is_action]
            expected = [float(by_token[i - 1, record.tokens[i]]) for i in places]
            tokenizer = self.round_sampler.engine.layout.tokenizer
            measured.append((record, p, expected, tokenizer.decode([record.tokens[i] for i in places])))
        return result

    def spy_advantages(self, batch: Batch):
        batches.append((batch, self.advantages))
        return with_advantages(self, batch)

    flags = ["--preset", "tiny", "--data", str(WORLD / "train.jsonl"), "--index", str(cold / "index")]
    flags += ["--adapter", str(cold / "sft"), "--learn", "answer", "--algorithm", "dr-grpo", "--kl-beta", "0"]
    flags += ["--batch-size", "6", "--num-generations", "4", "--max-steps", "2", "--mini-batch-size", "4096"]
    flags += ["--kl-budget", "0.01", "--dtype", "fp32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LikelihoodTrainer, "_likelihoods", spy_likelihoods)
        patch.setattr(GivenAdvantages, "with_advantages", spy_advantages)
        demonstrations = ["--demonstrations", f"{cold / 'rows.jsonl'}=20"]
        assert answer_likelihood.main([*demonstrations, *flags, "--output", str(output)]) == 0
    return measured, batches, metrics.read(output / "metrics.jsonl")


def test_the_reward_is_the_probability_of_the_right_answer(trial):
    measured, _, _ = trial
    assert len(measured) > 10
    for record, p, expected, text in measured:
        assert text.startswith(" ") and not text.startswith("  ")
        assert record.logprobs == pytest.approx(expected, abs=1e-4)
        assert p == pytest.approx(float(torch.tensor(expected).sum().exp()), rel=1e-3, abs=1e-7)


def test_analyses_are_compared_and_right_answers_weigh_as_much_as_they_are_likely(trial):
    measured, batches, records = trial
    likelihoods = [p for _, p, _, _ in measured]
    assert len(batches) == 2
    for batch, advantages in batches:
        answers = advantages[batch.off_policy]
        assert set(answers.tolist()) <= set(torch.tensor(likelihoods).tolist())
        for group in batch.groups.unique():
            analyses = advantages[(batch.groups == group) & ~batch.off_policy]
            assert float(analyses.sum()) == pytest.approx(0, abs=1e-5)
        assert bool((advantages[~batch.off_policy] != 0).any())
    assert [record["step"] for record in records] == [1, 2]
    assert all(0 <= record["likelihood"] <= 1 and record["grad_norm"] > 0 for record in records)
    assert records[1]["kl_budget/kl"] != 0


def test_a_file_and_its_count():
    assert Demonstrations.parse("runs/lr=1/gold.jsonl=40") == Demonstrations("runs/lr=1/gold.jsonl", 40)
