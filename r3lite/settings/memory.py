"""Settings of the memory budget and of what is traded for it."""

from dataclasses import dataclass
from typing import Literal

from r3lite.core.config import Count, Free, Section, Whole


@dataclass(frozen=True)
class MemorySettings(Section):
    """Memory. Sizes that are not given are chosen automatically: the fastest that fit."""

    # Three are free, as a checkpoint holds how the work is divided and whether the base is in NF4; see
    # memory/shrinking.py.
    vram_budget: Free[str | None] = None
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
