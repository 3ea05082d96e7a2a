"""What a machine is: processor, card, driver, PyTorch's build. Nothing here tells who uses the machine."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from r3lite.devices.live_tensors import MIB
from r3lite.devices.precision import dtype_name, resolve_dtype

# The values that nvidia-smi is asked for: its name of each, and our name. A value that the driver does not report is
# left out.
DRIVER_VALUES = {
    "driver_version": "driver",
    "pstate": "power_state",
    "power.draw": "watts",
    "enforced.power.limit": "watts_limit",
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "clock_mhz_limit",
    "temperature.gpu": "celsius",
    "memory.used": "used_mib",
}


def describe(device: torch.device, driver: dict[str, str]) -> dict[str, Any]:
    """Returns the facts of this machine, as doctor.json has them. Sizes are in MiB; `driver` is from `ask_driver`."""
    memory = host_memory()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),  # that PyTorch uses
        "memory_mib": None if memory is None else memory // MIB,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,  # that PyTorch was built for
        "device": device.type,
        "default_dtype": dtype_name(resolve_dtype("auto", device)),
        "card": _card(device, driver) if device.type == "cuda" else None,
    }


def _card(device: torch.device, driver: dict[str, str]) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "total_mib": total // MIB,
        "free_mib": free // MIB,
        "pins_memory": _pins_memory(),  # whether the host's memory can be pinned
        "told": driver,  # what the driver reports, see DRIVER_VALUES
    }


def lines(machine: dict[str, Any]) -> dict[str, str]:
    """Returns the facts of `describe` as texts for people, by their labels."""
    memory = ""
    if machine["memory_mib"] is not None:
        memory = f", {machine['memory_mib'] / 1024:.1f} GiB"
    build = f"CUDA {machine['cuda']}" if machine["cuda"] else "no CUDA"
    texts = {
        "system": f"{machine['system']}, Python {machine['python']}",
        "processor": f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads used{memory}",
        "PyTorch": f"{machine['torch']}, {build}",
        "device": f"{machine['device']}, default precision {machine['default_dtype']}",
    }
    card = machine["card"]
    if card:
        pinned = "can be pinned" if card["pins_memory"] else "cannot be pinned, so offloading is slower"
        texts["GPU"] = f"{card['name']}, compute capability {card['capability']}"
        texts["GPU memory"] = f"{card['total_mib']:,} MiB, {card['free_mib']:,} free; host memory {pinned}"
        texts["driver"] = _driver_line(card["told"])
    return texts


def _driver_line(values: dict[str, str]) -> str:
    """Returns what `ask_driver` returned as one line, such as `550.54, P8, 12.3 of 60.0 W`."""
    if not values:
        return "unknown: nvidia-smi is missing or failed"
    parts = [values.get("driver", "version unknown")]
    units = {"power_state": "", "watts": " W", "clock_mhz": " MHz", "celsius": " C"}
    for name, unit in units.items():
        if name not in values:
            continue
        text = values[name]
        if name + "_limit" in values:
            text += f" of {values[name + '_limit']}"
        parts.append(text + unit)
    return ", ".join(parts)


def ask_driver(card: str = "0") -> dict[str, str]:
    """Returns what nvidia-smi reports about a card, see DRIVER_VALUES; {} if it fails. `card`: its number or UUID.

    Call this before CUDA is used: later `used_mib` has not only the memory of other programs, but also that of this
    program's CUDA context.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = [f"--query-gpu={','.join(DRIVER_VALUES)}", "--format=csv,noheader,nounits", f"--id={card}"]
    try:
        process = subprocess.run([program, *query], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs or is half removed
        return {}
    line = process.stdout.strip().split("\n")[0]
    values = [value.strip() for value in line.split(",")]
    if process.returncode or len(values) != len(DRIVER_VALUES):
        return {}
    reported = {}
    for name, value in zip(DRIVER_VALUES.values(), values):
        if value and "[" not in value:  # [N/A] stands for a value that the driver does not report
            reported[name] = value
    return reported


def _pins_memory() -> bool:
    """Returns True if the host's memory can be pinned. Some containers and WSL refuse it."""
    try:
        torch.empty(1 << 20, pin_memory=True)
        return True
    except RuntimeError:
        return False


def processor() -> str:
    """Returns the processor's name, from /proc/cpuinfo if there is one."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def host_memory() -> int | None:
    """Returns the bytes of the host's memory; None if the system does not have these sysconf names, as on Windows."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
