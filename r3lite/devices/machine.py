"""What a machine is: processor, card, driver, PyTorch's build. Facts only, and none that names its user."""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch

from r3lite.devices.live_tensors import MIB
from r3lite.devices.precision import dtype_name, resolve_dtype

# What nvidia-smi is asked for: its names, and ours. A value that a driver does not tell is left out.
ASKED = {
    "driver_version": "driver",
    "pstate": "power_state",
    "power.draw": "watts",
    "enforced.power.limit": "watts_limit",
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "clock_mhz_limit",
    "temperature.gpu": "celsius",
    "memory.used": "used_mib",
}


@dataclass(frozen=True)
class Card:
    """A CUDA card. Sizes are in MiB."""

    name: str
    capability: str
    total_mib: int
    free_mib: int
    pins_memory: bool  # whether the host's memory can be pinned for it
    told: dict[str, str] = field(default_factory=dict)  # by the driver, see ASKED


@dataclass(frozen=True)
class Machine:
    """Where r3lite runs. Sizes are in MiB."""

    system: str
    processor: str
    cores: int
    threads: int  # that PyTorch uses
    memory_mib: int | None
    python: str
    torch: str
    cuda: str | None  # that PyTorch was built for
    device: str
    default_dtype: str  # of `--dtype auto`: bf16 if the device has it natively
    card: Card | None = None

    def lines(self) -> list[tuple[str, str]]:
        """For people: what, and which."""
        memory = "" if self.memory_mib is None else f", {self.memory_mib / 1024:.1f} GiB"
        build = f"CUDA {self.cuda}" if self.cuda else "no CUDA"
        found = [
            ("system", f"{self.system}, Python {self.python}"),
            ("processor", f"{self.processor}, {self.cores} cores, {self.threads} threads used{memory}"),
            ("PyTorch", f"{self.torch}, {build}"),
            ("device", f"{self.device}, default precision {self.default_dtype}"),
        ]
        if self.card:
            pinned = "can be pinned" if self.card.pins_memory else "cannot be pinned: offloading is slower"
            found += [
                ("card", f"{self.card.name}, compute capability {self.card.capability}"),
                ("card's memory", f"{self.card.total_mib:,} MiB, {self.card.free_mib:,} free; the host's {pinned}"),
                ("driver", self._driver(self.card.told)),
            ]
        return found

    @staticmethod
    def _driver(told: dict[str, str]) -> str:
        if not told:
            return "nvidia-smi is not here or says nothing"
        parts = [told.get("driver", "version unknown")]
        for name, form in {"power_state": "{}", "watts": "{} W", "clock_mhz": "{} MHz", "celsius": "{} C"}.items():
            if name in told:
                limit = f" of {told[name + '_limit']}" if name + "_limit" in told else ""
                parts.append(form.format(told[name] + limit))
        return ", ".join(parts)


def describe(device: torch.device, told: dict[str, str]) -> Machine:
    """This machine; `told` is what `ask_driver` found."""
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_mib=None if (memory := host_memory()) is None else memory // MIB,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        device=device.type,
        default_dtype=dtype_name(resolve_dtype("auto", device)),
        card=_card(device, told) if device.type == "cuda" else None,
    )


def ask_driver(card: str = "0") -> dict[str, str]:
    """What nvidia-smi says of a card, by its number or UUID: see ASKED. Empty if there is no nvidia-smi, or no answer.

    Ask before CUDA is used: `used_mib` has what other programs hold then, and later this one's context too.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = [f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits", f"--id={card}"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs or is half removed
        return {}
    values = [value.strip() for value in done.stdout.strip().split("\n")[0].split(",")]
    if done.returncode or len(values) != len(ASKED):
        return {}
    return {ours: value for ours, value in zip(ASKED.values(), values) if value and "[" not in value}  # [N/A]


def _card(device: torch.device, told: dict[str, str]) -> Card:
    free, total = torch.cuda.mem_get_info(device)
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    name = torch.cuda.get_device_name(device)
    return Card(name, capability, total // MIB, free // MIB, _pins_memory(), told)


def _pins_memory() -> bool:
    try:
        torch.empty(1 << 20, pin_memory=True)
        return True
    except RuntimeError:  # WSL and containers
        return False


def processor() -> str:
    """The processor's name, of /proc/cpuinfo if there is one."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def host_memory() -> int | None:
    """Bytes of the host's memory; None if the system does not say it this way."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
