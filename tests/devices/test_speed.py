"""Speeds: that figures are what was done divided by the time it took; how fast a machine is, no test can say."""

import pytest
import torch
import torch.nn.functional as F

from r3lite.devices import cards, speed

CPU = torch.device("cpu")


def test_seconds_are_those_of_one_call_and_of_the_quickest_measurement(monkeypatch):
    """After a first call, of 0.2 s, and one of 0.01 s, two calls are enough for each of three measurements."""
    clock = [0.0]
    waits = iter([0.2, 0.01, 0.15, 0.15, 0.01, 0.012, 0.15, 0.15])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += next(waits)

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
    random = torch.get_rng_state()
    speeds = speed.measure(CPU, F.linear, ["fp32", "bf16"])
    assert torch.equal(torch.get_rng_state(), random), "the run's random numbers are not touched"
    assert speeds.name == cards.device_name(CPU) and speeds.source == cards.MEASURED
    assert speeds.memory is None and speeds.link is None
    assert speeds.bandwidth.keys() == speeds.flops.keys() == {"fp32", "bf16"} and min(speeds.flops.values()) > 0


@pytest.mark.parametrize(("native", "has"), [(True, True), (False, False)])
def test_a_card_that_only_emulates_bf16_does_not_have_it(monkeypatch, native, has):
    supported = {False: native, True: True}
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported[including_emulation]
    )
    assert speed.has_dtype(torch.device("cuda"), "bf16") == has
    assert speed.has_dtype(torch.device("cuda"), "fp16") and speed.has_dtype(CPU, "bf16")


@pytest.fixture
def forgotten():
    """What other tests measured in this process is not known."""
    speed.speeds_of.cache_clear()
    yield
    speed.speeds_of.cache_clear()


def test_a_device_is_measured_once_in_a_process_for_each_dtype(forgotten, monkeypatch, capsys):
    measured = []

    def measure(device, product, dtypes) -> cards.Speeds:
        measured.append(cards.Speeds(device.type, {}, {}, 1e-6 * len(measured), cards.MEASURED))
        return measured[-1]

    monkeypatch.setattr(speed, "measure", measure)
    assert speed.speeds_of(CPU, "fp32", F.linear) is speed.speeds_of(CPU, "fp32", F.linear) is measured[0]
    assert speed.speeds_of(CPU, "bf16", F.linear) is measured[1] and len(measured) == 2
    assert capsys.readouterr() == ("", "")


def test_a_measurement_that_fails_is_a_line_and_no_failure(forgotten, monkeypatch, capsys):
    def refuse(device, product, dtypes):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")

    monkeypatch.setattr(speed, "measure", refuse)
    assert speed.speeds_of(CPU, "fp32", F.linear) is None
    stderr = capsys.readouterr().err
    assert stderr.startswith("warning: cannot measure the speed of this device: OutOfMemoryError('CUDA out of memory.")
    assert stderr.count("\n") == 1
