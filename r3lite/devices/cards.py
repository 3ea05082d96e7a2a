"""How fast a device is: the figures from which times are predicted, and a table of these figures for common cards.

The table has the makers' peak figures. Programs reach about half of these; `memory/duration.py` allows for that.
"""

import re
from dataclasses import dataclass

import torch

from r3lite.devices.machine import processor

MEASURED = "measured"
DTYPES = ("fp32", "fp16", "bf16")
GIB = 1 << 30
# Seconds that the host takes to launch a kernel, assumed for every card of the table: 4 to 6 microseconds were measured
# on an RTX 5070 Ti (https://susun-blog.com/blog/pegainfer-3-cuda-graph). For the device of this machine,
# `speed.launch_seconds` measures the time.
LAUNCH = 5e-6


@dataclass(frozen=True)
class Speeds:
    """The figures of a device by which times are predicted; `bandwidth`, `flops` and `link` are per second.

    `source` is `MEASURED` or the address that the figures are from.
    """

    name: str  # as `device_name` gives it
    # Bytes of weights that a product of one row reads, by the dtype of the weights: a CPU reads fewer bytes in bf16.
    bandwidth: dict[str, float]
    flops: dict[str, float]  # floating-point operations of large matrix products, by the dtypes that the device has
    launch: float  # seconds that a kernel costs, however small, when many are launched in a row
    source: str
    memory: int | None = None  # bytes; None: not known
    link: float | None = None  # bytes copied from the host's memory to the card; None: the device is no card


# Bytes a second and direction of PCI Express, after its encoding (https://hpc-notes.pages.dev/reference/pcie). The
# MX450 is taken to have 4 lanes of PCIe 4.0, Turing cards 16 lanes of 3.0, later GeForce cards 8 lanes of 4.0, the H100
# 16 lanes of 5.0; a laptop may connect fewer.
PCIE4_X4 = 4 * 1.969e9
PCIE3_X16 = 16 * 0.985e9
PCIE4_X8 = 8 * 1.969e9
PCIE5_X16 = 16 * 3.938e9
WIKIPEDIA = "https://en.wikipedia.org/wiki/List_of_Nvidia_graphics_processing_units"

# The columns: the name as NVIDIA's driver gives it, without the words that `name_words` leaves out; memory in GiB;
# bandwidth in GB/s; TFLOPS in fp32. The speed of a laptop's card depends on the power that the laptop gives it: the
# table has a middle value. Of different cards with the same name the table has the slower one. Cards before Turing are
# left out: PyTorch for CUDA 12.8 and later does not run on them.
WITHOUT_TENSOR_CORES = (
    ("MX450", 2, 64.0, 2.285),
    ("GTX 1650", 4, 128.1, 2.984),
    ("GTX 1650 GDDR6", 4, 192.0, 2.849),
    ("GTX 1650 Ti", 4, 192.0, 3.041),
    ("GTX 1650 Super", 4, 192.0, 4.416),
    ("GTX 1660", 6, 192.1, 5.027),
    ("GTX 1660 Super", 6, 336.0, 5.027),
    ("GTX 1660 Ti", 6, 288.0, 5.437),
)
TURING = (
    ("RTX 2060", 6, 336.0, 6.451),
    ("RTX 2060 Super", 8, 448.0, 7.181),
    ("RTX 2070", 8, 448.0, 7.465),
    ("RTX 2070 Super", 8, 448.0, 9.062),
    ("RTX 2080", 8, 448.0, 10.07),
    ("RTX 2080 Super", 8, 495.9, 11.15),
)
SINCE_AMPERE = (
    ("RTX 2050", 4, 112.0, 5.1),
    ("RTX 3050", 8, 224.0, 9.098),
    ("RTX 3050 Laptop", 4, 192.0, 6.08),
    ("RTX 3050 Ti Laptop", 4, 192.0, 7.0),
    ("RTX 3060", 12, 360.0, 12.74),
    ("RTX 3060 Laptop", 6, 336.0, 11.41),
    ("RTX 3060 Ti", 8, 448.0, 16.2),
    ("RTX 3070", 8, 448.0, 20.31),
    ("RTX 3070 Laptop", 8, 448.0, 14.0),
    ("RTX 3070 Ti", 8, 608.3, 21.75),
    ("RTX 3070 Ti Laptop", 8, 448.0, 14.2),
    ("RTX 3080 Laptop", 8, 448.0, 17.0),
    ("RTX A2000", 6, 288.0, 7.987),
    ("RTX 4050 Laptop", 6, 192.0, 10.52),
    ("RTX 4060", 8, 272.0, 15.11),
    ("RTX 4060 Laptop", 8, 256.0, 12.35),
    ("RTX 4060 Ti", 8, 288.0, 22.06),
    ("RTX 4070 Laptop", 8, 256.0, 17.0),
    ("RTX 5050", 8, 320.0, 13.17),
    ("RTX 5050 Laptop", 8, 384.0, 10.0),
    ("RTX 5060", 8, 448.0, 19.18),
    ("RTX 5060 Laptop", 8, 384.0, 13.0),
    ("RTX 5060 Ti", 8, 448.0, 23.7),
    ("RTX 5070 Laptop", 8, 384.0, 16.5),
    ("RTX 4090", 24, 1008.0, 82.6),
)


