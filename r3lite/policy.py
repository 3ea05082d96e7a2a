"""The frozen base of a run, loaded as its memory plan says."""

import sys
import zlib
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from r3lite.devices.precision import Precision, resolve_device, resolve_dtype, warn_of_slow_fp16
from r3lite.memory.workloads import Plan, announce, enforce
from r3lite.models import weights
from r3lite.models.qwen2 import Qwen2
from r3lite.settings import MemorySettings, ModelSettings


class Base(NamedTuple):
    model: Qwen2
    precision: Precision


def load_base(folder: Path, settings: ModelSettings, memory: MemorySettings, plan: Plan) -> Base:
    """The model of a folder, frozen, in the run's dtype and on its device; in NF4 where the plan says so."""
    device = resolve_device(settings.device)
    precision = Precision(resolve_dtype(settings.dtype, device), device)
    announce(plan)
    enforce(plan, device)
    warn_of_slow_fp16(precision)
    if plan.memory.nf4:
        return Base(_load_nf4(folder, precision, memory.nf4_cache), precision)
    return Base(weights.load_qwen2(folder, precision.dtype, device), precision)


def _load_nf4(folder: Path, precision: Precision, cache: str | None) -> Qwen2:
    """The model in NF4. What was quantized is kept in the folder `cache` for the next start of the same files."""
    where = precision.dtype, precision.device
    if cache is None or weights.is_nf4(folder):
        return weights.load_qwen2(folder, *where, quantize=True)
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))]
    key = zlib.crc32(repr((str(folder.resolve()), files, str(precision.dtype))).encode())
    kept = Path(cache).expanduser() / f"{folder.resolve().name}-nf4-{key:08x}"
    if kept.is_dir():
        return weights.load_qwen2(kept, *where)
    model = weights.load_qwen2(folder, *where, quantize=True)
    try:
        weights.save_nf4(model, folder, kept)
        print(f"the quantized weights are kept in {kept}", file=sys.stderr)
    except (OSError, SafetensorError) as error:  # a full disk costs the next start some seconds, not this run
        print(f"warning: the quantized weights cannot be kept in {kept}: {error}", file=sys.stderr)
    return model
