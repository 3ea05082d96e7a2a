"""The simulated device: where tensors are, what it refuses, its numbers and its memory."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.stress.simulated_cuda import GIB, SimulatedCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real card is here: its tests are those marked gpu")
CUDA = torch.device("cuda", 0)
KIB = 1024


# Where tensors are


def test_what_is_made_of_tensors_of_the_device_is_there(card):
    x = torch.ones(2, 3, device="cuda")
    w = nn.Parameter(torch.ones(3).to("cuda"))
    tensors = [
        x, w, x[0], x.T, x.detach(), x + 1, x.half(), x.new_zeros(2), torch.zeros_like(x), x.split(1)[0], (x @ w)
    ]  # fmt: skip
    tensors += [torch.cat((x, x)), x.sum(), x.max(-1).values, F.dropout(x), torch.where(x > 0, x, 0), x.to(torch.int64)]
    tensors += [
        torch.tensor([1, 2], device="cuda"),
        torch.as_tensor([1], device="cuda"),
        torch.arange(3, device="cuda"),
    ]
    tensors += [torch.ones(2).cuda(), torch.ones(2).to(x), torch.ones(2).to("cuda:0", torch.half), F.pad(x, (0, 1))]
    assert [t.device for t in tensors] == [CUDA] * len(tensors) and all(t.is_cuda for t in tensors)
    assert x.to("cuda") is x and x.to(torch.half).dtype == torch.half


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x % 3, "remainder"),
        (lambda x: 7 % (x + 20), "remainder"),
        (lambda x: x.double() % 0.1, "remainder"),
        (lambda x: x.remainder_(3), "remainder_"),
        (lambda x: torch.fmod(x, 3), "fmod"),
        (lambda x: 3 & x, "bitwise_and"),
        (lambda x: 1 << x.abs(), "bitwise_left_shift"),
    ],
)
def test_an_operator_of_a_tensor_and_a_number_is_a_kernel(card, compute, name):
    """It was a TypeError: on the device PyTorch makes it of the operator of two tensors."""
    expected = compute(torch.arange(-4, 5))
    x = torch.arange(-4, 5, device="cuda")
    counts_before = card.so_far()
    computed = compute(x)
    assert computed.device == CUDA and computed.dtype == expected.dtype
    assert computed.cpu().tolist() == expected.tolist()
    assert (card.counts - counts_before).operators[name] == 1


def test_a_graph_has_an_operator_of_a_tensor_and_a_number(card):
    x = torch.arange(5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x % 3
    x += 1
    graph.replay()
    assert y.tolist() == [1, 2, 0, 1, 2]


def test_what_is_not_asked_for_is_not_there(card):
    x = torch.ones(2, 3, device="cuda")
    tensors = [
        torch.ones(2),
        torch.tensor([1]),
        x.cpu(),
        x.to("cpu"),
        torch.zeros_like(x, device="cpu"),
        torch.ones(1) + 1,
    ]
    assert {t.device.type for t in tensors} == {"cpu"} and not any(t.is_cuda for t in tensors)
    assert torch.ones(2, device="meta").device.type == "meta"
    y = torch.zeros(2, 3)
    assert y.copy_(x) is y and y.device.type == "cpu" and y.sum() == 6


def test_modules_and_gradients_are_where_their_parameters_are(card):
    layer = nn.Linear(3, 2).to("cuda")
    layer(torch.ones(4, 3, device="cuda")).sum().backward()
    assert layer.weight.device == layer.weight.grad.device == layer.bias.grad.device == CUDA
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    assert {t.device for state in optimizer.state.values() for t in state.values()} == {CUDA}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gradient_that_autograd_copies_stays_where_it_is(card, device):
    """An expanded gradient is copied in C++, which asks for memory of the CPU: it does not see the label."""
    x = torch.ones(3, device=device, requires_grad=True)
    x.sum().backward()
    assert x.grad.device.type == device


# What is refused


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x + y,
        lambda x, y: y.mul_(x),
        lambda x, y: x @ y,
        lambda x, y: torch.cat((x, y)),
        lambda x, y: x.index_select(0, y.long()[0]),
        lambda x, y: x.gather(0, y.long()),
        lambda x, y: torch.where(y > 0, x, x),
        lambda x, y: F.embedding(y.long(), x),
        lambda x, y: F.scaled_dot_product_attention(x[None], x[None], x[None], y),
        lambda x, y: torch.add(x, x, out=y),
        lambda x, y: x.index_put_((y.long()[0],), y),
        lambda x, y: nn.Linear(3, 3)(x),
        lambda x, y: torch.stack([x[0, 0], y[0, 0]]),
    ],
)
def test_an_operator_does_not_mix_devices(card, mix):
    x, y = torch.zeros(3, 3, device="cuda"), torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        mix(x, y)


def test_what_cuda_takes_of_the_host(card):
    x, host = torch.zeros(3, 3, device="cuda"), torch.tensor(2.0)
    assert (x + host).tolist() == [[2.0] * 3] * 3 and torch.where(x > 0, x, host).device == CUDA
    x[0, 0] = host
    x[torch.tensor([1])] = 1
    assert x[torch.tensor([0, 1])].tolist() == [[2, 0, 0], [1, 1, 1]]
    x[:2, :2] = torch.ones(2, 2)
    assert x.masked_fill(x > 0, host).sum() == 2 * 5


def test_a_tensor_of_the_device_is_no_array(card):
    x = torch.ones(3, device="cuda")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        __import__("numpy").asarray(x)
    assert x.cpu().numpy().sum() == 3


def test_a_generator_is_of_one_device(card):
    cpu_generator = torch.Generator()
    cuda_generator = torch.Generator("cuda")
    assert (cpu_generator.device.type, cuda_generator.device.type) == ("cpu", "cuda")
    torch.rand(3, generator=cpu_generator), torch.rand(3, device="cuda", generator=cuda_generator)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=cpu_generator)
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator"):
        torch.rand(3, generator=cuda_generator)


# Numbers


def steps(device: str) -> list[float]:
    """Losses of three optimizer steps with dropout, and a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.3), nn.Linear(8, 9)).to(device)
    optimizer, ids = torch.optim.AdamW(model.parameters(), 0.1, fused=True), torch.arange(9, device=device)
    torch.manual_seed(1)  # of dropout, on both devices
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(ids), ids.flip(0))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *model[1].weight[0].tolist()]


