"""Every command on a simulated card (bench/stress/simulated_cuda.py): in fp32 its numbers are the CPU's, to the digit.

A line that mixes devices or hands a tensor of the device to numpy fails here, and so does one that makes the host wait
for the device within a layer. Where the device decodes by graphs, so does the CPU that it is held against: graphs work
on other shapes, which changes the last bits.
"""

import functools
import itertools
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from bench.stress.simulated_cuda import GIB, SimulatedCuda
from r3lite import collect, evaluate, index, plan, ppo, sft
from r3lite.core.errors import R3LiteError
from r3lite.core.files import shipped, write_jsonl
from r3lite.datasets.qa import read_questions
from r3lite.devices import speed
from r3lite.memory.plan import make_plan
from r3lite.memory.shrinking import ShrinkingGrant
from r3lite.memory.work import Workload
from r3lite.rewards import reward
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rollout import engine
from r3lite.rollout.decoder import GraphDecoder
from r3lite.rollout.drafts import CARD_TOKEN_COST
from r3lite.settings import MemorySettings
from r3lite.training import checkpoint, metrics
from tests.commands import NEEDED
from tests.lfm2_models import switches
from tests.rollout.test_decoder import Replayed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real card is here: its tests are those marked gpu")
WORLD = shipped("data", "world")
MIB = 1 << 20
SLOTS = 512  # of the cache
SCALE = 2.0**19  # of the loss in fp16: the first step overflows, the third does not
SMALL = "--preset tiny --dtype fp32 --batch-size 2 --max-steps 2 --save-every 1 --keep-checkpoints 9"
TURNS = f"--max-new-tokens 24 --max-hops 2 --max-length {SLOTS}"
MORE = {"dgpo": ["--nf4-cache", "none"]}
RL = f"{SMALL} {TURNS} --num-generations 2 --mini-batch-size 4 --micro-batch-size 2 --update-epochs 1 --kl-beta 0.05"


@pytest.fixture(autouse=True, scope="module")
def same_products():
    """Only a CPU multiplies by oneDNN (models/linear.py), which changes the last bits: here it does not either."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def on_card(main, arguments: list[str], card: SimulatedCuda | None = None, status: int = 0) -> SimulatedCuda:
    """Runs a command on a card, within whose layers the host may not wait."""
    with card or SimulatedCuda() as card:
        assert main([*arguments, "--device", "cuda"]) == status
    assert [str(wait) for wait in card.counts.waits if any(map(is_layer, wait.functions))] == []
    return card


def is_layer(place: str) -> bool:
    """Whether a function, as Wait.functions names it, is one of a layer or of the loss, forward or backward."""
    file, _, name = place.partition(" ")
    return name.startswith("Layer.") or "logprobs.py" in file or (name.endswith(".backward") and "models/" in file)


def logged(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [metrics.repeatable(json.loads(line)) for line in (run / name).read_text(encoding="utf-8").splitlines()]


def tensors(run: Path, *groups: str) -> dict[str, torch.Tensor]:
    """The adapter, and what all checkpoints hold of these groups."""
    tensors_by_name = safetensors.torch.load_file(run / "adapter" / "adapter_model.safetensors")
    for step in checkpoint.folders_by_step(run):
        saved_groups = checkpoint.read(run / f"checkpoint-{step}").tensors
        tensors_by_name |= {
            f"{step} {group} {name}": tensor for group in groups for name, tensor in saved_groups[group].items()
        }
    return tensors_by_name


def assert_same(first_run: Path, second_run: Path, *groups: str) -> None:
    """Metrics but times, speeds and memory, episodes, adapter, and weights and moments of checkpoints: to the bit."""
    assert logged(first_run) == logged(second_run)
    if (first_run / "episodes.jsonl").exists():
        assert logged(first_run, "episodes.jsonl") == logged(second_run, "episodes.jsonl")
    first, second = (tensors(run, "weights", "optimizer", *groups) for run in (first_run, second_run))
    assert first.keys() == second.keys()
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []
    assert any(tensor.abs().max() > 1e-3 for name, tensor in first.items() if "lora_B" in name)  # something was learned


def assert_near(first_run: Path, second_run: Path) -> None:
    """The same up to the order in which gradients were added."""
    for first, second in zip(logged(first_run), logged(second_run), strict=True):
        assert first == pytest.approx(second, rel=1e-3, abs=1e-5)
    first, second = (tensors(run, "weights") for run in (first_run, second_run))
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-2, atol=1e-4)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[str]:
    """Flags of SFT on short conversations of different lengths."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    talks = [
        [{"role": "user", "content": f"Who is {i}?"}, {"role": "assistant", "content": "It is" + f" {i} and" * (9 + i)}]
        for i in range(6)
    ]
    write_jsonl(path, [{"messages": talk} for talk in talks])
    return [*SMALL.split(), "--data", str(path), "--validation-rows", "1", "--nf4-cache", "none"]


