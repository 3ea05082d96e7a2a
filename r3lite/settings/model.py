"""Settings of the base model, of the LoRA adapter, and of the memory that they may take."""

from typing import Annotated, ClassVar, Literal, get_args

from r3lite.core.config import ANY, Alias, Bounds, Count, Fraction, Free, Positive, Section, Whole

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class ModelSettings(Section):
    """Model."""

    implied: ClassVar = {"adapter": {ANY: {"worked_example": False}}}

    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """folder, GGUF file (extra gguf), hub id, or tiny (the shipped checkpoint)"""
    adapter: str | None = None
    """LoRA adapter to start from: a run folder or its adapter/"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """precision of the frozen base and of autocast; auto: bf16 if the device has it, else fp16 (on a CPU fp32)"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda if there is one, else mps, else cpu"""
    thinking: Literal["auto", "on", "off"] = "auto"
    """thoughts in <think> before each turn, of a model whose chat template can switch them (Qwen3); auto: off. They are
    part of --max-new-tokens, and of no step"""
    compile: bool = False
    """torch.compile for the dequantization of a base in NF4 on a CUDA card; takes up to minutes at the start"""


class LoraSettings(Section):
    """LoRA adapter (arXiv 2106.09685)."""

    implied: ClassVar = {"no_lora": {"True": {"learning_rate": 2e-5, "gradient_accumulation": 1}}}

    no_lora: bool = False
    """sft: train all weights, in bf16 or fp32, in place of an adapter; the run folder then has model/ for --model"""
    lora_r: Annotated[int, Bounds(low=1, high=4096)] = 8
    """rank; --adapter keeps its own shape, and another that a flag or file asks for (not the preset) is refused"""
    lora_alpha: Positive = 16.0
    """scale; the adapter is multiplied by alpha / r"""
    lora_dropout: Fraction = 0.0
    """dropout before the adapter, in SFT only: RL must train the policy that it sampled from; masks, and so results,
    depend on the number of processes (torchrun)"""
    lora_targets: tuple[Projection, ...] = get_args(Projection)
    """projections that get an adapter"""
    rslora: bool = False
    """scale by alpha / sqrt(r) instead (arXiv 2312.03732)"""


class MemorySettings(Section):
    """Memory. Sizes that are not given are chosen automatically: the fastest that fit."""

    # Four are free, as a checkpoint holds how the work is divided and whether the base is in NF4; see
    # memory/shrinking.py.
    vram_budget: Annotated[Free[str | None], Alias("memory_budget")] = None
    """most memory, such as 4GiB or 1300MiB; by default 4GiB, or what is free on the device, less a margin"""
    quantize: Free[Literal["auto", "none", "nf4"]] = "auto"
    """4-bit base (QLoRA, arXiv 2305.14314); auto: only if the run does not fit without"""
    nf4_cache: Free[str | None] = "~/.cache/r3lite"
    """folder that keeps NF4 weights for the next start; none: weights are quantized at every start"""
    recompute_layers: Whole | None = None
    """layers whose activations are recomputed in the backward pass: less memory; for all layers, a third more time"""
    micro_batch_tokens: Count | None = None
    """most tokens of one pass; a longer row forms its own"""
    loss_chunk: Count | None = None
    """rows of logits in memory at a time"""
    mlp_tile: Count | None = None
    """tokens whose MLP activations are in memory at a time, if they are not kept"""
    offload: Literal["auto", "on", "off"] = "auto"
    """keep layer inputs in the host's memory until the backward pass needs them (CUDA)"""
    stream_layers: Free[bool] = False
    """keep the layers, in NF4 unless --quantize none, in the host's memory: two at a time are on the device"""
