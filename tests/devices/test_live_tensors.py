"""The counter of live tensors, against bytes counted by hand."""

import gc
import threading
from contextlib import closing

import pytest
import torch

from r3lite.core.episode import Document, Question, Search
from r3lite.devices.live_tensors import GRAIN, LiveTensors
from r3lite.rollout.fetcher import Fetcher
from r3lite.rollout.sequence import Sequence

KIB = 1024


@pytest.mark.parametrize(
    ("shape", "dtype", "num_bytes"),
    [
        ((256, 256), torch.float32, 256 * KIB),
        ((256, 256), torch.bfloat16, 128 * KIB),
        ((1,), torch.float32, GRAIN),
        ((129,), torch.float32, 2 * GRAIN),  # 516 bytes
        ((513,), torch.uint8, 2 * GRAIN),
        ((0,), torch.float32, 0),
    ],
)
def test_an_allocation_counts_to_the_grain(shape, dtype, num_bytes):
    with LiveTensors() as counter:
        tensor = torch.empty(shape, dtype=dtype)
        assert (counter.live, counter.peak) == (num_bytes, num_bytes)
        del tensor
        assert (counter.live, counter.peak) == (0, num_bytes)


def test_a_tensor_from_before_counts_once_it_is_touched():
    touched = torch.zeros(KIB, dtype=torch.uint8)
    untouched = torch.zeros(KIB, dtype=torch.uint8)
    with LiveTensors() as counter:
        assert counter.live == 0
        touched.add_(1)
        touched.add_(1)
        assert counter.live == KIB
    assert untouched.numel() == KIB


def test_views_and_slices_count_once():
    with LiveTensors() as counter:
        base = torch.zeros(64, 64)  # 16 KiB
        views = [base[0], base[3:7, ::2], base.T, base.view(-1), base.detach(), base.expand(5, 64, 64), base.split(16)]
        assert counter.peak == 16 * KIB
        del base
        assert counter.live == 16 * KIB  # the views hold it
        del views
        assert counter.live == 0


def test_operations_in_place_add_nothing_and_others_do():
    with LiveTensors() as counter:
        tensor = torch.zeros(KIB)  # 4 KiB
        tensor.mul_(2).add_(1)
        tensor[::2].fill_(5)
        assert counter.peak == 4 * KIB
        copy = tensor + 1
        assert counter.live == counter.peak == 8 * KIB
        assert copy.is_contiguous()


def test_tensors_that_were_freed_count_down_and_the_peak_stays():
    with LiveTensors() as counter:
        for _ in range(10):
            tensor = torch.zeros(KIB)
            del tensor
        assert (counter.live, counter.peak) == (0, 4 * KIB)
        first = torch.zeros(KIB)
        second = torch.zeros(KIB)
        del first
    assert (counter.live, counter.peak) == (4 * KIB, 8 * KIB)
    del second
    assert counter.live == 0  # freed after the block


def test_growth_in_place_counts_with_the_new_size():
    with LiveTensors() as counter:
        tensor = torch.zeros(KIB)
        tensor.resize_(4 * KIB)
        assert (counter.live, counter.peak) == (16 * KIB, 16 * KIB)
        tensor.resize_(KIB)  # PyTorch gives nothing back
        assert counter.live == tensor.untyped_storage().nbytes() == 16 * KIB
        out = torch.zeros(KIB)
        torch.add(torch.zeros(2 * KIB), 1, out=out.resize_(0))  # the operator makes its result larger
        assert counter.live == 16 * KIB + 8 * KIB
        del tensor, out
        assert counter.live == 0


def test_a_storage_that_is_resized_by_itself_counts_from_the_next_operator():
    with LiveTensors() as counter:
        tensor = torch.zeros(KIB)
        tensor.untyped_storage().resize_(0)
        assert counter.live == 4 * KIB
        tensor.untyped_storage().resize_(8 * KIB)
        tensor.add_(1)
        assert counter.live == 8 * KIB
        del tensor
        assert counter.live == 0


def test_backward_counts_with_what_the_forward_pass_holds():
    """x [64, 64], w [64, 64], 16 KiB each: y is 16 KiB; in the backward pass the gradients of both come on top."""
    with LiveTensors() as counter:
        x, w = (torch.ones(64, 64, requires_grad=True) for _ in range(2))
        y = x @ w
        assert counter.live == 48 * KIB
        y.backward(torch.ones(64, 64))
        assert counter.peak == pytest.approx(6 * 16 * KIB, abs=GRAIN)  # the gradient of y too
        assert x.grad is not None and w.grad is not None
        del y
        assert counter.live == pytest.approx(4 * 16 * KIB, abs=GRAIN)


def test_on_a_cpu_backward_runs_in_the_thread_that_calls_it():
    threads = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            threads.append(threading.get_ident())
            return gradient * 2

    Spy.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert threads == [threading.get_ident()]


@pytest.mark.gpu
def test_on_cuda_the_allocations_of_backward_are_seen_though_it_has_threads_of_its_own():
    with LiveTensors() as counter:
        x, w = (torch.ones(64, 64, device="cuda", requires_grad=True) for _ in range(2))
        (x @ w).backward(torch.ones(64, 64, device="cuda"))
    assert counter.peak == pytest.approx(6 * 16 * KIB, abs=GRAIN)


def test_tensors_of_another_thread_count_once_they_are_touched_here():
    tensors = []
    with LiveTensors() as counter:
        thread = threading.Thread(target=lambda: tensors.append(torch.zeros(KIB)))
        thread.start()
        thread.join()
        assert counter.live == 0
        tensors[0].add_(1)
        assert counter.live == 4 * KIB


def test_what_the_thread_of_the_fetcher_makes_is_missed():
    """As the docstring says; if this fails, it says too little of what is counted."""

    def retrieve(pairs):
        tensors.append(torch.zeros(KIB))
        return [[Document("1", "t", str(threading.get_ident()))] for _ in pairs]

    tensors = []
    sequence = Sequence(Question("q", "q", ()), stream=None, pending=(Search("a query"),))
    with LiveTensors() as counter, closing(Fetcher(retrieve)) as fetcher:
        fetcher.queue(sequence)
        fetcher.end_iteration(idle=True)
        ((_, ((document,),)),) = fetcher.collect(idle=True)
        assert len(tensors) == 1 and document.text != str(threading.get_ident())
        assert counter.live == 0


def test_a_counter_begun_again_goes_on():
    counter = LiveTensors()
    with counter:
        inside = torch.zeros(KIB)
    outside = torch.zeros(KIB)
    with counter:
        assert counter.live == 4 * KIB
        outside.add_(1)
        assert counter.live == 8 * KIB
    del inside, outside
    gc.collect()
    assert counter.live == 0
