"""Speeds: that figures are what was done divided by the time it took; how fast a machine is, no test can say."""

import pytest
import torch
import torch.nn.functional as F

from r3lite.devices import cards, speed

CPU = torch.device("cpu")


def test_seconds_are_those_of_one_call_and_of_the_quickest_measurement(monkeypatch):
    """After a first call, of 0.2 s, and one of 0.01 s, two calls are enough for each of three measurements."""
    now, waits = [0.0], iter([0.2, 0.01, 0.15, 0.15, 0.01, 0.012, 0.15, 0.15])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])

    def work() -> None:
        now[0] += next(waits)

    assert speed.seconds(work, CPU, repeats=3) == pytest.approx(0.011)
    assert next(waits, None) is None


@pytest.fixture
def timed(monkeypatch):
    """Every call takes half a second; each work is done once."""
    monkeypatch.setattr(speed, "seconds", lambda work, device, repeats=5: (work(), 0.5)[1])


def test_weights_are_read_once_and_a_copy_from_the_host_is_counted_once(timed):
    size, read = 4 * speed.WIDTH * 300, []

    def product(row, weight):
        read.append(weight)
        return F.linear(row, weight)

    for dtype, rows in ((torch.float32, 300), (torch.bfloat16, 600)):
        assert speed.read_speed(CPU, dtype, product, size) == pytest.approx(size / 0.5)
        assert read[-1].shape == (rows, speed.WIDTH) and read[-1].dtype == dtype
    assert speed.host_copy_speed(CPU, pinned=False, size=1 << 20) == pytest.approx((1 << 20) / 0.5)


def test_products_grow_until_they_take_long_enough(monkeypatch):
    """A product of 1,024 is the first that takes 0.02 s here: 2 x 1,024^3 operations in 0.064 s."""
    edges = []

    def seconds(work, device, repeats=5):
        edges.append(len(work()))
        return edges[-1] ** 2 * 0.064 / 1024**2

    monkeypatch.setattr(speed, "seconds", seconds)
    assert speed.product_speed(CPU, torch.float32, F.linear) == pytest.approx(2 * 1024**3 / 0.064)
    assert edges == [256, 512, 1024, 1024]
    monkeypatch.setattr(speed, "ENOUGH", 99.0)
    edges.clear()
    speed.product_speed(CPU, torch.bfloat16, F.linear)
    assert edges[-1] == 2048  # not without end


def test_a_kernel_costs_its_share_of_many(timed):
    assert speed.launch_seconds(CPU) == pytest.approx(0.5 / speed.LAUNCHES)


def test_what_is_measured_is_what_times_are_predicted_from(timed):
    found = speed.measure(CPU, F.linear)
    assert found.name == cards.device_name(CPU) and found.source == cards.MEASURED and found.memory is None
    assert found.reads.keys() == {"fp32", "fp16", "bf16"} and found.reads["fp32"] == found.bandwidth
    assert found.flops.keys() == {"fp32", "fp16", "bf16"} and min(found.flops.values()) > 0


@pytest.mark.parametrize(("native", "has"), [(True, True), (False, False)])
def test_a_card_that_only_emulates_bf16_does_not_have_it(monkeypatch, native, has):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert speed.has(torch.device("cuda"), "bf16") == has
    assert speed.has(torch.device("cuda"), "fp16") and speed.has(CPU, "bf16")