def _card(
    name: str,
    gib: int,
    gigabytes_a_second: float,
    tflops: float,
    *,
    speedup: float,
    link: float,
    bf16: bool = False,
) -> Speeds:
    """Returns a card from a row of the table; products in fp16 are `speedup` times as fast as in fp32.

    So are those in bf16, if the card has bf16. Products accumulate in fp32, as training needs: on GeForce cards their
    speed is half of what is advertised for fp16.
    """
    flops = {"fp32": tflops * 1e12, "fp16": speedup * tflops * 1e12}
    if bf16:
        flops["bf16"] = flops["fp16"]
    return Speeds(
        name=name,
        bandwidth=dict.fromkeys(flops, gigabytes_a_second * 1e9),
        flops=flops,
        launch=LAUNCH,
        source=WIKIPEDIA,
        memory=gib * GIB,
        link=link,
    )


CARDS = (
    *(_card(*row, speedup=1, link=PCIE4_X4) for row in WITHOUT_TENSOR_CORES[:1]),  # the MX450
    *(_card(*row, speedup=1, link=PCIE3_X16) for row in WITHOUT_TENSOR_CORES[1:]),
    *(_card(*row, speedup=4, link=PCIE3_X16) for row in TURING),
    *(_card(*row, speedup=2, link=PCIE4_X8, bf16=True) for row in SINCE_AMPERE),
    _card("T4", 16, 320.0, 8.141, speedup=8, link=PCIE3_X16),
    _card("H100 80GB HBM3", 80, 3350.0, 66.9, speedup=14.79, link=PCIE5_X16, bf16=True),
)


def device_name(device: torch.device) -> str:
    """Returns the name of a device: the driver's for a card, processor and threads for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{processor()}, {torch.get_num_threads()} threads"
    return device.type


def name_words(name: str) -> frozenset[str]:
    """Returns the words and numbers of a card's name, in lower case and without NVIDIA's brands.

    Two names with the same words mean the same card, whatever their order, case and spacing.
    """
    parts = re.findall(r"[a-z]+|[0-9]+", name.lower())
    return frozenset(parts) - {"nvidia", "geforce", "tesla", "gpu"}


def card(name: str) -> Speeds | None:
    """Returns the card of the table that a driver's or a user's name means, such as `NVIDIA GeForce RTX 3050`.

    None if the table does not have it.
    """
    words = name_words(name)
    return next((speeds for speeds in CARDS if name_words(speeds.name) == words), None)


def similar_names(name: str) -> list[str]:
    """Returns the names of the table that share a number such as 3050 with `name`, which may be misspelled."""
    numbers = {word for word in name_words(name) if word.isdigit()}
    return [speeds.name for speeds in CARDS if numbers & name_words(speeds.name)]
