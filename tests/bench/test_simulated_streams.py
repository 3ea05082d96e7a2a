"""Graphs and streams of the simulated device: what may be captured, and what must wait for what."""

import pytest
import torch
import torch.nn.functional as F

from bench.stress.simulation.streams import Unordered

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real card is here: its tests are those marked gpu")
CUDA = torch.device("cuda", 0)
KIB = 1024


# Graphs


def test_a_graph_does_again_what_was_captured_on_the_same_memory(card):
    x, total = torch.zeros(2, 3, device="cuda"), torch.zeros(2, 5, device="cuda")
    step = torch.tensor([1], device="cuda")
    graph = torch.cuda.CUDAGraph()
    double = 2
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"):
        assert torch.cuda.is_current_stream_capturing()
        y = F.pad(x * double + step, (1, 1))
        total.add_(y)
        total[:, 0] = torch.arange(2, device="cuda") + total[:, 1].clone()
    assert total.sum() == 0  # a capture changes nothing
    x.fill_(3)
    double = 100  # a number of the host is the capture's for ever
    for times in (1, 2):
        counts_before = card.so_far()
        graph.replay()
        done = (card.so_far() - counts_before).report()
        assert done["launches"] == 1 and done["kernels"] == len(graph.kernels) > 8
        assert y.tolist() == [[0, 7, 7, 7, 0]] * 2
        assert total.tolist() == [[7 * times + row, *[7 * times] * 3, 0] for row in range(2)]


@pytest.mark.parametrize(
    "bad", [lambda x: x.sum().item(), lambda x: x + torch.ones(3).to("cuda"), lambda x: x[x > 0], lambda x: x.cpu()]
)
def test_what_cannot_be_captured_is_refused(card, bad):
    x = torch.ones(3, device="cuda")
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        bad(x)
    assert not torch.cuda.is_current_stream_capturing()


def test_attention_and_random_numbers_can_be_captured(card):
    q, graph = torch.rand(1, 2, 3, 4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(F.dropout(q, 0.5), q, q)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.cpu())
    assert not torch.equal(*results)


# Streams


def side_by_side(card, on_start=lambda s: None, on_end=lambda s: None):
    """A tensor of this stream is doubled on another one, and the result is read here."""
    side_stream = torch.cuda.Stream(CUDA)
    x = torch.ones(3, device="cuda")
    on_start(side_stream)
    with torch.cuda.stream(side_stream):
        y = x * 2
    on_end(side_stream)
    return x, y, side_stream


def wait_for(side_stream):
    side_stream.wait_stream(torch.cuda.current_stream())


def let_wait(side_stream):
    torch.cuda.current_stream().wait_stream(side_stream)


def test_streams_that_wait_for_each_other(card):
    x, y, side_stream = side_by_side(card, wait_for, let_wait)
    assert (x + y).tolist() == [3] * 3
    event = torch.cuda.Event()
    x.add_(1)
    event.record()
    side_stream.wait_event(event)
    with torch.cuda.stream(side_stream):
        x.add_(1)
        done_there = side_stream.record_event()
    done_there.synchronize()  # the host waits, and so whatever it queues next comes after it
    assert x.tolist() == [3] * 3
    for tensor in (x, y):
        tensor.record_stream(side_stream)
        tensor.record_stream(torch.cuda.current_stream())


def test_a_stream_that_does_not_wait_is_found(card):
    with pytest.raises(Unordered, match="may still be writing"):
        side_by_side(card)
    x, y, side_stream = side_by_side(card, wait_for)
    with pytest.raises(Unordered, match="may still be writing"):
        y.sum()
    with pytest.raises(Unordered, match="may still be reading"):
        x.zero_()
    let_wait(side_stream)


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_may_not_be_given_back_while_another_stream_uses_it(card, recorded):
    x, _y, side_stream = side_by_side(card, wait_for)
    if recorded:
        x.record_stream(side_stream)
    del x
    if recorded:
        torch.ones(1, device="cuda") + 1
    else:
        with pytest.raises(Unordered, match="record_stream is missing"):
            torch.ones(1, device="cuda") + 1
        card._misuse = None


def test_the_host_may_not_read_what_is_on_its_way(card):
    x, pinned = torch.ones(3, device="cuda"), torch.empty(3, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    for read in (pinned.sum, pinned.tolist, pinned.numpy, lambda: pinned.add_(1)):
        with pytest.raises(Unordered):
            read()
    torch.cuda.synchronize()
    assert pinned.tolist() == [1] * 3
