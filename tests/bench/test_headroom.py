"""The probe before training: its numbers by hand, the noise scale of gradients with a known one, and a run of it."""

import json
from dataclasses import replace

import pytest
import torch

from bench import headroom, headroom_numbers
from bench.headroom_numbers import Answer, GradientSums, Row, cosine, decision, gradient_summary, noise_scale, summary
from r3lite import evaluate
from r3lite.assembly import rl_setup
from r3lite.core import bars
from r3lite.core.files import read_jsonl
from r3lite.datasets.sources import read_questions_of
from r3lite.rl.batch import Batch, action_states
from r3lite.rollout.engine import Engine
from r3lite.training import optim
from tests.cold_start import WORLD


def answer(text, em=0.0, recall=1.0):
    return Answer(text, em, recall)


def test_the_majority_votes_for_normalized_answers():
    paris, rome = answer("Paris.", em=1.0), answer("Rome")
    assert headroom_numbers.majority([rome, paris, answer("the paris", em=1.0)]) == 1.0
    assert headroom_numbers.majority([rome, rome, paris]) == 0.0
    assert headroom_numbers.majority([paris, rome]) == 1.0  # of equally frequent ones the first
    assert headroom_numbers.majority([rome, paris]) == 0.0
    assert headroom_numbers.majority([answer(""), answer(" "), paris]) == 1.0  # no answer has no vote
    assert headroom_numbers.majority([answer(""), answer(" ")]) == 0.0


def three_questions():
    """Of four samples the first question has three right, the second one, the third none."""
    right, wrong = answer("x", em=1.0), answer("y")
    halfway = replace(wrong, recall=0.5)
    return [
        Row("1", replace(right, recall=0.5), [right, right, replace(right, recall=0.0), wrong]),
        Row("2", wrong, [replace(wrong, recall=0.5), replace(wrong, recall=0.5), replace(wrong, text="z"), right]),
        Row("3", halfway, [halfway, halfway, halfway, halfway]),
    ]


