"""All checks, in the order in which they run: if an early one fails, this explains failures of later ones."""

from collections.abc import Callable
from dataclasses import dataclass

from r3lite.checks import card, numbers, runs
from r3lite.checks.finding import Finding
from r3lite.devices.precision import Precision


@dataclass(frozen=True)
class Check:
    """A check, as `doctor` runs and lists it."""

    name: str
    about: str  # what is checked
    run: Callable[[Precision], Finding]  # runs the check in a precision, on the precision's device


CHECKS = (
    Check("card", "whether PyTorch can use the machine's NVIDIA GPU", card.usable),
    Check("logits", "logits of the tiny model in fp32, against the CPU and recorded values", numbers.logits),
    Check("logits in 16 bits", "logits of the tiny model in the run's dtype, against the CPU", numbers.logits_in_dtype),
    Check("attention kernels", "which kernel each mask uses; never one with O(T^2) memory", card.attention_kernels),
    Check("cached decoding", "rows prefilled in pieces, against whole rows", numbers.cached_decode),
    Check("graphs", "decoding with CUDA graphs, against without", numbers.graphs),
    Check("sampler", "log-probabilities of the sampler, against the trainer's", numbers.sampler),
    Check("NF4", "quantized weights and their products, against the CPU and the definition", numbers.nf4_weights),
    Check("offload", "activations in the host's memory, against on the device", numbers.offload),
    Check("training", "SFT steps in the run's dtype, against the CPU in fp32", runs.training),
    Check("training in fp16", "the same in fp16 with loss scaling", runs.training_in_fp16),
    Check("memory", "peak memory of a short run, against its plan and budget", runs.memory),
    Check("resume", "a resumed run against an uninterrupted one: equal to the bit", runs.resume),
)
# Name and description of `card.beside_tensors`. It takes other arguments than the checks above, and runs after them, as
# it needs their figures.
BESIDE = ("beside the tensors", "CUDA context, cuBLAS, graphs and fragmentation, against what plans reserve for them")