FEATURES = {
    "dense": "",
    "dropout": "--lora-dropout 0.2 --recompute-layers 3 --micro-batch-tokens 1",
    "offload": "--recompute-layers 4 --offload on",
    "nf4": "--quantize nf4 --recompute-layers 2",
    "streamed": "--stream-layers --recompute-layers none",
    "fp16": "--dtype fp16 --max-steps 3",
}


def in_fp16(patch: pytest.MonkeyPatch) -> None:
    """The loss is scaled by SCALE at first; the card is timed with small products, as large ones take a CPU minutes."""
    patch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=SCALE))
    patch.setattr(speed, "FP16_EDGE", 64)


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory) -> Path:
    """Runs of SFT with every feature, on the CPU and on the card: folders named after both."""
    folder = tmp_path_factory.mktemp("sft")
    with pytest.MonkeyPatch.context() as patch:
        in_fp16(patch)
        for name, flags in FEATURES.items():
            run = [*rows, *flags.split(), "--output"]
            assert sft.main([*run, str(folder / f"{name} cpu"), "--device", "cpu"]) == 0
            on_card(sft.main, [*run, str(folder / f"{name} cuda")])
    return folder


def test_a_step_of_sft_waits_once_for_the_card(rows, tmp_path):
    flags = ["--gradient-accumulation", "2", "--validation-rows", "0", "--output", str(tmp_path / "run")]
    waits = on_card(sft.main, [*rows, *flags]).counts.waits
    assert sum(times for wait, times in waits.items() if any("SFTTrainer.step" in name for name in wait.functions)) == 2
    assert len(logged(tmp_path / "run")) == 2


@pytest.mark.parametrize("feature", FEATURES)
def test_sft_gives_the_numbers_of_the_cpu(trained, feature):
    assert_same(trained / f"{feature} cpu", trained / f"{feature} cuda")


def test_fp16_skips_what_overflows(trained):
    first, *_, last = logged(trained / "fp16 cuda")
    saved = checkpoint.read(trained / "fp16 cuda" / "checkpoint-3").state["precision"]
    assert 0 < first["skipped_steps"] <= last["skipped_steps"] < 3 and saved["device"] == "cuda"
    assert saved["scaler"]["scale"] == SCALE / 2 ** last["skipped_steps"]


@pytest.mark.parametrize("feature", ["dropout", "fp16", "streamed"])
def test_sft_stopped_and_resumed_equals_uninterrupted(trained, rows, tmp_path, feature, monkeypatch):
    """Dropout draws from the card's own random numbers, whose state is in the checkpoint."""
    in_fp16(monkeypatch)
    run = [*rows, *FEATURES[feature].split(), "--output", str(tmp_path / "run")]
    on_card(sft.main, [*run, "--stop-after", "1"])
    states = checkpoint.read(tmp_path / "run" / "checkpoint-1").tensors["random"]
    assert states.keys() == {"cpu", "cuda.0"}
    assert torch.equal(states["cpu"], states["cuda.0"]) == (feature != "dropout")  # both have the seed of the run
    on_card(sft.main, [*run, "--resume", "auto"])
    assert_same(trained / f"{feature} cuda", tmp_path / "run", "random")


@pytest.fixture(scope="module")
def by_graphs(rows, tmp_path_factory) -> Path:
    """A run of SFT whose passes are CUDA graphs."""
    run = tmp_path_factory.mktemp("graphs") / "run"
    card = on_card(sft.main, [*rows, "--cuda-graphs", "--output", str(run)])
    assert card.counts.kernels > card.counts.launches  # graphs were replayed
    return run


