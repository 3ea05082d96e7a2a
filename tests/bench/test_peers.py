"""Peers do the work that they are said to do: full lengths, no copies of a frozen head, both settings of SFT."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bench import contests, full_length, peers
from bench.contest import OURS, peak_mib
from r3lite.core.files import shipped
from r3lite.devices.precision import Precision
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rollout.sequence import Sequence
from tests.bench.conftest import VOCABULARY

pytest.importorskip("transformers")
pytest.importorskip("peft")

FP32 = Precision(torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def ordinary_tokens(monkeypatch):
    """Of the small model's vocabulary."""
    monkeypatch.setattr(full_length, "ORDINARY", (300, VOCABULARY))


@pytest.fixture
def peer_models(monkeypatch) -> list:
    """The models that peers generate with."""
    models, fold = [], peers.with_folded_head
    monkeypatch.setattr(peers, "with_folded_head", lambda model: models.append(fold(model)) or models[-1])
    return models


@pytest.mark.parametrize("merged", [False, True])
def test_generate_ends_no_turn_early(folder, peer_models, merged):
    work = peers.generate(folder, full_length.full_prompts(3, 8), 12, FP32, merged=merged)
    work()
    assert any("lora" in name for name, _ in peer_models[0].named_parameters()) is not merged


def test_a_peer_that_samples_fewer_tokens_stops_the_bench(folder, peer_models):
    work = peers.generate(folder, full_length.full_prompts(1, 8), 12, FP32)
    peer_models[0].generation_config.eos_token_id = [*range(VOCABULARY)]
    generate = peer_models[0].generate
    peer_models[0].generate = lambda min_new_tokens, **options: generate(**options)
    with pytest.raises(AssertionError, match="12 tokens each were to be sampled, not 1"):
        work()


def test_ours_samples_as_many_tokens_whatever_they_are(folder, monkeypatch):
    calls = []
    monkeypatch.setattr(contests, "check_lengths", lambda sequences, new: calls.append((sequences, new)))
    contests.Ours(folder, FP32).decode(3, 12, prompt=8)()
    ((sequences, new),) = calls
    assert new == 12 and [sum(s.action_mask) for s in sequences] == [12, 12, 12]


def test_episodes_of_another_length_stop_the_bench():
    sequence = Sequence(None, stream=None)
    sequence.observe([1, 2])
    sequence.write([3, 4, 5])
    full_length.check_lengths([sequence], 3)
    with pytest.raises(AssertionError, match=r"4 tokens each were to be sampled, not \[3\]"):
        full_length.check_lengths([sequence], 4)


def test_the_head_is_multiplied_once_for_all_rows_while_a_peer_generates(folder):
    def products(model) -> set[str]:
        """The operators that multiply by the head, whose output is as wide as the vocabulary."""
        ids = torch.full((16, 8), 5)
        with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, pad_token_id=0)
        heads = [e for e in profiler.events() if any(VOCABULARY in shape for shape in e.input_shapes)]
        return {e.name for e in heads} & {"aten::bmm", "aten::mm"}

    model = peers.peft_model(folder, FP32).eval()
    assert products(model) == {"aten::bmm"}
    assert products(peers.with_folded_head(model)) == {"aten::mm"}
    assert not model.get_output_embeddings().weight.requires_grad  # frozen again, for training


def test_a_group_of_trls_is_sampled_once_and_learned_from_in_mini_batches(folder, monkeypatch):
    """8 completions of one prompt, none of which ends early, and two optimizer steps of 4."""
    trl = pytest.importorskip("trl")
    groups, steps, folded = [], [], []
    trainer = peers.grpo_trainer(folder, 6, 5, episodes=8, rows=4, precision=FP32, steps=2)
    generate, compute = trainer._generate_and_score_completions, trainer.compute_loss
    trainer._generate_and_score_completions = lambda inputs: groups.append(generate(inputs)) or groups[-1]
    trainer.compute_loss = lambda model, inputs, **kwargs: steps.append(inputs) or compute(model, inputs, **kwargs)
    base, head = trainer.model.get_base_model(), trainer.model.get_output_embeddings().weight
    inner = base.generate
    base.generate = lambda **options: folded.append(head.requires_grad) or inner(**options)
    trainer.train()
    assert folded == [True] and not head.requires_grad
    assert isinstance(trainer, trl.GRPOTrainer)
    assert [group["completion_mask"].sum(1).tolist() for group in groups] == [[5] * 8]
    assert [tuple(step["completion_ids"].shape) for step in steps] == [(4, 5), (4, 5)]


@pytest.fixture
def trained_models(monkeypatch) -> list:
    """The models that peers train."""
    models, make = [], peers.peft_model
    monkeypatch.setattr(peers, "peft_model", lambda *arguments: models.append(make(*arguments)) or models[-1])
    return models


def assert_equal_adapters(models) -> None:
    """Two models have learned the same, and something."""
    first, second = ({name: p for name, p in model.named_parameters() if p.requires_grad} for model in models)
    assert all(torch.allclose(p, second[name], atol=1e-6) for name, p in first.items())
    assert any(p.any() for name, p in first.items() if "lora_B" in name)


def test_sft_without_checkpointing_holds_more_and_learns_the_same(folder, trained_models):
    recomputing, keeping = peers.sft(folder, 256, FP32)
    peaks = [peak_mib(work) for work in (recomputing, keeping, recomputing)]
    assert peaks[1] > 1.1 * peaks[0] and peaks[2] == pytest.approx(peaks[0], rel=0.02)
    trained_models.clear()
    for is_kept in (False, True):
        torch.manual_seed(0)  # of the adapter's first weights
        peers.sft(folder, 256, FP32)[is_kept]()
    assert_equal_adapters(trained_models)


def test_trls_loss_makes_the_same_steps(folder, trained_models):
    pytest.importorskip("trl")
    for fused in (False, True):
        torch.manual_seed(0)  # of the adapter's first weights
        recomputing, keeping = peers.sft(folder, 256, FP32, fused)
        recomputing()
        keeping()
    assert_equal_adapters(trained_models)


def test_rows_and_prompts_have_the_length_that_is_asked_for(folder, tmp_path):
    tokenizer = Tokenizer.load(folder)
    full_length.full_rows(folder, 200, tmp_path / "rows.jsonl")
    rows = [json.loads(line)["messages"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [len(tokenizer.chat(row)[0]) for row in rows] == [200] * 4
    assert [len(ids) for ids in full_length.full_prompts(3, 50)] == [50] * 3


def test_encoders_are_given_the_same_texts(minilm):
    pytest.importorskip("sentence_transformers")
    contest = contests.encoding(str(minilm), str(shipped("data", "world", "corpus.jsonl")), "cpu")  # compares vectors
    assert contest.contestants.keys() == {OURS, "sentence-transformers"} and contest.facts["mean_tokens"] > 10
