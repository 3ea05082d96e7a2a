"""The flags that benches have in common: the models, the device, the precision and the folder of the results."""

import argparse
from pathlib import Path

from r3lite.devices.precision import DTYPES, Precision, resolve_device, resolve_dtype

HUB = {size: f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B")}  # size -> hub id of the model
RESULTS = Path(__file__).parent / "results"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the common flags. A bench adds its other flags to it."""
    common_parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_parser.add_argument(
        "--models", help="folder with 0.5B, 1.5B and 3B; by default the hub's Qwen2.5-*-Instruct"
    )
    common_parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    common_parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPES],
        help="precision, on all sides; auto: bf16 if the device has it, else fp16 (on a CPU fp32)",
    )
    common_parser.add_argument("--results", type=Path, default=RESULTS, help="folder to which this run is added")
    return common_parser


def precision(options: argparse.Namespace) -> Precision:
    """Returns the device and dtype that --device and --dtype select."""
    device = resolve_device(options.device)
    return Precision(resolve_dtype(options.dtype, device), device)


def folder(options: argparse.Namespace, size: str) -> str:
    """Returns the model folder of a size (such as "0.5B") below --models, or without --models the model's hub id."""
    return str(Path(options.models) / size) if options.models else HUB[size]
