"""Settings of the base model and of the LoRA adapter."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from r3lite.core.config import ANY, Bounds, Fraction, Positive, Section

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
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
    compile: bool = False
    """layers by torch.compile in passes without gradients (decoding, scoring, validation), and on a card NF4 weights'
    dequantization in all passes; takes up to minutes at the start. The rest of passes with gradients is not compiled.
    On a CPU it helps if one episode is sampled at a time in bf16"""


@dataclass(frozen=True)
class LoraSettings(Section):
    """LoRA adapter (arXiv 2106.09685)."""

    lora_r: Annotated[int, Bounds(low=1, high=4096)] = 8
    """rank; --adapter keeps its own shape, and another that a flag or file asks for (not the preset) is refused"""
    lora_alpha: Positive = 16.0
    """scale; the adapter is multiplied by alpha / r"""
    lora_dropout: Fraction = 0.0
    """dropout before the adapter, in SFT only: RL must train the policy that it sampled from"""
    lora_targets: tuple[Projection, ...] = get_args(Projection)
    """projections that get an adapter"""
    rslora: bool = False
    """scale by alpha / sqrt(r) instead (arXiv 2312.03732)"""
