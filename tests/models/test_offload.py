"""Activations in the host's memory: a stack that gives back what it was given and keeps nothing on the device."""

import gc
import weakref

import pytest
import torch

from r3lite.models.offload import Offload

CPU = torch.device("cpu")


def tensors(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [torch.randn(2, 3 + i, 5, generator=generator).to(dtypes[i % 3]) for i in range(count)]


def assert_a_stack(host: Offload) -> None:
    originals = tensors()
    for x in originals:
        host.put(x)
    for x in reversed(originals):
        taken = host.take()
        assert taken.device == x.device and taken.dtype == x.dtype and torch.equal(taken, x)
    assert not host.stack and host.coming is None


def test_what_is_put_last_is_taken_first_with_the_same_values():
    host = Offload(CPU)
    for _ in range(2):  # it serves every pass of a run
        assert_a_stack(host)


def test_what_was_put_is_a_copy_and_its_memory_is_free():
    """The layer's input must not stay on the device: not as a reference, and not as a view of it."""
    host, x = Offload(CPU), torch.arange(6.0)
    storage = weakref.ref(x.untyped_storage())
    expected = x.clone()
    host.put(x)
    x.zero_()  # the device's memory is used for something else
    del x
    gc.collect()
    assert storage() is None
    assert torch.equal(host.take(), expected)


def test_only_the_next_one_is_on_its_way_back():
    """Were more of them fetched ahead, the device would hold all of them again."""
    host = Offload(CPU)
    for x in tensors(5):
        host.put(x)
    host.take()
    assert len(host.stack) == 3 and host.coming is not None


def test_nothing_is_put_between_takes():
    host = Offload(CPU)
    for x in tensors(2):
        host.put(x)
    host.take()
    with pytest.raises(AssertionError, match="all that was put must be taken"):
        host.put(torch.zeros(1))


def test_where_memory_cannot_be_pinned_it_warns_once_and_goes_on(monkeypatch, capsys):
    """WSL and containers refuse to pin memory, or pin little of it."""
    empty = torch.empty
    pin_requests = []

    def refuse(*arguments, pin_memory=False, **options):
        pin_requests.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    host = Offload(CPU)
    host.pinned = True  # as on a card
    assert_a_stack(host)
    assert capsys.readouterr().err.count("memory cannot be pinned here") == 1
    assert pin_requests.count(True) == 1 and not host.pinned


@pytest.mark.gpu
def test_on_a_card_the_memory_is_given_back():
    device = torch.device("cuda")
    host = Offload(device)
    allocated_before = torch.cuda.memory_allocated()
    for i in range(8):
        x = torch.full((1 << 20,), float(i), device=device)
        host.put(x)
        del x
    torch.cuda.synchronize()
    torch.empty(1, device=device)  # the allocator looks for what other streams are done with
    assert torch.cuda.memory_allocated() - allocated_before <= 4 << 20
    for i in reversed(range(8)):
        assert (host.take() == i).all()
