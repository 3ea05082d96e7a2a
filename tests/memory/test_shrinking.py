"""Running out of memory: the same work again in smaller pieces, as if nothing had happened. No card is needed."""

import itertools
import json
import shutil
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from r3lite import ppo, sft
from r3lite.assembly import supervised
from r3lite.core import run_files
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.core.grant import Grant, Memory
from r3lite.memory.shrinking import ShrinkingGrant, memory_plan_of
from r3lite.models.weights import resolve_folder
from r3lite.rewards import reward
from r3lite.rl.batch import Batch
from r3lite.rl.learner import Learner
from r3lite.rollout import decoder, engine
from r3lite.rollout.engine import Engine
from r3lite.training import checkpoint, metrics


@pytest.fixture
def toy(tmp_path, small_model, write_folder) -> list[str]:
    """Flags for a small random model with the tiny tokenizer, and prompts as short as can be."""
    folder = write_folder(small_model(vocab_size=1024, num_hidden_layers=2), tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_folder("tiny") / name, folder / name)
    talks = [
        [{"role": "user", "content": f"Who is {i}?"}, {"role": "assistant", "content": "It is" + f" {i} and" * (9 + i)}]
        for i in range(8)
    ]
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": talk} for talk in talks])
    questions = [{"id": str(i), "question": f"Where is {i}?", "answer": "there"} for i in range(4)]
    write_jsonl(tmp_path / "questions.jsonl", questions)
    for name, text in (("init", "{question}"), ("step", "{documents}")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    prompts = [x for name in ("init", "step") for x in (f"--{name}-prompt", str(tmp_path / f"{name}.txt"))]
    return ["--model", str(folder), "--device", "cpu", "--dtype", "fp32", *prompts, "--learning-rate", "1e-2"]


def run_sft(toy, output, *flags) -> int:
    data = ["--data", str(output.parent / "rows.jsonl"), "--validation-rows", "0", "--output", str(output)]
    return sft.main([*toy, *data, "--batch-size", "4", "--gradient-accumulation", "1", "--max-steps", "3", *flags])


def run_rl(toy, output, *flags) -> int:
    data = ["--data", str(output.parent / "questions.jsonl"), "--retriever", "none", "--output", str(output)]
    shape = "--batch-size 2 --num-generations 3 --mini-batch-size 3 --micro-batch-size 3 --kl-beta 0.05 --max-steps 2"
    return ppo.main([*toy, *data, *shape.split(), "--max-new-tokens", "16", "--max-length", "64", *flags])


@pytest.fixture
def paid(monkeypatch):
    """A random model's episodes are all wrong: here they are paid 0, 1/2, 1, 0, ..., so that there is a gradient."""
    count = itertools.count()

    def score(episode, *_):
        return reward.EpisodeReward([next(count) % 3 / 2] + [0.0] * (len(episode.steps) - 1), {"em": 0.0})

    monkeypatch.setattr(reward, "score", score)


def out_of_memory(message: str = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has too little.") -> None:
    raise torch.OutOfMemoryError(message)


def small_card(monkeypatch, room: int) -> list[int]:
    """A card on which the loss of more than so many tokens does not fit; notes what was tried."""
    pass_tokens = []
    loss = supervised.SFTTrainer.loss
    loss_in_rl = Learner.loss

    def limited(work):
        def call(self, part, *arguments):
            rows = part.token_rows() if isinstance(part, Batch) else [row.tokens for row in part]
            pass_tokens.append(sum(map(len, rows)))
            if pass_tokens[-1] > room:
                out_of_memory()
            return work(self, part, *arguments)

        return call

    monkeypatch.setattr(supervised.SFTTrainer, "loss", limited(loss))
    monkeypatch.setattr(Learner, "loss", limited(loss_in_rl))
    return pass_tokens


def weights(output, step: int) -> dict[str, torch.Tensor]:
    tensors = checkpoint.read(output / f"checkpoint-{step}").tensors
    return tensors["weights"] | {f"optimizer {k}": v for k, v in tensors["optimizer"].items()}


def assert_same(output, reference, step: int, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    """Weights, moments and metrics are equal up to the order in which gradients were added."""
    one, two = weights(output, step), weights(reference, step)
    assert one.keys() == two.keys() and any(v.abs().max() > 1e-3 for k, v in one.items() if "lora_B" in k)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
    for record, reference_record in zip(
        metrics.read(output / run_files.METRICS), metrics.read(reference / run_files.METRICS), strict=True
    ):
        one, two = (
            {name: value for name, value in metrics.repeatable(each).items() if value is not None}
            for each in (record, reference_record)
        )
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)


def memory_of(output, step: int) -> dict:
    return checkpoint.read(output / f"checkpoint-{step}").state["kept"]["memory"]


def test_a_step_of_sft_is_repeated_with_smaller_passes(toy, tmp_path, monkeypatch, capsys):
    assert run_sft(toy, tmp_path / "whole") == 0
    pass_tokens = small_card(monkeypatch, room=150)
    assert run_sft(toy, tmp_path / "small") == 0
    err = capsys.readouterr().err
    assert "warning: out of memory; the step is repeated with micro_batch_tokens 8192 -> 4096" in err
    assert any(tokens > 150 for tokens in pass_tokens[:4]) and max(pass_tokens[-4:]) <= 150
    assert_same(tmp_path / "small", tmp_path / "whole", 3)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_round_of_reinforcement_learning_is_repeated_with_smaller_passes(
    toy, tmp_path, monkeypatch, capsys, paid, algorithm
):
    assert run_rl(toy, tmp_path / "whole", "--algorithm", algorithm) == 0
    pass_tokens = small_card(monkeypatch, room=70)
    assert run_rl(toy, tmp_path / "small", "--algorithm", algorithm) == 0
    assert "micro_batch_tokens" in capsys.readouterr().err
    assert any(tokens > 70 for tokens in pass_tokens) and max(pass_tokens[-2:]) <= 70
    assert_same(tmp_path / "small", tmp_path / "whole", 2)
    episodes = [(tmp_path / run / "episodes.jsonl").read_text() for run in ("small", "whole")]
    assert episodes[0] == episodes[1]


def failing(monkeypatch, owner, name: str, calls: set[int]) -> None:
    """A method that runs out of memory after it has worked, in these of its calls (from 1)."""
    work, count = getattr(owner, name), iter(range(1, 10_000))

    def call(*arguments, **options):
        result = work(*arguments, **options)
        if next(count) in calls:
            out_of_memory()
        return result

    monkeypatch.setattr(owner, name, call)


TWO_PASSES = ["--micro-batch-tokens", "1", "--lora-dropout", "0.3"]  # each row alone


def test_half_made_gradients_are_dropped_and_dropout_drops_the_same_again(toy, tmp_path, monkeypatch, capsys):
    """Two rows' gradients are there when memory runs out: counted twice, they would steer the step."""
    assert run_sft(toy, tmp_path / "whole", *TWO_PASSES) == 0
    failing(
        monkeypatch, supervised.SFTTrainer, "loss", {3, 6, 16}
    )  # in the first step, in its second try, and in the third
    assert run_sft(toy, tmp_path / "small", *TWO_PASSES) == 0
    err = capsys.readouterr().err
    assert "recompute_layers 0 -> 1" in err and "recompute_layers 1 -> 2" in err and "loss_chunk 128 -> 64" in err
    assert_same(tmp_path / "small", tmp_path / "whole", 3)
    assert run_sft([*toy, "--seed", "1"], tmp_path / "other", *TWO_PASSES) == 0
    with pytest.raises(AssertionError):  # what is compared is sensitive to what dropout drops
        assert_same(tmp_path / "other", tmp_path / "whole", 3)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_metrics_of_a_repeated_mini_batch_are_counted_once(toy, tmp_path, monkeypatch, capsys, paid, algorithm):
    alone = ["--algorithm", algorithm, "--micro-batch-tokens", "1"]
    assert run_rl(toy, tmp_path / "whole", *alone) == 0
    failing(monkeypatch, Learner, "loss", {2, 10})  # of three passes each: in the first and in a later mini-batch
    assert run_rl(toy, tmp_path / "small", *alone) == 0
    assert capsys.readouterr().err.count("the step is repeated") == 2
    assert_same(tmp_path / "small", tmp_path / "whole", 2)


def test_what_was_made_smaller_is_in_the_checkpoint_and_a_resumed_run_goes_on_with_it(
    toy, tmp_path, monkeypatch, capsys
):
    small_card(monkeypatch, room=150)
    assert run_sft(toy, tmp_path / "whole") == 0
    assert run_sft(toy, tmp_path / "parts", "--stop-after", "1") == 0
    reduced = memory_of(tmp_path / "parts", 1)
    assert reduced["micro_batch_tokens"] < 8192
    pass_tokens = small_card(monkeypatch, room=150)
    capsys.readouterr()
    assert run_sft(toy, tmp_path / "parts", "--resume", "auto") == 0
    assert "out of memory" not in capsys.readouterr().err and max(pass_tokens) <= 150
    assert memory_of(tmp_path / "parts", 3) == reduced == memory_of(tmp_path / "whole", 3)
    one, two = weights(tmp_path / "parts", 3), weights(tmp_path / "whole", 3)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


FIXED = ["--recompute-layers", "1", "--loss-chunk", "64", "--mlp-tile", "256", "--micro-batch-tokens", "2000"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_chunk": 0}, "loss_chunk is 0"),
        ({"mlp_tile": "64"}, "mlp_tile is '64'"),
        ({"nf4": 0}, "nf4 is 0"),
    ],
)
def test_figures_of_wrong_types_in_a_checkpoint_are_refused(changed, message):
    """They ended in a TypeError, or in a loop of steps of size 0."""
    grant = ShrinkingGrant(Mock(memory=Memory()), Mock())
    with pytest.raises(R3LiteError, match=message):
        grant.load_state_dict(grant.state_dict() | changed)


def test_a_grant_that_does_not_shrink_rehearses_too_and_says_that_it_has_no_plan():
    """Code that is handed any grant met an AttributeError."""
    grant = Grant(Memory())
    with grant.rehearsal():
        assert grant.run_within_memory("update", sum, [1, 2]) == 3
    with pytest.raises(AssertionError, match="run that trains"):
        memory_plan_of(grant)
    plan = Mock(memory=Memory())
    assert memory_plan_of(ShrinkingGrant(plan, Mock())) is plan


def test_the_heap_is_trimmed_when_another_phase_begins(monkeypatch):
    """On a CPU the free pages of updates stood beside the KV cache of the next round, as much as either again."""
    trimmed = []
    grant = ShrinkingGrant(Mock(memory=Memory()), Mock())
    monkeypatch.setattr("r3lite.memory.shrinking.trim_heap", lambda: trimmed.append(grant.last_phase))
    for phase in ("sample", "update", "update", "sample"):
        grant.run_within_memory(phase, lambda: None)
    assert trimmed == ["sample", "update"]


def test_what_the_user_fixed_stays(toy, tmp_path, monkeypatch, capsys):
    failing(monkeypatch, supervised.SFTTrainer, "loss", {1})
    assert run_sft(toy, tmp_path / "run", *FIXED[:4], "--micro-batch-tokens", "2000") == 0
    assert "is repeated with mlp_tile 1024 -> 512\n" in capsys.readouterr().err
    memory = memory_of(tmp_path / "run", 3)
    assert (memory["recompute_layers"], memory["loss_chunk"], memory["micro_batch_tokens"]) == (1, 64, 2000)


@pytest.mark.parametrize("failed", [1, 3])
def test_when_nothing_is_left_to_make_smaller_the_step_before_is_saved(toy, tmp_path, monkeypatch, capsys, failed):
    assert run_sft(toy, tmp_path / "whole", *FIXED) == 0
    with monkeypatch.context() as patch:
        failing(patch, supervised.SFTTrainer, "loss", {failed})
        assert run_sft(toy, tmp_path / "run", *FIXED) == 1
    err = capsys.readouterr().err
    assert "r3lite.sft stopped: the device ran out of memory, and no size can be reduced further" in err
    assert "(CUDA out of memory. Tried to allocate 2.00 GiB.)" in err
    assert "Close other programs that use the GPU and continue with --resume auto" in err and "Traceback" not in err
    assert list(checkpoint.folders_by_step(tmp_path / "run")) == ([] if failed == 1 else [2])
    assert ("saved step 2; continue with: python -m r3lite." in err) == (failed == 3)
    assert run_sft(toy, tmp_path / "run", *FIXED, "--resume", "auto") == 0
    one, two = weights(tmp_path / "run", 3), weights(tmp_path / "whole", 3)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_memory_that_runs_out_without_end_stops_the_run(toy, tmp_path, monkeypatch, capsys):
    """Every setting is halved down to its least, and then there is an end, also if the error says nothing."""
    monkeypatch.setattr(supervised.SFTTrainer, "loss", lambda *_: out_of_memory(""))
    assert run_sft(toy, tmp_path / "run") == 1
    err = capsys.readouterr().err
    assert "loss_chunk 32 -> 16" in err and "mlp_tile 64 -> 32" in err
    assert err.rstrip().endswith("with --quantize nf4 or a smaller --max-length.")


def test_a_step_whose_weights_have_changed_is_not_saved_half(toy, tmp_path, monkeypatch, paid):
    """The second mini-batch of a round fails when the first has been learned: the round before is what is whole."""
    failing(monkeypatch, Learner, "loss", {4})  # two mini-batches of one pass each: the second round's second
    memory = ["--recompute-layers", "2", "--loss-chunk", "16", "--mlp-tile", "32", "--micro-batch-tokens", "4096"]
    assert run_rl(toy, tmp_path / "run", *memory, "--save-every", "1") == 1
    assert list(checkpoint.folders_by_step(tmp_path / "run")) == [1]


def test_a_rollout_is_repeated_with_half_as_many_episodes_at_a_time(toy, tmp_path, monkeypatch, capsys, paid):
    assert run_rl(toy, tmp_path / "whole") == 0
    together, training, sample, learn = [], [], Engine._sample, Learner.learn

    def limited(self, logits, batch):
        together.append(len({id(sequence) for sequence in batch.sequences}))
        if together[-1] > 2 and len(batch.sequences[0].turn) == 3:  # in the midst of a turn
            out_of_memory()
        return sample(self, logits, batch)

    def learned(self, *arguments, **options):
        training.append(self.model.training)
        return learn(self, *arguments, **options)

    monkeypatch.setattr(Engine, "_sample", limited)
    monkeypatch.setattr(Learner, "learn", learned)
    capsys.readouterr()
    assert run_rl(toy, tmp_path / "small") == 0
    err = capsys.readouterr().err
    assert "rollout_batch_size 8 -> 3" in err and "rollout_batch_size 3 -> 1" in err
    assert max(together[-20:]) == 1
    assert training == [False, False]  # dropout, once on here, would train another policy than was sampled from
    episodes = [json.loads(x) for x in (tmp_path / "small" / "episodes.jsonl").read_text().splitlines()]
    assert episodes == [json.loads(x) for x in (tmp_path / "whole" / "episodes.jsonl").read_text().splitlines()]
    assert_same(tmp_path / "small", tmp_path / "whole", 2)
    assert memory_of(tmp_path / "small", 2)["rollout_batch_size"] == 1


def test_a_graph_that_does_not_fit_is_captured_for_fewer_episodes(toy, tmp_path, monkeypatch, capsys, paid):
    """It was once taken for one that cannot be captured, and the run went on without graphs, as slow as that is."""
    assert run_rl(toy, tmp_path / "whole") == 0
    buckets = []

    def capture(work):
        result = work()
        if len(result) > 2:
            out_of_memory()
        buckets.append(len(result))
        return lambda: result.copy_(work()), result

    monkeypatch.setattr(
        engine, "Decoder", lambda model, cache, drafter: decoder.GraphDecoder(model, cache, 64, capture)
    )
    capsys.readouterr()
    assert run_rl(toy, tmp_path / "small") == 0
    err = capsys.readouterr().err
    assert "rollout_batch_size 8 -> 3" in err and "rollout_batch_size 3 -> 1" in err
    # Episodes share a row while they are equal, so two rows were captured before there were three.
    assert "without CUDA graphs" not in err and set(buckets) == {1, 2}
    episodes = [(tmp_path / run / "episodes.jsonl").read_text() for run in ("small", "whole")]
    assert episodes[0] == episodes[1]
    assert_same(tmp_path / "small", tmp_path / "whole", 2)


def test_in_fp16_the_loss_scale_is_as_if_nothing_had_happened(toy, tmp_path, monkeypatch):
    """An attempt that failed is no skipped step: it must not touch the scaler."""
    half = [*TWO_PASSES, "--dtype", "fp16"]
    assert run_sft(toy, tmp_path / "whole", *half) == 0
    failing(monkeypatch, supervised.SFTTrainer, "loss", {3, 10})
    assert run_sft(toy, tmp_path / "small", *half) == 0
    one, two = weights(tmp_path / "small", 3), weights(tmp_path / "whole", 3)
    for name, tensor in one.items():  # rounding in fp16 turns the sign of a few updates whose gradient is nearly 0
        similarity = torch.cosine_similarity(tensor.flatten(), two[name].flatten(), dim=0)
        assert similarity > 0.99 or not (tensor.any() or two[name].any()), name
    assert any(tensor.any() for name, tensor in one.items() if "lora_B" in name)
    states = [checkpoint.read(tmp_path / run / "checkpoint-3").state["precision"] for run in ("small", "whole")]
    assert states[0] == states[1] and states[0]["scaler"]
    adapter = safetensors.torch.load_file(tmp_path / "small" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
