"""The flags that benches have in common: the models, the device, the precision and the folder of the results."""

import argparse
from pathlib import Path

from r3lite.devices.precision import DTYPES, Precision, resolve_device, resolve_dtype
from r3lite.settings import ModelSettings

GEMMA = "gemma-3-270m"
HUB = {  # name of a model, which is that of its folder below --models -> hub id
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "3B": "Qwen/Qwen2.5-3B-Instruct",
    GEMMA: "google/gemma-3-270m",
}
RESULTS = Path(__file__).parent / "results"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the common flags. A bench adds its other flags to it."""
    common_parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_parser.add_argument(
        "--models", help=f"folder with {', '.join(HUB)}, as far as they are used; by default those of the hub"
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


def precision(options: argparse.Namespace | ModelSettings) -> Precision:
    """Returns the device and dtype that --device and --dtype select, flags of a bench or settings of a command."""
    device = resolve_device(options.device)
    return Precision(resolve_dtype(options.dtype, device), device)


def folder(options: argparse.Namespace, name: str) -> str:
    """Returns the folder of a model (such as "0.5B") below --models, or without --models the model's hub id."""
    return str(Path(options.models) / name) if options.models else HUB[name]
