"""AdamW with moments of 8 bits, which updates one tensor at a time, as soon as its gradient is there.

Full fine-tuning takes it: a weight in bf16 takes 2 bytes and its moments 2 more, and no gradient stays for long. As in
arXiv 2110.02861, each BLOCK numbers of a moment share a scale, their largest magnitude. A number is then a float of 4
bits of exponent: of the first moment with a sign and 3 bits of mantissa, of the root of the second, which is never
negative, with 4. Weights and moments are rounded up or down by chance, so that in the mean nothing is lost of changes
that are smaller than half a step: bf16 has 8 bits, and a learning rate of 1e-5 changes the 17th.

The norm of all gradients is known only when most weights have changed already. So each tensor's gradient is clipped by
itself, to its share of `max_norm` by its number of weights: the norm of all together is at most `max_norm`.
"""

import math
import random

import torch
from torch import Tensor, nn

from r3lite.devices.precision import NonFiniteGradients

BLOCK = 256
TILE = 2**19  # weights updated at once: 25 MiB of temporaries
LEAST = 4096  # weights; tensors of fewer, such as norms, have moments in fp32 (as in bitsandbytes)
LOWEST = (127 - 16) << 23  # the bits of 2^-16 in fp32; numbers below it, of a block's largest, become 0
BETAS, EPS = (0.9, 0.999), 1e-8
MOMENTS = {"exp_avg": 3, "exp_avg_sq": 4}  # bits of mantissa


class AdamW8(torch.optim.Optimizer):
    """See the module. Random bits are functions of the seed, a tensor's name and its number of updates."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], rate: float, weight_decay: float, max_norm: float, seed: int
    ):
        """Weights are decayed, but for those of norms and biases. All are on one device, in bf16 or fp32."""
        super().__init__([{"params": list(parameters.items()), "lr": rate, "peak_lr": rate}], {})
        self.weight_decay, self.seed = weight_decay, seed
        self.max_norm = max_norm / math.sqrt(sum(p.numel() for p in parameters.values()))  # of a single weight
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.device = next(iter(parameters.values())).device
        self.generator = torch.Generator(self.device)
        self.norms: list[Tensor] = []  # of the gradients of this step so far

    @torch.no_grad()
    def update(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Updates one parameter by its gradient, which may be overwritten. One that is not finite counts as zero."""
        state = self.state[parameter] or self._fresh(parameter)
        state["step"] += 1
        step, rate = int(state["step"]), self.param_groups[0]["lr"]
        self.generator.manual_seed(random.Random(f"{self.seed}/{step}/{self.names[parameter]}").getrandbits(63))
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        self.norms.append(norm)
        limit = self.max_norm * math.sqrt(parameter.numel())
        clip = torch.where(norm.isfinite(), (limit / norm).clamp(max=1), 0)
        (first, second), decay = BETAS, rate * self.weight_decay if parameter.dim() > 1 else 0.0
        weights, grads = parameter.view(-1), grad.flatten()
        for start in range(0, len(weights), TILE):
            some = slice(start, start + TILE)
            g = grads[some].float().nan_to_num_(0, 0, 0).mul_(clip)
            noise = torch.empty(len(g), dtype=torch.int32, device=self.device)
            noise.random_(-(2**31), 2**31, generator=self.generator)
            m = self._read(state, "exp_avg", some).lerp_(g, 1 - first)
            s = self._read(state, "exp_avg_sq", some)
            s = s.square_().mul_(second).addcmul_(g, g, value=1 - second).sqrt_()
            wide = weights[some].float() * (1 - decay)
            wide.addcdiv_(m, s / math.sqrt(1 - second**step) + EPS, value=-rate / (1 - first**step))
            if parameter.dtype == torch.bfloat16:  # the upper 16 bits of fp32
                wide = wide.view(torch.int32).add_(noise & 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)
            weights[some] = wide
            self._write(state, "exp_avg", some, m, (noise >> 16) & 0xFF)
            self._write(state, "exp_avg_sq", some, s, (noise >> 24) & 0xFF)

    def finish(self) -> float:
        """Ends a step: the norm of all gradients. Raises NonFiniteGradients if that is not finite."""
        norm, self.norms = float(torch.stack(self.norms).square().sum().sqrt()), []
        if not math.isfinite(norm):
            remedy = "Lower --learning-rate, or look for broken rows in --data, and continue with --resume auto."
            raise NonFiniteGradients(f"gradients are not finite (norm {norm}); some weights were updated", remedy)
        return norm

    def _fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state, count = self.state[parameter], parameter.numel()
        state["step"] = torch.zeros((), dtype=torch.int64)
        for name in MOMENTS:
            if count < LEAST or count % BLOCK:
                state[name] = torch.zeros(count, device=self.device)
            else:
                state[name] = torch.zeros(count // BLOCK, BLOCK, dtype=torch.uint8, device=self.device)
                state[f"{name}_scale"] = torch.zeros(count // BLOCK, 1, device=self.device)
        return state

    def _read(self, state: dict[str, Tensor], name: str, some: slice) -> Tensor:
        """A copy of some numbers of a moment, in fp32."""
        if state[name].dtype == torch.float32:
            return state[name][some].clone()
        blocks = slice(some.start // BLOCK, some.stop // BLOCK)
        return decoded(state[name][blocks], state[f"{name}_scale"][blocks], MOMENTS[name]).view(-1)

    def _write(self, state: dict[str, Tensor], name: str, some: slice, values: Tensor, noise: Tensor) -> None:
        if state[name].dtype == torch.float32:
            state[name][some] = values
            return
        blocks = slice(some.start // BLOCK, some.stop // BLOCK)
        codes, scale = encoded(values.view(-1, BLOCK), noise.view(-1, BLOCK), MOMENTS[name])
        state[name][blocks], state[f"{name}_scale"][blocks] = codes, scale


def encoded(values: Tensor, noise: Tensor, mantissa: int) -> tuple[Tensor, Tensor]:
    """The codes [blocks, BLOCK] in uint8 and scales [blocks, 1] of fp32 values [blocks, BLOCK].

    With 3 bits of mantissa the eighth bit is the sign. `noise` in [0, 256) decides which way a number is rounded.
    """
    shift, size = 23 - mantissa, values.abs()
    scale = size.amax(-1, keepdim=True)
    part = size.mul_(_top(mantissa) / scale.clamp(min=1e-37))
    codes = part.view(torch.int32).sub_(LOWEST).add_(noise << (shift - 8)).bitwise_right_shift_(shift)
    codes.clamp_(0, (16 << mantissa) - 1)
    if mantissa == 3:
        codes |= (values.view(torch.int32) >> 24) & 0x80
    return codes.to(torch.uint8), scale


def decoded(codes: Tensor, scale: Tensor, mantissa: int) -> Tensor:
    """The inverse of `encoded`. A first moment's lowest magnitude is 0; a second's is not: it is divided by."""
    bits = codes.int()
    if mantissa == 4:
        return (bits << 19).add_(LOWEST).view(torch.float32).mul_(scale / _top(mantissa))
    size = bits & 0x7F
    bits = (size << 20).add_(LOWEST).bitwise_or_((bits & 0x80) << 24)
    return bits.view(torch.float32).mul_(size != 0).mul_(scale / _top(mantissa))


def _top(mantissa: int) -> float:
    """The largest number of a code, which a block's largest becomes, so that it is exact."""
    return 1 - 2.0 ** -(mantissa + 1)
