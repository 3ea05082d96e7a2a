"""Checks of a GPU: that PyTorch can use it, which attention kernels run, and the memory that is not tensors."""

import torch

from r3lite.checks.finding import Finding, judged, skipped
from r3lite.checks.sample import padded, sentences, tiny
from r3lite.devices.live_tensors import MIB, UncompiledMode
from r3lite.devices.precision import BUILDS, Precision, has_nvidia_card
from r3lite.memory import cuda_parts
from r3lite.models.kv_cache import CachePass, KVCache, Prefill
from r3lite.models.packing import Pack

REBUILD = f"Install a build of PyTorch for it: {BUILDS}"


def usable(precision: Precision) -> Finding:
    """Checks whether PyTorch can use the machine's NVIDIA card, if it has one."""
    if precision.device.type == "cuda":
        return _built_for(torch.cuda.get_device_capability(precision.device))
    if torch.cuda.is_available():
        return skipped(f"checked on {precision.device.type}; there is also an NVIDIA GPU")
    if not has_nvidia_card():
        return skipped("no NVIDIA GPU found")
    if torch.version.cuda is None:
        return judged(False, "there is an NVIDIA GPU, but PyTorch was built without CUDA", REBUILD)
    message = f"there is an NVIDIA GPU, but PyTorch, built for CUDA {torch.version.cuda}, cannot use it"
    return judged(False, message, "Update the GPU driver, or install a build of PyTorch for an older CUDA.")


def _built_for(capability: tuple[int, int]) -> Finding:
    """Checks whether PyTorch's build has kernels for a compute capability (major, minor).

    Kernels (`sm_80`) run if they are for the same major version, and for the same or a lower minor version. Code that
    the driver compiles (`compute_80`) runs if it is for the same or any lower version.
    """
    major, minor = capability
    version = 10 * major + minor
    targets = torch.cuda.get_arch_list() if torch.backends.cuda.is_built() else []  # such as sm_80, compute_90
    sound = not targets  # a build that names no targets is not judged
    for target in targets:
        kind, _, number = target.partition("_")
        target_version = int("".join(filter(str.isdigit, number)))
        same_major = target_version // 10 == major
        if target_version <= version and (kind == "compute" or same_major):
            sound = True
    message = f"compute capability {major}.{minor}; PyTorch has kernels for {', '.join(targets) or '?'}"
    return judged(sound, message, f"The GPU is too old or too new for this PyTorch. {REBUILD}")


class _KernelRecorder(UncompiledMode):
    """Records which attention kernels run in its block.

    Fused kernels are operators with their own names. The math kernel is recognized by its softmax.
    """

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("_softmax", "_safe_softmax"):
            self.names.add("math")
        elif name.startswith("_scaled_dot_product_") and not name.endswith("_backward"):
            kind = name.removeprefix("_scaled_dot_product_").partition("_attention")[0]
            self.names.add("cpu" if name.endswith("_for_cpu") else kind)
        return function(*args, **(kwargs or {}))


def attention_kernels(precision: Precision) -> Finding:
    """Checks which kernel attention runs with each mask, in training and otherwise.

    It must never be the math kernel. On cards before Ampere it must be the memory-efficient kernel.
    """
    model = tiny(precision)
    rows = sentences()
    device = precision.device
    rows[1] = rows[0][:48] + rows[1]  # a prefix that the pack below stores once
    kernels_by_mask: dict[str, str] = {}  # such as "efficient", or "efficient+math" if several run

    def record(mask: str, ids: torch.Tensor, context: Pack | CachePass | None = None) -> None:
        """Runs the model on tokens; `context` is what makes its mask, None for a causal one."""
        with _KernelRecorder() as recorder:
            with precision.autocast():
                hidden = model(ids, context)
            if hidden.requires_grad:
                hidden.backward(torch.ones_like(hidden))  # the backward pass, too, needs a kernel that takes the mask
        kernels_by_mask[mask] = "+".join(sorted(recorder.names)) or "none"

    for grad in (False, True):
        model.model.embed_tokens.requires_grad_(grad)  # all else is frozen, so that otherwise there is no backward pass
        suffix = " in training" if grad else ""
        with torch.set_grad_enabled(grad):
            record("causal" + suffix, padded(rows, device))
            pack = Pack.of(rows, device)
            record("shared prefix" + suffix, pack.tokens, pack)
    with torch.no_grad():
        cache = KVCache.of(model, 1)
        stretches = {"prompt": rows[0][:41], "documents": rows[0][41:100]}
        for mask, tokens in stretches.items():
            prefill = Prefill(cache, [(0, tokens)])
            record(mask, prefill.tokens, prefill)
        next_token = torch.tensor([[rows[0][100]]], device=device)
        record("decoding", next_token, cache.decode(1))
    return _judged_kernels(kernels_by_mask, device)


