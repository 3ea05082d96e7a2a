"""What every bench is told: which weights, on which device, in which precision, and where its results go."""

import argparse
from pathlib import Path

from r3lite.devices.precision import DTYPES, Precision, resolve_device, resolve_dtype

HUB = {size: f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B")}
RESULTS = Path(__file__).parent / "results"


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that all benches have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", help="folder with 0.5B, 1.5B and 3B; by default the hub's Qwen2.5-*-Instruct")
    made.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    made.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPES],
        help="precision, on all sides; auto: bf16 if the device has it, else fp16 (on a CPU fp32)",
    )
    made.add_argument("--results", type=Path, default=RESULTS, help="folder to which this run is added")
    return made


def precision(options: argparse.Namespace) -> Precision:
    """The device and dtype of --device and --dtype."""
    device = resolve_device(options.device)
    return Precision(resolve_dtype(options.dtype, device), device)


def folder(options: argparse.Namespace, size: str) -> str:
    """The model folder, or the hub id, of a size."""
    return str(Path(options.models) / size) if options.models else HUB[size]