def test_sft_by_graphs_gives_the_numbers_of_ordinary_passes(by_graphs, trained):
    for first, second in zip(logged(by_graphs), logged(trained / "dense cuda"), strict=True):
        assert first == pytest.approx(second, rel=1e-5)
    first, second = (tensors(run) for run in (by_graphs, trained / "dense cuda"))
    # AdamW's first steps have the same size for gradients that are hardly more than rounding.
    difference = sum(float((tensor - second[name]).square().sum()) for name, tensor in first.items())
    size = sum(float(tensor.square().sum()) for name, tensor in second.items() if "lora_B" in name)
    assert 0 <= difference < 1e-4 * size


def test_sft_by_graphs_stopped_and_resumed_equals_uninterrupted(by_graphs, rows, tmp_path):
    run = [*rows, "--cuda-graphs", "--output", str(tmp_path / "run")]
    on_card(sft.main, [*run, "--stop-after", "1"])
    on_card(sft.main, [*run, "--resume", "auto"])
    assert_same(by_graphs, tmp_path / "run", "random")


def test_graphs_read_the_adapter_of_their_own_step(rows, tmp_path, monkeypatch):
    """In half precision the adapter is cast, also for layers that are run again in the backward pass."""
    monkeypatch.setattr(speed, "FP16_EDGE", 64)
    run = [*rows, "--dtype", "fp16", "--recompute-layers", "1", "--max-steps", "3", "--output"]
    assert sft.main([*run, str(tmp_path / "cpu"), "--device", "cpu"]) == 0
    on_card(sft.main, [*run, str(tmp_path / "cuda"), "--cuda-graphs"])
    losses = {}
    for name in ("cpu", "cuda"):
        losses[name] = [record["loss"] for record in logged(tmp_path / name)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=5e-3)
    assert losses["cpu"][-1] < 0.9 * losses["cpu"][0]  # with the weights of an earlier step it would be more


def test_what_passes_by_graphs_cannot_do_is_refused(rows, tmp_path, capsys):
    output = ["--output", str(tmp_path / "run")]
    for flags in ([], ["--dry-run"]):
        assert sft.main([*rows, "--cuda-graphs", "--device", "cpu", *flags, *output]) == 1
        assert "--cuda-graphs needs a CUDA GPU" in capsys.readouterr().err
    for flags in (["--lora-dropout", "0.1"], ["--stream-layers"], ["--offload", "on"], ["--no-lora"]):
        assert sft.main([*rows, "--cuda-graphs", *flags, *output]) == 2
        assert "--cuda-graphs is True, but has no effect here: it needs a run without" in capsys.readouterr().err


def test_passes_with_convolutions_cannot_be_graphs(small_model):
    config = small_model(**switches(3)).config
    workload = Workload(config, config.vocab_size, element=4, row_tokens=64, captures=True, on_cuda=True)
    with pytest.raises(R3LiteError, match="--cuda-graphs does not work for models with convolutions"):
        make_plan(workload, MemorySettings())


def test_a_budget_is_enforced_and_kept(rows, tmp_path):
    short = [*rows, "--max-steps", "1", "--output"]
    cards = [on_card(sft.main, [*short, str(tmp_path / str(n)), "--vram-budget", f"{n}GiB"]) for n in (1, 2)]
    shares = [card.share * card.total for card in cards]
    assert shares[1] - shares[0] == pytest.approx(GIB) and 0 < shares[0] < GIB  # less the context
    assert all(0 < card.memory.peak < share for card, share in zip(cards, shares))


def test_a_card_that_is_smaller_than_planned(rows, trained, tmp_path, capsys):
    card = SimulatedCuda(free=18 * MIB)
    on_card(sft.main, [*rows, "--vram-budget", "1GiB", "--output", str(tmp_path / "run")], card)
    assert "warning: out of memory; the step is repeated with" in capsys.readouterr().err
    assert card.memory.peak <= 18 * MIB
    assert_near(tmp_path / "run", trained / "dense cpu")


def test_no_room_for_the_weights_is_said(rows, tmp_path, capsys):
    on_card(
        sft.main, [*rows, "--vram-budget", "1GiB", "--output", str(tmp_path / "run")], SimulatedCuda(free=4 * MIB), 1
    )
    assert "stopped: CUDA out of memory" in capsys.readouterr().err


# Reinforcement learning


