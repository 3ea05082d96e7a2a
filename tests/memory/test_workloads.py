"""Workloads: what the planner is told of a command's settings and of the adapter it starts from."""

import shutil
from dataclasses import replace

from safetensors.torch import load_file, save_file

from r3lite.core.grant import Memory
from r3lite.memory import planner, workloads
from r3lite.memory.known_models import QWEN_TOKENS
from r3lite.models import lora, nf4
from r3lite.models.weights import resolve_folder
from r3lite.settings import (
    JudgeSettings,
    LengthSettings,
    LoraSettings,
    ModelSettings,
    PpoConfig,
    RetrievalSettings,
    RLSettings,
    SftConfig,
    SftSettings,
)
from tests.packed_folders import write_packed


def test_workloads_follow_the_settings():
    model, lora_settings = ModelSettings(dtype="bf16", device="cpu"), LoraSettings(lora_r=4)
    sft = SftConfig(model=model, sft=SftSettings(max_length=1000, batch_size=3), lora=lora_settings)
    w = workloads.sft_workload(sft, longest=700)
    assert (w.row_tokens, w.rows, w.lora_r, w.element, w.episodes, w.vocabulary) == (700, 3, 4, 2, 0, QWEN_TOKENS)
    assert workloads.sft_workload(sft, longest=7000).row_tokens == 1000
    for algorithm, kl, adapter, expected in (
        ("ppo", 0.1, "run", (True, True, 2)),
        ("grpo", 0.1, "run", (False, True, 2)),
        ("grpo", 0.1, None, (False, True, 1)),  # the reference is the bare base
        ("ppo", 0.0, "run", (True, False, 1)),
    ):
        rl = RLSettings(algorithm=algorithm, kl_beta=kl, batch_size=3, num_generations=5, micro_batch_size=2)
        config = PpoConfig(model=replace(model, adapter=adapter), rl=rl, lora=lora_settings)
        w = workloads.rl_workload(config, critic=algorithm == "ppo")
        assert (w.critic, w.scores, w.adapters) == expected
        assert (w.episodes, w.row_tokens, w.rows) == (15, 4096, 2)
        assert w.reads == 5 * (160 + workloads.MARKUP)
        assert w.writes == config.lengths.most_sampled == 7 * 256  # all turns that there can be
        assert not w.keeps_step
    rl = RLSettings(algorithm="grpo", kl_beta=0.0, kl_budget=0.001)
    w = workloads.rl_workload(PpoConfig(model=replace(model, adapter="run"), rl=rl), critic=False)
    assert (w.scores, w.adapters, w.keeps_step) == (True, 2, True)
    assert planner.weight_bytes(w, True) < planner.weight_bytes(w, False)


def test_the_adapter_to_start_from_is_planned_for_with_its_own_rank(small_model, tmp_path):
    """`ppo --adapter` after `sft --lora-r 64` was planned with the default rank, and ran out of memory."""
    model = small_model()
    lora.add_adapter(model, "policy", 3, 6, targets=("q_proj", "down_proj"))
    lora.save_adapter(model, "policy", tmp_path / "run" / "adapter", "x")
    settings = ModelSettings(dtype="bf16", device="cpu", adapter=str(tmp_path / "run"))
    limits = LengthSettings(), RetrievalSettings()
    for w in (
        workloads.sft_workload(SftConfig(model=settings)),
        workloads.rl_workload(PpoConfig(model=settings), critic=True),
        workloads.evaluate_workload(settings, *limits, questions=5),
    ):
        assert (w.lora_r, w.targets) == (3, ("q_proj", "down_proj"))


def test_expanded_episodes_are_in_the_passes_that_are_planned():
    """Eight are sampled from their prompts, and twelve may go through the model together."""
    rl = RLSettings(algorithm="grpo", batch_size=2, num_generations=4, mini_batch_size=16, expand_limit=4)
    config = PpoConfig(model=ModelSettings(dtype="bf16", device="cpu"), rl=rl)
    w = workloads.rl_workload(config, critic=False)
    assert (w.episodes, w.expanded, w.rows, w.step_rows, w.scored_rows) == (8, 4, 12, 12, 12)
    config = replace(config, rl=replace(rl, expand_limit=99, mini_batch_size=4))
    small = workloads.rl_workload(config, critic=False)
    assert (small.expanded, small.rows, small.step_rows, small.scored_rows) == (8, 4, 4, 16)


def test_a_judge_and_a_teacher_in_a_folder_in_nf4_are_planned_as_that(small_model, write_folder, tmp_path):
    """A judge of the hub was planned as dense, and what bitsandbytes' takes more than ours was not counted."""
    dense = ("model.layers.1.mlp.up_proj",)
    model = small_model(hidden_size=128, intermediate_size=320)
    folder = str(write_packed(write_folder, model, tmp_path / "packed", dense=dense))
    shutil.copy(resolve_folder("tiny") / "tokenizer.json", folder)
    settings = ModelSettings(dtype="bf16", device="cpu")
    rl = RLSettings(algorithm="dgpo", teacher=folder, teacher_quantize="none")
    judge = JudgeSettings(judge="local", judge_model=folder, judge_quantize="none")
    w = workloads.rl_workload(PpoConfig(model=settings, rl=rl, judge=judge), critic=False)
    assert w.packed is None and w.teacher.nf4 and w.judge.memory.nf4
    numbers = sum(layer.weight.numel() for name, layer in model.named_modules() if name.endswith("_proj"))
    assert w.teacher.packed == w.judge.packed == nf4.Packed(320 * 128, (numbers - 320 * 128) // 64)
    works = planner.as_judge(w, w.judge), planner.as_teacher(w, Memory(), w.teacher)[0]
    assert [work.packed for work in works] == [w.judge.packed] * 2


def test_a_plan_counts_a_head_of_its_own_and_needs_no_weights(tmp_path):
    folder = shutil.copytree(resolve_folder("tiny"), tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    assert not workloads.shape_of(str(folder))[0].tie_word_embeddings
    (folder / "model.safetensors").unlink()
    assert workloads.shape_of(str(folder))[0].tie_word_embeddings
