"""Settings of the base model, of the LoRA adapter, and of the memory that they may take."""

from typing import Annotated, ClassVar, Literal, get_args

from r3lite.core.cache import CACHE
from r3lite.core.config import (
    ANY,
    Alias,
    Basic,
    Bounds,
    Count,
    Fraction,
    Free,
    InputPath,
    OfRun,
    Positive,
    Section,
    Whole,
)
from r3lite.core.inherited import adapter_fault
from r3lite.core.needs import Needs, NeedsOthers
from r3lite.settings.conditions import trains, tunes_adapter

ADAPTER = InputPath("run", "Pass a run folder, or the adapter/ in it.", fault=adapter_fault)
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class ModelSettings(Section):
    """Model."""

    implied: ClassVar = {"adapter": {ANY: {"worked_example": False}}}
    needs: ClassVar = (NeedsOthers("compile", "a run without --no-lora", tunes_adapter),)

    model: Basic[OfRun[str]] = "Qwen/Qwen2.5-0.5B-Instruct"
    """folder, hub id, GGUF file, or tiny. GGUF needs the extra gguf; tiny is the model that comes with r3lite"""
    adapter: Basic[Annotated[str | None, ADAPTER]] = None
    """LoRA adapter: a run folder or its adapter/"""
    dtype: Basic[Literal["auto", "fp32", "bf16", "fp16"]] = "auto"
    """precision of the frozen base. Autocast has it, too; auto: bf16 where that is fast, else fp16 (on a CPU fp32)"""
    device: Basic[Literal["auto", "cpu", "cuda", "mps"]] = "auto"
    """auto: cuda if available, else mps, else cpu"""
    thinking: OfRun[Literal["auto", "on", "off"]] = "auto"
    """let the model write a thought in <think> before each turn, if its chat template has a switch for it (Qwen3);
    auto: off. Thoughts count towards --max-new-tokens and are not part of a step"""
    compile: bool = False
    """use torch.compile to dequantize an NF4 base on a CUDA GPU; compiling can take minutes at the start"""


class LoraSettings(Section):
    """LoRA adapter (arXiv 2106.09685)."""

    implied: ClassVar = {"no_lora": {"True": {"learning_rate": 2e-5, "gradient_accumulation": 1}}}
    needs: ClassVar = (
        Needs("", "a run without --no-lora", lambda s: not s.no_lora, but="no_lora"),
        NeedsOthers(
            "lora_dropout",
            "sft; ppo must train the policy that it sampled from",
            lambda s: s.command == "sft",
            harmful=True,
        ),
    )

    no_lora: bool = False
    """sft: train all weights, in bf16 or fp32, instead of an adapter; the run folder then has model/ for --model"""
    lora_r: Basic[Annotated[int, Bounds(low=1, high=4096)]] = 8
    """rank of the LoRA adapter. With --adapter, that adapter's own rank is used, and a different --lora-r is an
    error"""
    lora_alpha: Basic[Positive] = 16.0
    """scale of the LoRA adapter. The adapter's output is multiplied by alpha / r"""
    lora_dropout: Fraction = 0.0
    """dropout before the adapter; SFT only, because RL must train the policy that it sampled from. The dropout masks,
    and so the results, depend on the number of processes (torchrun)"""
    lora_targets: tuple[Projection, ...] = get_args(Projection)
    """projections that get an adapter"""
    rslora: bool = False
    """multiply by alpha / sqrt(r) instead (arXiv 2312.03732)"""


class MemorySettings(Section):
    """Memory (by default, the fastest sizes that fit are chosen)."""

    needs: ClassVar = (
        NeedsOthers("recompute_layers offload", "sft or ppo", trains),
        NeedsOthers("loss_chunk", "sft, ppo or --teacher-logprobs", lambda s: trains(s) or s.teacher_logprobs),
        Needs("nf4_cache", "--quantize auto or nf4", lambda s: s.quantize != "none"),
        NeedsOthers("nf4_cache stream_layers", "a run without --no-lora", tunes_adapter),
        NeedsOthers("quantize", "a run without --no-lora", lambda s: tunes_adapter(s) or s.quantize == "none"),
        NeedsOthers(
            "micro_batch_tokens",
            "a run without --no-lora, in which all rows of a step are one pass",
            tunes_adapter,
            harmful=True,  # with --no-lora each pass of a step changes the weights
        ),
        NeedsOthers("recompute_layers", "a run without --no-lora, which recomputes all layers", tunes_adapter),
    )

    # `vram_budget`, `quantize`, `nf4_cache` and `stream_layers` are free, because a checkpoint itself has the memory
    # figures of the run and whether the base is in NF4; see memory/shrinking.py.
    vram_budget: Basic[Annotated[Free[str | None], Alias("memory_budget")]] = None
    """maximum memory, such as 1300MiB (default: 4GiB). The default is less if less is free on the device"""
    quantize: Basic[Free[Literal["auto", "none", "nf4"]]] = "auto"
    """4-bit base; auto: if it does not fit without. This is QLoRA (arXiv 2305.14314)"""
    nf4_cache: Free[str | None] = CACHE
    """folder that caches NF4 weights for the next start; none: quantize at every start. `doctor --clear-cache` empties
    it"""
    recompute_layers: Whole | None = None
    """layers whose activations are recomputed in the backward pass: less memory, but up to a third more time"""
    micro_batch_tokens: Count | None = None
    """maximum tokens of a forward and backward pass; a longer row gets a pass of its own"""
    loss_chunk: Count | None = None
    """rows of logits in memory at a time"""
    mlp_tile: Count | None = None
    """tokens whose MLP activations are in memory at a time, where they are not kept for the backward pass"""
    offload: Literal["auto", "on", "off"] = "auto"
    """keep layer inputs in the host's memory until the backward pass needs them (CUDA)"""
    stream_layers: Free[bool] = False
    """keep the layers in the host's memory and copy two at a time to the device; in NF4, unless --quantize none"""