@pytest.fixture(scope="module")
def questions(trained, tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    lines = (WORLD / "train.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    question_texts = [question.text for question in read_questions(str(path))]
    traces = [{"question": text, "reasoning": "This gives the answer.", "answer": "Rome"} for text in question_texts]
    write_jsonl(path.with_name("traces.jsonl"), traces)
    demonstrations = ["--retriever", "golden", "--output", str(path.with_name("demonstrations.jsonl"))]
    assert collect.main(["--preset", "tiny", "--data", str(path), *demonstrations]) == 0
    return ["--data", str(path), "--adapter", str(trained / "dense cpu")]


@pytest.fixture
def graphs_on_the_cpu(monkeypatch):
    """Decodes on the CPU as on a card, with the same drafts."""

    def graphs(model, cache, drafter):
        if drafter:
            drafter.token_cost = CARD_TOKEN_COST
        return GraphDecoder(model, cache, SLOTS, Replayed(), drafter)

    monkeypatch.setattr(engine, "Decoder", graphs)


def train(questions: list[str], output: Path, flags: str, card: SimulatedCuda | bool = True) -> SimulatedCuda | None:
    """A run of RL. Whatever they say, the four episodes of a round are paid 0, 1/2, 1 and 0, for something to learn."""
    count = itertools.count()

    def paid(episode, *_) -> reward.EpisodeReward:
        if len(episode.steps) == 1 and episode.prediction == "Rome":  # a trace
            return reward.EpisodeReward([1.0], {"em": 1.0, "outcome": 1.0})
        amount = next(count) % 4 % 3 / 2
        parts = {"em": float(amount > 0), "outcome": amount}
        return reward.EpisodeReward([amount] + [0.0] * (len(episode.steps) - 1), parts)

    run = [*RL.split(), *questions, *flags.split(), "--output", str(output)]
    if "luffy" in flags or "hybrid" in flags:
        run += ["--traces", str(Path(questions[1]).with_name("traces.jsonl"))]
    if "verifree" in flags:
        run += ["--contexts", str(Path(questions[1]).with_name("demonstrations.jsonl"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward, "score", paid)
        if card:
            return on_card(ppo.main, run, card if isinstance(card, SimulatedCuda) else None)
        assert ppo.main([*run, "--device", "cpu"]) == 0


def of(algorithm: str) -> str:
    """The flags that choose an algorithm."""
    return " ".join(["--algorithm", algorithm, *NEEDED.get(algorithm, []), *MORE.get(algorithm, [])])


@pytest.fixture(scope="module")
def played(questions, tmp_path_factory) -> Path:
    """A run of each algorithm on the card."""
    folder = tmp_path_factory.mktemp("rl")
    for algorithm in ALGORITHMS:
        card = train(questions, folder / algorithm, of(algorithm))
        assert card.counts.kernels > card.counts.launches + 2000  # graphs were replayed
    return folder


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rl_gives_the_numbers_of_the_cpu(played, questions, tmp_path, graphs_on_the_cpu, algorithm):
    train(questions, tmp_path / "cpu", of(algorithm), card=False)
    assert_same(tmp_path / "cpu", played / algorithm)
    records = logged(played / algorithm)
    assert all(record["grad_norm"] > 0 for record in records)
    if algorithm in ("luffy", "hybrid"):
        assert all(record["off_policy/traces"] == 1 for record in records)
    if algorithm in ("exgrpo", "hybrid"):
        assert [record["off_policy/replays"] for record in records] == [0, 1]


def test_rl_stopped_and_resumed_equals_uninterrupted(played, questions, tmp_path):
    train(questions, tmp_path / "run", "--algorithm ppo --stop-after 1")
    train(questions, tmp_path / "run", "--algorithm ppo --resume auto")
    assert_same(played / "ppo", tmp_path / "run", "random")


class FailsOnce:
    """Lets memory run out in one attempt of a phase (from 0), after so many more tensors were made."""

    def __init__(self, monkeypatch, card: SimulatedCuda, phase: str, number: int, tensor_count: int):
        self.attempts, attempt = itertools.count(), ShrinkingGrant.run_within_memory
        self.live: list[int] = []  # bytes, before the attempt and after it

        def failing(grant, name, work, *arguments):
            if name != phase or next(self.attempts) != number:
                return attempt(grant, name, work, *arguments)
            self.live.append(card.memory.live)
            card.run_out_of_memory(tensor_count)
            result = attempt(grant, name, work, *arguments)
            self.live.append(card.memory.live)
            return result

        monkeypatch.setattr(ShrinkingGrant, "run_within_memory", failing)


@pytest.mark.parametrize(
    ("phase", "number", "tensor_count"),
    [
        ("sample", 0, 3),  # making the cache
        ("sample", 0, 100),  # in the prefill
        ("sample", 0, 700),  # in a capture
        ("update", 1, 400),  # rehearsing
        ("update", 2, 50),  # scoring by the reference
        ("update", 3, 400),  # learning
    ],
)
def test_rl_goes_on_when_memory_runs_out(played, questions, tmp_path, monkeypatch, capsys, phase, number, tensor_count):
    card = SimulatedCuda()
    fails = FailsOnce(monkeypatch, card, phase, number, tensor_count)
    train(questions, tmp_path / "run", "--algorithm grpo --max-steps 1", card)
    error = capsys.readouterr().err
    assert error.count("out of memory; the step is repeated with micro_batch_tokens 8192 -> 4096") == 1
    assert "without CUDA graphs" not in error
    live_before, live_after = fails.live
    gradients = sum(tensor.numel() * 4 for tensor in tensors(tmp_path / "run").values())
    # Nothing of the attempt that failed is left.
    assert live_after - live_before <= (gradients * 2 if phase == "update" else 0)
    # The steps of noise are empty: what was sampled shows in the metrics of the first round.
    (record,), uninterrupted = logged(tmp_path / "run"), logged(played / "grpo")[0]
    for name in ("entropy", "num_tokens", "completions/mean_length", "reward"):
        assert record[name] == pytest.approx(uninterrupted[name], rel=1e-4) and record[name] > 0


def test_sft_goes_on_when_memory_runs_out_and_drops_the_same_again(rows, trained, tmp_path, monkeypatch, capsys):
    card = SimulatedCuda()
    FailsOnce(monkeypatch, card, "update", 1, 500)
    on_card(sft.main, [*rows, *FEATURES["dropout"].split(), "--output", str(tmp_path / "run")], card)
    assert "the step is repeated with loss_chunk" in capsys.readouterr().err  # recomputed layers were asked for
    assert_near(tmp_path / "run", trained / "dropout cuda")


# Commands that train nothing


def test_evaluate_gives_the_numbers_of_the_cpu(questions, tmp_path, graphs_on_the_cpu, monkeypatch):
    sample = engine.Engine.run
    sampled = []

    def recorded(self, *arguments, **options):
        sequences = sample(self, *arguments, **options)
        sampled.append([sequence.tokens for sequence in sequences])
        return sequences

    monkeypatch.setattr(engine.Engine, "run", recorded)
    run = ["--preset", "tiny", "--dtype", "fp32", *TURNS.split(), *questions, "--output"]
    assert evaluate.main([*run, str(tmp_path / "cpu"), "--device", "cpu"]) == 0
    on_card(evaluate.main, [*run, str(tmp_path / "cuda")])
    for name in ("predictions.jsonl", "scores.json"):
        assert (tmp_path / "cpu" / name).read_bytes() == (tmp_path / "cuda" / name).read_bytes()
    on_the_cpu, on_the_card = sampled  # noise, of which the predictions have the length alone
    assert on_the_cpu == on_the_card and len(on_the_cpu) == 4


def test_an_index_is_that_of_the_cpu(minilm, tmp_path):
    lines = (WORLD / "corpus.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = ["--corpus", str(tmp_path / "corpus.jsonl"), "--encoder", str(minilm), "--output"]
    assert index.main([*run, str(tmp_path / "cpu"), "--device", "cpu"]) == 0
    card = on_card(index.main, [*run, str(tmp_path / "cuda")])
    files = [{path.name: path.read_bytes() for path in (tmp_path / device).iterdir()} for device in ("cpu", "cuda")]
    assert files[0] == files[1] and card.counts.operations > 0


@pytest.mark.parametrize("algorithm", [[], ["--algorithm", "grpo"]])
def test_a_plan_knows_what_is_free(tmp_path, algorithm):
    budgets = []
    for gib in (2, 3):
        card = SimulatedCuda(free=gib * GIB)
        on_card(plan.main, ["--model", "tiny", *algorithm, "--output", str(tmp_path / str(gib))], card)
        budgets.append(json.loads((tmp_path / str(gib) / "plan.json").read_text(encoding="utf-8"))["budget_mib"])
        assert card.counts.kernels == 0
    assert budgets[1] - budgets[0] == 1024 and budgets[0] > 1024
