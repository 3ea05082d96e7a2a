"""How fast a device is: the figures that times are predicted from, measured here or from a table of cards.

The table holds the makers' peaks, which no program reaches: times that are predicted from it are optimistic.
"""

import os
from dataclasses import asdict, dataclass, field

import torch

from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_record, write_json
from r3lite.devices.machine import processor

KEPT = "~/.cache/r3lite/speeds.json"  # what was measured, by device and version of PyTorch, beside the weights in NF4
MEASURED, BESIDE_OTHERS = "measured", "measured beside other programs"
DTYPES = ("fp32", "fp16", "bf16")
GIB = 1 << 30
# Seconds of the host for a kernel, assumed for every card of the table: 4 to 6 microseconds were measured on an
# RTX 5070 Ti (https://susun-blog.com/blog/pegainfer-3-cuda-graph). `speed` measures what PyTorch takes.
LAUNCH = 5e-6
CPUTRONIC, TOPCPU = "https://cputronic.com", "https://topcpu.net/pt/gpu-c"  # pages of cards


@dataclass(frozen=True)
class Speeds:
    """What a device does in a second; `source` is how they were measured or the address that they are from."""

    name: str  # as `device_name` gives it
    # Bytes of fp32 weights that products of one row read. A core of a CPU copies more than twice as many: 37 GB/s
    # against 15 on one with bf16. On a card the two are alike.
    bandwidth: float
    flops: dict[str, float]  # operations of large matrix products by dtype, those that it has
    launch: float  # seconds that one kernel costs, however small, launched among many
    source: str
    memory: int | None = None  # bytes; None: not known
    # The same by the dtype of the weights, where it was measured: a CPU reads fewer bytes of bf16 in a second.
    reads: dict[str, float] = field(default_factory=dict)
    link: float | None = None  # bytes that are copied from the host's pinned memory to the card; None: not known


# Bytes a second and direction of PCI Express, after its encoding (https://hpc-notes.pages.dev/reference/pcie). The
# MX450 is taken to have four lanes of 4.0, Turing 16 of 3.0, GeForce cards since 8 of 4.0; a laptop may connect fewer.
PCIE4_X4, PCIE3_X16, PCIE4_X8 = 4 * 1.969e9, 16 * 0.985e9, 8 * 1.969e9


def _card(
    name: str, gib: int, gigabytes: float, fp32: float, fp16: float, source: str, link=PCIE3_X16, bf16=False
) -> Speeds:
    """A card by GiB, GB/s and TFLOPS; `bf16`: it has that at the rate of fp16."""
    flops = {"fp32": fp32 * 1e12, "fp16": fp16 * 1e12, **({"bf16": fp16 * 1e12} if bf16 else {})}
    return Speeds(name, gigabytes * 1e9, flops, LAUNCH, source, gib * GIB, link=link)


def _ampere(name: str, gib: int, gigabytes: float, fp32: float, one: str, other: str) -> Speeds:
    """A GeForce card since Ampere: its tensor cores have fp16 and bf16, at twice its rate of fp32.

    Its figures are those of a page that compares `one` with `other`.
    """
    source = f"https://hmc-tech.com/gpu/nvidia-geforce-{one}-vs-nvidia-geforce-{other}"
    return _card(name, gib, gigabytes, fp32, 2 * fp32, source, PCIE4_X8, bf16=True)