def _judged_kernels(kernels_by_mask: dict[str, str], device: torch.device) -> Finding:
    """Returns ok if no mask runs the math kernel and, on a card before Ampere, every mask runs the efficient kernel."""
    sound = {"flash", "efficient", "cpu"}  # tests simulate a card on the CPU, whose kernel is "cpu"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        sound = {"efficient", "cpu"}
    unsound = []
    for mask, kernels in kernels_by_mask.items():
        if not set(kernels.split("+")) <= sound:
            unsound.append(mask)
    if unsound:
        message = ", ".join(f"{mask}: {kernels_by_mask[mask]}" for mask in unsound)
        return judged(False, message, "Memory grows with T^2 there: use short rows, and report it with doctor.json.")
    masks_by_kernel: dict[str, list[str]] = {}
    for mask, kernel in kernels_by_mask.items():
        masks_by_kernel.setdefault(kernel, []).append(mask)
    if len(masks_by_kernel) == 1:
        (kernel,) = masks_by_kernel
        return judged(True, f"all {len(kernels_by_mask)} masks use the fused kernel `{kernel}`")
    return judged(True, "; ".join(f"{kernel}: {', '.join(masks)}" for kernel, masks in masks_by_kernel.items()))


def beside_tensors(
    precision: Precision,
    driver: dict[str, str],
    measured: dict[str, float],
) -> Finding:
    """Compares the memory of the card that is not tensors with what plans reserve for it.

    The message names each part; what is judged is the sum of the parts, without fragmentation. Runs after all other
    checks. `driver` are the driver's facts from before CUDA was used (`machine.ask_driver`). `measured` has the figures
    of the other checks.
    """
    if precision.device.type != "cuda":
        return skipped("for CUDA GPUs only")
    if not torch.cuda.memory_reserved():
        return skipped("PyTorch's allocator reports no sizes here")
    sizes: dict[str, float] = {}  # MiB
    if "used_mib" in driver:
        free, total = torch.cuda.mem_get_info(precision.device)
        outside_allocator = total - free - torch.cuda.memory_reserved()
        sizes["context"] = outside_allocator / MIB - float(driver["used_mib"])  # the CUDA context
    if hasattr(torch.backends.cuda, "cublas_workspace_size"):  # since PyTorch 2.13
        sizes["cuBLAS workspace"] = cuda_parts.THREADS * torch.backends.cuda.cublas_workspace_size() / MIB
    if measured.get("graph_pools_mib"):
        sizes["graph pools"] = measured["graph_pools_mib"]
    # `captured` has the bytes of tensors in CUDA graphs. The tiny model has few: 1 gives the least pool. `tensors`
    # counts for the fragmentation alone, which is compared below.
    planned_parts = cuda_parts.beside_tensors(tensors=0, captured=1, card=cuda_parts.beside_of_this_card())
    planned = {part: size / MIB for part, size in planned_parts.items() if part in sizes}
    shares = [f"{part} {size:,.0f} of {planned[part]:,.0f}" for part, size in sizes.items()]
    if "fragmentation" in measured:
        shares.append(f"fragmentation {measured['fragmentation']:.0%} of {cuda_parts.FRAGMENTATION:.0%}")
    remedy = "Plans reserve too little here: pass a lower --vram-budget, and report it with doctor.json."
    figures = {f"{part} MiB": size for part, size in sizes.items()}
    is_enough = sum(sizes.values()) <= sum(planned.values())
    return judged(is_enough, f"MiB, measured of planned: {', '.join(shares)}", remedy, **figures)
