"""All checks, in the order in which they are made: what is wrong with an early one explains the later ones."""

from collections.abc import Callable
from dataclasses import dataclass

from r3lite.checks import card, numbers, runs
from r3lite.checks.finding import Finding
from r3lite.devices.precision import Precision


@dataclass(frozen=True)
class Check:
    """`run` looks at one thing in a precision and on its device; `about` says at what."""

    name: str
    about: str
    run: Callable[[Precision], Finding]


CHECKS = (
    Check("card", "whether PyTorch can use the machine's NVIDIA card", card.usable),
    Check("logits", "the shipped model in fp32, against the CPU and what was recorded", numbers.logits),
    Check("logits in 16 bits", "the shipped model in the run's dtype, against the CPU", numbers.logits_in_dtype),
    Check("attention kernels", "which kernel runs under each mask; never one of O(T^2) memory", card.attention_kernels),
    Check("cached decoding", "rows read piece by piece, against whole rows", numbers.cached_decode),
    Check("graphs", "decoding by CUDA graphs, against the model", numbers.graphs),
    Check("sampler", "log-probabilities of the sampler, against the trainer's", numbers.sampler),
    Check("NF4", "quantized weights and their products, against the CPU and the definition", numbers.nf4_weights),
    Check("offload", "activations in the host's memory, against activations kept", numbers.offload),
    Check("training", "steps of SFT in the run's dtype, against the CPU in fp32", runs.training),
    Check("training in fp16", "the same in fp16 with loss scaling", runs.training_in_fp16),
    Check("memory", "the peak of a short run, against its plan under an enforced budget", runs.memory),
    Check("resume", "a run left and resumed, against one that is not: equal to the bit", runs.resume),
)
# After the others, whose figures it takes: see card.beside_tensors.
BESIDE = ("beside the tensors", "the context, cuBLAS, graphs and fragments, against what plans hold back for them")