# Names as NVIDIA's driver gives them, without what `card` takes off; GiB; GB/s; and TFLOPS of products that accumulate
# in fp32, as training needs: on GeForce cards half of what is advertised for fp16 on tensor cores (52 for the RTX
# 2060). The cards without tensor cores (MX and GTX) have a double rate of fp16 that accumulates in fp16; that of fp32
# is assumed for them. Turing (all up to the T4) has no bf16. A card of a laptop is slower the less power the laptop
# gives it: the middle is taken, and named. Of cards that differ in their memory under one name the slower is taken.
CARDS = (
    _card("MX450", 2, 64.0, 2.285, 2.285, f"{CPUTRONIC}/it/gpu/nvidia-geforce-mx450-30-5w-8gbps", PCIE4_X4),
    _card("GTX 1650", 4, 128.1, 2.984, 2.984, f"{CPUTRONIC}/gpu/nvidia-geforce-gtx-1650"),
    _card("GTX 1650 GDDR6", 4, 192.0, 2.849, 2.849, f"{CPUTRONIC}/gpu/nvidia-geforce-gtx-1650-gddr6"),
    _card("GTX 1660", 6, 192.1, 5.027, 5.027, f"{CPUTRONIC}/en/gpu/nvidia-geforce-gtx-1660"),
    _card("RTX 2060", 6, 336.0, 6.451, 25.8, f"{TOPCPU}/geforce-rtx-2060-vs-geforce-rtx-4060"),
    _card("T4", 16, 320.0, 8.141, 65.13, "https://sysrqmts.com/en/gpus/nvidia/tesla/t4"),
    _ampere("RTX 3050 Laptop", 4, 192.0, 6.08, "rtx-3050-laptop-50w", "rtx-3050-laptop-55w"),  # 55 W of 35 to 80
    _ampere("RTX 3060 Laptop", 6, 336.0, 11.41, "rtx-4060-laptop-45w", "rtx-3060-laptop-85w"),  # 85 W of 60 to 115
    _ampere("RTX 4060 Laptop", 8, 256.0, 12.35, "rtx-4060-laptop-90w", "rtx-3060-laptop-95w"),  # 90 W of 35 to 115
    _ampere("RTX 4060", 8, 272.0, 15.11, "rtx-4060", "rtx-4060"),
    _card("RTX 4090", 24, 1008.0, 82.6, 165.2, "https://deploybase.ai/articles/rtx-4090-cloud", bf16=True),
    _card("H100 80GB HBM3", 80, 3350.0, 66.9, 989.4, "https://glennklockwood.com/garden/processors/h100", bf16=True),
)


def device_name(device: torch.device) -> str:
    """What figures of a device are kept under. A CPU's hold for one number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type


def card(name: str) -> Speeds | None:
    """The card of the table that a driver's or a user's name means, such as `NVIDIA GeForce RTX 3050 Laptop GPU`."""
    words = [word for word in name.lower().split() if word not in ("nvidia", "geforce", "tesla", "gpu")]
    return next((known for known in CARDS if known.name.lower().split() == words), None)


def measured(device: torch.device) -> Speeds | None:
    """What was measured of a device with this version of PyTorch, and kept; None if nothing was that can be read."""
    try:
        found = read_record(os.path.expanduser(KEPT), remedy="").record(_key(device_name(device)))
        flops, reads = (found.record(name) for name in ("flops", "reads"))
        return Speeds(
            name=found.text("name"),
            bandwidth=found.number("bandwidth", low=0, above=True),
            flops={dtype: flops.number(dtype, low=0, above=True) for dtype in DTYPES if dtype in flops},
            launch=found.number("launch", low=0),
            source=found.choice("source", [MEASURED, BESIDE_OTHERS]),
            memory=found.whole("memory", None),
            link=found.number("link", None, low=0, above=True),
            reads={dtype: reads.number(dtype, low=0, above=True) for dtype in DTYPES if dtype in reads},
        )
    except R3LiteError:
        return None


def keep(speeds: Speeds) -> str:
    """Keeps what was measured of a device for later runs; returns why that cannot be, or nothing."""
    try:
        others = read_record(os.path.expanduser(KEPT), remedy="").values
    except R3LiteError:
        others = {}
    try:
        write_json(os.path.expanduser(KEPT), others | {_key(speeds.name): asdict(speeds)})
    except OSError as error:
        return str(error)
    return ""


def _key(name: str) -> str:
    return f"{name}, PyTorch {torch.__version__}"