def test_numbers_are_those_of_the_cpu(card):
    assert steps("cuda") == steps("cpu")


def test_the_device_has_random_numbers_of_its_own(card):
    torch.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda").tolist()
    torch.rand(100)  # of the host's stream
    second = torch.rand(4, device="cuda").tolist()
    torch.cuda.set_rng_state(state, 0)
    assert torch.rand(4, device="cuda").tolist() == first != second
    assert torch.rand(4, device="cuda").tolist() == second
    torch.manual_seed(7)
    with torch.random.fork_rng([0]):
        assert torch.rand(4, device="cuda").tolist() == first
    assert F.dropout(torch.ones(99, device="cuda"), 0.5).sum() > 0 and torch.rand(4).tolist() == first  # was not drawn


def test_autocast_leaves_cat_and_stack_alone_on_the_device(card):
    """On a CPU it has them take one dtype, and refuses that of the other half precision."""
    on_cpu, on_cuda = (torch.ones(2, dtype=torch.float16, device=device) for device in ("cpu", "cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.stack((on_cuda, on_cuda)).dtype == torch.cat((on_cuda, on_cuda)).dtype == torch.float16
        with pytest.raises(RuntimeError, match="autocast"):
            torch.stack((on_cpu, on_cpu))


def test_fp16_with_autocast_and_a_scaler(card):
    layer = nn.Linear(4, 4).to("cuda")
    optimizer, scaler = torch.optim.AdamW(layer.parameters(), fused=True), torch.amp.GradScaler("cuda", 2.0**8)
    for gradient, expected in ((1.0, 2.0**8), (float("inf"), 2.0**7)):
        with torch.autocast("cuda", torch.float16):
            assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.float16
            out = layer(torch.ones(2, 4, device="cuda"))
        assert out.dtype == torch.float16
        scaler.scale(out.float().sum() * gradient).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
    assert not torch.is_autocast_enabled("cuda")


# Memory


def test_memory_is_that_of_live_tensors(card):
    assert torch.cuda.mem_get_info() == (int(3.6 * GIB), 4 * GIB)
    x = torch.ones(KIB, device="cuda")
    y = x[:10] + 0
    assert (
        torch.cuda.memory_allocated() == 4 * KIB + 512
        and torch.cuda.mem_get_info()[0] == int(3.6 * GIB) - 4 * KIB - 512
    )
    del x, y
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 4 * KIB + 512
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    torch.ones(KIB)
    assert torch.cuda.max_memory_allocated() == 0


def test_what_a_process_may_not_have_it_does_not_get(card):
    x = torch.ones(KIB, KIB, device="cuda")  # 4 MiB
    torch.cuda.set_per_process_memory_fraction(10 / (4 * KIB), 0)  # of 4 GiB: 10 MiB
    y = x + 1
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 4.00 MiB"):
        x + 1
    x.add_(1)
    del y
    assert (x + 1)[0, 0] == 3


def test_a_card_is_full_where_its_free_memory_ends():
    with SimulatedCuda(total=8 * GIB, free=KIB) as card, pytest.raises(torch.OutOfMemoryError):
        torch.ones(KIB, device="cuda")
    assert card.memory.live == 0


def test_memory_runs_out_when_it_is_told_to_once(card):
    x = torch.ones(3, device="cuda")
    card.run_out_of_memory(after_allocations=2)
    x + 1, x.add_(1), x.view(-1), x + 1
    with pytest.raises(torch.OutOfMemoryError):
        x + 1
    assert (x + 1).sum() == 9


# The card


def test_the_card_is_one_of_a_laptop(card):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and not torch.cuda.is_initialized()
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor, properties.total_memory) == (7, 5, 4 * GIB)
    assert not torch.cuda.is_bf16_supported(including_emulation=False) and torch.cuda.is_bf16_supported()
    torch.ones(1, device="cuda")
    assert torch.cuda.is_initialized()


def test_a_card_may_have_bf16():
    with SimulatedCuda(bf16=True):
        assert torch.cuda.is_bf16_supported(including_emulation=False)


def test_events_tell_the_time_that_bytes_take(card):
    x = torch.ones(64, 64, device="cuda")
    times = []
    for dtype in (torch.float32, torch.float16):
        a = x.to(dtype)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ a
        end.record()
        times.append(start.elapsed_time(end))
    assert times[0] == pytest.approx(1000 * 2 * 64 * 64 * 4 / 192e9) and times[1] == pytest.approx(times[0] / 2)


def test_after_the_block_all_is_as_before():
    names = [(torch.Tensor, n) for n in ("device", "to", "tolist", "numpy")] + [(torch, "tensor"), (torch, "autocast")]
    originals = [getattr(owner, name) for owner, name in names]
    with pytest.raises(KeyError), SimulatedCuda():
        x = torch.ones(3, device="cuda")
        raise KeyError
    assert [getattr(owner, name) for owner, name in names] == originals and "device" not in vars(torch.Tensor)
    assert not torch.cuda.is_available() and x.device.type == "cpu"
    with SimulatedCuda() as card:  # what is kept from an earlier block, as caches do, is of the device still
        assert (x + torch.ones(3, device="cuda")).sum().item() == 6
    assert card.counts.operators == Counter(fill_=1, add=1, sum=1)


def test_a_module_is_run_as_python_does():
    command = [
        sys.executable,
        "-m",
        "bench.stress.simulated_cuda",
        "-m",
        "r3lite.plan",
        "--model",
        "tiny",
        "--device",
        "cuda",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "context" in ran.stdout and '"kernels": 0' in ran.stderr