def test_shares_by_hand():
    result = summary(three_questions())
    assert result["all"] == {
        "questions": 3,
        "greedy": pytest.approx(1 / 3),
        "mean": pytest.approx((3 / 4 + 1 / 4 + 0) / 3),
        "majority": pytest.approx(1 / 3),
        "any": pytest.approx(2 / 3),
    }
    # With full recall the first question has two right samples of three, and the second z and x, of which z is first.
    assert result["full_recall"] == {
        "questions": 2,
        "greedy_questions": 1,
        "greedy": 0.0,
        "mean": pytest.approx((2 / 3 + 1 / 2) / 2),
        "majority": 0.5,
        "any": 1.0,
    }
    assert result["mixed_groups"] == pytest.approx(2 / 3)
    assert result["by_right"] == pytest.approx({"0": 1 / 3, "1": 1 / 3, "2": 0.0, "3": 1 / 3, "4": 0.0})
    over = result["over_greedy"]
    assert over["majority"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    # One question of three gains: 8 of 27 resamples leave it out, and one has it three times.
    assert over["any"] == {"value": pytest.approx(1 / 3), "low": 0.0, "high": pytest.approx(1.0)}


def test_questions_without_gold_paragraphs_have_no_full_recall():
    rows = [Row("1", answer("x", recall=None), [answer("x", em=1.0, recall=None)] * 2)]
    assert summary(rows)["full_recall"] == {
        "questions": 0,
        "greedy_questions": 0,
        "greedy": None,
        "mean": None,
        "majority": None,
        "any": None,
    }


@pytest.mark.parametrize(
    ("sharper", "best", "text"),
    [
        (0.59 - 0.56, 0.5, "majority - greedy is +0.030, any - greedy +0.500: sampling can be sharpened"),
        (0.029, 0.15, "majority - greedy is +0.029, any - greedy +0.150: filtering own samples"),
        (-0.02, 0.149, "majority - greedy is -0.020, any - greedy +0.149: reading is bound by capacity"),
    ],
)
def test_the_decision_names_where_training_can_gain(sharper, best, text):
    assert decision(sharper, best).startswith(text)


def test_the_noise_scale_of_two_batch_sizes_by_hand():
    # |G|^2 = 3 and tr(S) = 12: a batch of 2 has 3 + 12 / 2 = 9, one of 6 has 3 + 12 / 6 = 5.
    assert noise_scale(9.0, 5.0, (2, 6)) == pytest.approx({"signal": 3.0, "noise": 12.0, "scale": 4.0})
    assert noise_scale(9.0, 2.0, (2, 6))["scale"] is None  # (12 - 18) / 4 is no squared norm


def test_the_noise_scale_of_gradients_with_a_chosen_mean_and_covariance():
    """Gaussian gradients of 40 numbers: squared norm of the mean 25, trace of the covariance 100, noise scale 4."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.full((40,), (25 / 40) ** 0.5, dtype=torch.float64)
    deviations = torch.linspace(0.5, 2.0, 40, dtype=torch.float64)
    deviations *= (100 / deviations.square().sum()).sqrt()

    def sums(groups):
        result = GradientSums()
        for number in range(groups):
            noise = torch.randn(40, generator=generator, dtype=torch.float64)
            result.add(number % 2, mean + deviations * noise)
        return result

    large = sums(3000).summary()
    assert large["noise_scale"]["scale"] == pytest.approx(4, rel=0.06)
    assert large["cosine_of_halves"] == pytest.approx(1, abs=0.01)
    # Of few groups both estimates are right in the mean.
    summaries = [sums(8).summary() for _ in range(400)]
    for key in ("noise_scale", "of_halves"):
        for name, truth in (("signal", 25), ("noise", 100)):
            mean_estimate = sum(one[key][name] for one in summaries) / len(summaries)
            assert mean_estimate == pytest.approx(truth, rel=0.05), (key, name)


def test_groups_with_equal_rewards_count_as_groups_without_a_gradient():
    ones = torch.ones(4, dtype=torch.float64)
    sums = GradientSums()
    for half in (0, 1, 0, 1):
        sums.add(half, ones if half == 0 else None)
    result = sums.summary()
    # Squared norms: 4 and 0 of single groups, 4 and 0 of the halves, 1 of the mean.
    assert result["mixed_groups"] == 0.5 and result["cosine_of_halves"] is None
    assert result["noise_scale"] == pytest.approx({"signal": (4 - 2) / 3, "noise": 1 / (3 / 4), "scale": 2.0})
    assert result["of_halves"]["signal"] == 0.0 and result["of_halves"]["scale"] is None
    none = GradientSums()
    none.add(0, None)
    none.add(1, None)
    assert none.summary()["noise_scale"] is None


def test_the_cosine_of_two_rewards_by_hand():
    x, y = torch.eye(2, dtype=torch.float64)
    sums = {"em": GradientSums(), "recall": GradientSums()}
    for name, gradients in (("em", (x, x)), ("recall", (x, y))):
        for half, gradient in enumerate(gradients):
            sums[name].add(half, gradient)
    cosines = gradient_summary(sums)["cosine_em_recall"]
    # x + x and x + y have an angle of 45 degrees; across the halves x and y, and x and x.
    assert cosines == pytest.approx({"value": 0.5**0.5, "across_halves": 0.5})
    assert cosine(x, 0 * y) is None


SHORT = ["--limit", "4", "--dtype", "fp32", "--max-new-tokens", "64", "--max-hops", "2"]
FLAGS = ["--preset", "tiny", "--data", str(WORLD / "train.jsonl"), *SHORT]


def test_a_probe_of_the_tiny_model(cold, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bars, "PERIOD", 0.0)
    output = tmp_path / "headroom.json"
    flags = [*FLAGS, "--adapter", str(cold / "sft"), "--index", str(cold / "index")]
    probe = ["--num-generations", "3", "--questions", "4", "--groups", "2", "--output", str(output)]
    assert headroom.main([*flags, *probe]) == 0
    (run,) = json.loads(output.read_text(encoding="utf-8"))["runs"]
    assert {"commit", "processor", "threads", "precision"} <= run.keys() and run["precision"] == "fp32"
    assert (run["section"], run["data"], run["temperature"]) == ("tiny, sft", "train.jsonl", 1.0)
    assert run["summary"]["all"]["questions"] == len(run["rows"]) == 4 and run["gradient"]["groups"] == 2
    assert all(len(row["samples"]) == 3 for row in run["rows"])
    printed = capsys.readouterr()
    stdout = printed.out
    assert "| all | 4 |" in stdout and run["summary"]["decision"] in stdout and "cosine of halves" in stdout
    assert "sampling: 1 of 1 blocks of questions" in printed.err and "gradients: 2 of 2 groups" in printed.err
    # Greedy answers are those of evaluate.
    folder = tmp_path / "evaluation"
    assert evaluate.main([*flags, "--output", str(folder)]) == 0
    predictions = {line.text("id"): line.values for line in read_jsonl(folder / "predictions.jsonl")}
    for row in run["rows"]:
        line = predictions[row["id"]]
        assert row["greedy"] == {"text": line["prediction"], "em": line["em"], "recall": line["recall"]}


def setup():
    """The tiny model with a fresh adapter, as the probe has it."""
    config, _ = headroom.parse(FLAGS)
    config = replace(config, rl=replace(config.rl, algorithm="rloo", kl_beta=0.0))
    questions = read_questions_of(config.data, config.mixture)
    return config, questions, *rl_setup.build_learning(config, questions)


def no_documents(pairs):
    return [[] for _ in pairs]


def test_the_gradient_of_a_group_is_that_of_its_log_probabilities_times_their_advantages():
    _, questions, engine, learner, state = setup()
    sequences = engine.run(questions[:1] * 3, ["a", "b", "c"], no_documents)
    answers = [Answer("x", em, None) for em in (1.0, 0.0, 0.0)]
    group = headroom.group_of(sequences, answers, number=0)
    parameters = list(optim.parameters(state.optimizer).values())
    gradient = headroom.group_gradient(learner, parameters, group.rollouts, group.rewards["em"])
    assert headroom.group_gradient(learner, parameters, group.rollouts, group.rewards["recall"]) is None
    # Leave-one-out: 1 - 0, 0 - 1/2 and 0 - 1/2; the mean over the three episodes of minus advantage times log p.
    batch = Batch.of(group.rollouts)
    hidden, tokens = action_states(learner.model, batch)
    logits = hidden @ learner.model.head_weight[: learner.vocabulary].T
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    advantages = torch.tensor([1.0, -0.5, -0.5]).repeat_interleave(batch.action_mask.sum(-1))
    (-(advantages * logprobs).sum() / 3).backward()
    expected = torch.cat([parameter.grad.flatten().double() for parameter in parameters])
    assert gradient.norm() > 0 and torch.allclose(gradient, expected, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("extra_flags", "status", "message"),
    [
        (["--groups", "3"], 2, "--groups is 3; it must be even"),
        (["--groups", "8", "--questions", "6"], 2, "at most --questions, 6"),
        (["--questions", "0"], 2, "--questions is 0"),
        (["--learning-rate", "1e-5"], 2, "--learning-rate has no effect on what is sampled"),
        (["--num-generation", "4"], 2, "unknown argument --num-generation (did you mean --num-generations?)"),
        (["--temperature", "0"], 2, "--temperature is 0"),
        (["--no-lora"], 2, "--no-lora"),
    ],
)
def test_flags_without_effect_are_refused(tmp_path, capsys, extra_flags, status, message):
    data = ["--preset", "tiny", "--data", str(WORLD / "train.jsonl"), "--output", str(tmp_path / "x.json")]
    assert headroom.main([*data, *extra_flags]) == status
    assert message in capsys.readouterr().err


def test_questions_at_which_the_retriever_failed_are_left_out():
    """Their episodes have no score: as wrong answers they would have counted against the model."""
    config, questions, engine, _, _ = setup()

    class Failing(Engine):
        def run(self, *arguments, **options):
            sequences = super().run(*arguments, **options)
            for sequence in sequences:
                if sequence.question.id == questions[0].id:
                    sequence.failure = "no answer"
            return sequences

    failing = Failing(**vars(engine))
    sampled = headroom.sample_all(failing, questions[:2], no_documents, config, 2)
    assert (len(sampled.rows), sampled.failures, sampled.groups) == (1, 1, [])
    assert sampled.rows[0].id == questions[1].id
