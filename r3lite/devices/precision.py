"""Which device and number format a run uses, and what depends on the format: autocast, loss scaling, clipping.

Knows no model and no loss. The frozen base is in the run's dtype or in NF4; an adapter and a critic are in fp32. Full
fine-tuning trains the base's weights in the run's dtype.
"""

import math
import platform
import shutil
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from r3lite.core.errors import NotFinite, R3LiteError
from r3lite.core.records import Record, Source

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The loss scale starts at 2^16 and halves at each overflow: after this many in a row it is below 1 and helps no longer.
MAX_SKIPS_IN_A_ROW = 20
BUILDS = "https://pytorch.org/get-started/locally/"
CPU_INFO = Path("/proc/cpuinfo")


class NonFiniteGradients(NotFinite):
    """Gradients were inf or nan, and no smaller loss scale can help.

    Nothing was updated, except in full fine-tuning (AdamW8), which updates some weights before it notices.
    """


def resolve_device(device: str) -> torch.device:
    """Returns the device of `--device`; `auto` is a CUDA card if there is one, else Apple's GPU, else the CPU.

    On CUDA, also switches off cuDNN's attention, which PyTorch prefers on Hopper and newer cards: cuDNN makes a
    new plan for every shape, and nearly every batch here has a new shape.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if device == "auto":
        device = next(name for name, is_available in available.items() if is_available)
        if device == "cpu":
            _warn_of_unused_card()
    if not available[device]:
        cause = f"--device is {device}, but this PyTorch ({torch.__version__}) finds no such device"
        raise R3LiteError(
            cause, f"Pass --device cpu, or install a build of PyTorch for it: {BUILDS}", code="device-absent"
        )
    if device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(device)


def has_nvidia_card() -> bool:
    """Returns True if the machine has NVIDIA's driver, even if this PyTorch cannot use the card."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def _warn_of_unused_card() -> None:
    """Warns if there is an NVIDIA card that this PyTorch cannot use: on Windows pip installs a build for the CPU."""
    if has_nvidia_card() and torch.version.cuda is None:
        cause = f"warning: there is an NVIDIA GPU, but this PyTorch ({torch.__version__}) was built without CUDA"
        remedy = f"Install a CUDA build (see {BUILDS}), or pass --device cpu to silence this warning."
        print(f"{cause}, so the CPU is used.\n  {remedy}", file=sys.stderr)


def _cpu_has_fast_bf16() -> bool:
    """Returns True if the processor multiplies bf16 faster than fp32.

    Emulated products are slower. So is AVX512-BF16 on an Intel Xeon (Emerald Rapids) without AMX, as in some virtual
    machines: 84 GFLOP/s a thread, where fp32 has 150. Other Intel processors without AMX were not measured.
    """
    if platform.machine().lower() not in ("x86_64", "amd64", "arm64", "aarch64"):
        return False
    # One of the tested versions of PyTorch lacks get_capabilities; on Linux, /proc/cpuinfo lists the same names.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    names = {name for name, value in capabilities.items() if value is True}
    is_intel = "Intel" in str(capabilities.get("cpu_name", ""))
    if not capabilities and CPU_INFO.exists():
        names = set(CPU_INFO.read_text(encoding="utf-8", errors="replace").split())
        is_intel = "GenuineIntel" in names
    if names & {"amx_bf16", "bf16"}:  # bf16: ARM's name
        return True
    return "avx512_bf16" in names and not is_intel


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in --dtype: fp32, bf16 or fp16."""
    return next(name for name, value in DTYPES.items() if value == dtype)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of `--dtype`. `auto` is bf16 if the device is fast in it, else fp16, or fp32 on a CPU."""
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)  # cards before Ampere emulate it, slowly
    elif device.type == "mps":
        has_bf16 = torch.backends.mps.is_macos_or_newer(14, 0)
    else:
        has_bf16 = _cpu_has_fast_bf16()
    if has_bf16:
        return torch.bfloat16
    return torch.float16 if device.type in ("cuda", "mps") else torch.float32


class Precision:
    """Forward, backward and optimizer step in one dtype: `with p.autocast(): loss`, `p.backward(loss)`, `p.step(...)`.

    fp16 runs with a gradient scaler, on a CPU too: a step whose gradients are not finite is skipped and counted, and
    the scale is halved. In other dtypes such gradients raise NonFiniteGradients before a weight is changed.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None
        self.skipped = 0  # steps of the whole run
        self.skipped_in_a_row = 0  # steps since the last one that was not skipped
        # Two flags for training/interrupts.py, which the training loop clears.
        self.changed_weights = False  # whether weights may have changed since then
        self.updating = False  # whether an update has begun since then, which other processes may complete

    def autocast(self) -> AbstractContextManager:
        """Returns a context in which matrix products are in the run's dtype; in fp32 one that does nothing."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a scalar loss to those of the parameters. In fp16 they are scaled until `step`."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def step(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], max_norm: float
    ) -> tuple[float, bool]:
        """Clips the gradients to `max_norm`, updates, and clears them.

        Returns their norm before clipping, and whether the step was skipped (fp16 only; the norm is then not finite).
        Raises NonFiniteGradients if the norm is not finite and there is no scaler, or at the last of MAX_SKIPS_IN_A_ROW
        skipped steps in a row.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(list(parameters), max_norm))
        finite = math.isfinite(norm)
        if self.scaler is None and not finite:
            optimizer.zero_grad(set_to_none=True)
            remedy = "Lower --learning-rate, or look for broken rows in --data; the latest checkpoint is not affected."
            raise NonFiniteGradients(
                f"the gradients are not finite (norm {norm}); nothing was updated", remedy, code="gradients-not-finite"
            )
        self.changed_weights = True
        if finite:
            # Not scaler.step(), which would wait for the device once more to look for overflows: the norm shows them.
            optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        self._count_skips(skipped=not finite)
        return norm, not finite

    def _count_skips(self, skipped: bool) -> None:
        """Counts a step that was skipped; raises NonFiniteGradients after MAX_SKIPS_IN_A_ROW in a row."""
        if not skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            cause = f"the gradients overflowed fp16 in {self.skipped_in_a_row} steps in a row, whatever the loss scale"
            raise NonFiniteGradients(
                cause, "Pass --dtype bf16 if the GPU supports it, else --dtype fp32.", code="fp16-overflow"
            )

    def state_dict(self) -> dict:
        """Returns the state that a checkpoint keeps, as JSON values."""
        return {
            "dtype": str(self.dtype),
            "device": self.device.type,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores a `state_dict`; raises R3LiteError if it is from a run with another dtype or kind of device."""
        saved = Record(state, Source("the checkpoint's precision", "Pass another checkpoint."))
        current = self.state_dict()
        for setting in ("dtype", "device"):
            if saved.text(setting) != current[setting]:
                cause = f"the checkpoint has {setting} {saved.text(setting)}, but this run has {current[setting]}"
                raise R3LiteError(
                    cause,
                    f"Pass the first run's --{setting}, or start a new run with --adapter.",
                    code="checkpoint-precision-differs",
                )
        self.skipped = saved.whole("skipped")
        self.skipped_in_a_row = saved.whole("skipped_in_a_row")
        if self.scaler is not None:
            saved_scaler = saved.record("scaler")
            scaler_state = self.scaler.state_dict()
            for key, value in scaler_state.items():
                if isinstance(value, int):  # growth_interval and its counter
                    scaler_state[key] = saved_scaler.whole(key)
                else:
                    scaler_state[key] = saved_scaler.number(key, low=0, above=True)
            self.scaler.load_state_dict(scaler_state)
