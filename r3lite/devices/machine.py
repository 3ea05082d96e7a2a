"""What a machine is: processor, card, driver, PyTorch's build. Facts only, and none that names its user."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

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


def describe(device: torch.device, driver: dict[str, str]) -> dict[str, Any]:
    """This machine, as doctor.json has it. Sizes are in MiB; `driver` is what `ask_driver` found."""
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
        "pins_memory": _pins_memory(),  # whether the host's memory can be pinned for it
        "told": driver,  # what the driver reports, see ASKED
    }


def lines(found: dict[str, Any]) -> dict[str, str]:
    """What `describe` found, for people."""
    memory = "" if found["memory_mib"] is None else f", {found['memory_mib'] / 1024:.1f} GiB"
    build = f"CUDA {found['cuda']}" if found["cuda"] else "no CUDA"
    shown = {
        "system": f"{found['system']}, Python {found['python']}",
        "processor": f"{found['processor']}, {found['cores']} cores, {found['threads']} threads used{memory}",
        "PyTorch": f"{found['torch']}, {build}",
        "device": f"{found['device']}, default precision {found['default_dtype']}",
    }
    if card := found["card"]:
        pinned = "can be pinned" if card["pins_memory"] else "cannot be pinned, so offloading is slower"
        shown["GPU"] = f"{card['name']}, compute capability {card['capability']}"
        shown["GPU memory"] = f"{card['total_mib']:,} MiB, {card['free_mib']:,} free; host memory {pinned}"
        shown["driver"] = _driver(card["told"])
    return shown


def _driver(reported: dict[str, str]) -> str:
    if not reported:
        return "unknown: nvidia-smi is missing or failed"
    parts = [reported.get("driver", "version unknown")]
    for name, form in {"power_state": "{}", "watts": "{} W", "clock_mhz": "{} MHz", "celsius": "{} C"}.items():
        if name in reported:
            limit = f" of {reported[name + '_limit']}" if name + "_limit" in reported else ""
            parts.append(form.format(reported[name] + limit))
    return ", ".join(parts)


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
