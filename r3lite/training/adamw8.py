"""AdamW with moments of 8 bits, which updates one tensor at a time, as soon as its gradient is there.

Full fine-tuning uses it: a weight in bf16 takes 2 bytes and its moments 2 more, and no gradient stays for long. As in
arXiv 2110.02861, each BLOCK numbers of a moment share a scale, their largest magnitude. A scaled number is stored as a
float of 8 bits, 4 of them the exponent. The first moment has a sign and 3 bits of mantissa. Of the second moment the
root is stored, which is never negative: it has 4 bits of mantissa and no sign. Weights and moments are rounded up or
down by chance, so that on average no change is lost that is smaller than half a step: bf16 has 8 bits, and a learning
rate of 1e-5 changes the 17th.

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
MIN_WEIGHTS = 4096  # tensors of fewer weights, such as norms, have moments in fp32 (as in bitsandbytes)
LOWEST = (127 - 16) << 23  # the bits of 2^-16 in fp32; numbers below 2^-16 times the block's largest get the code 0
BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8
MOMENTS = {"exp_avg": 3, "exp_avg_sq": 4}  # bits of mantissa


class AdamW8(torch.optim.Optimizer):
    """See the module. Random bits are functions of the seed, a tensor's name and its number of updates."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        rate: float,
        weight_decay: float,
        max_norm: float,
        seed: int,
    ):
        """Takes parameters on one device, in bf16 or fp32. Vectors, such as norms and biases, are not decayed."""
        group = {"params": list(parameters.items()), "lr": rate, "peak_lr": rate}
        super().__init__([group], {})
        self.weight_decay = weight_decay
        self.seed = seed
        count = sum(parameter.numel() for parameter in parameters.values())
        self.max_norm = max_norm / math.sqrt(count)  # the share of one weight; n weights have sqrt(n) times this
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.device = next(iter(parameters.values())).device
        self.generator = torch.Generator(self.device)
        self.norms: list[Tensor] = []  # of the gradients of this step so far

    @torch.no_grad()
    def update(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Updates one parameter by its gradient, and may overwrite it. A gradient that is not finite counts as zero."""
        state = self.state[parameter]
        if not state:
            self._fill(state, parameter.numel())
        state["step"] += 1
        step = int(state["step"])
        rate = self.param_groups[0]["lr"]
        seed = random.Random(f"{self.seed}/{step}/{self.names[parameter]}").getrandbits(63)
        self.generator.manual_seed(seed)
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        self.norms.append(norm)
        limit = self.max_norm * math.sqrt(parameter.numel())
        ratio = (limit / norm).clamp(max=1)
        clip = torch.where(norm.isfinite(), ratio, 0)
        decay = rate * self.weight_decay if parameter.dim() > 1 else 0.0
        mean_correction = 1 - BETA1**step
        root_correction = math.sqrt(1 - BETA2**step)
        weights = parameter.view(-1)
        gradients = grad.flatten()
        for start in range(0, len(weights), TILE):
            tile = slice(start, start + TILE)
            gradient = gradients[tile].float().nan_to_num_(0, 0, 0).mul_(clip)
            noise = torch.empty(len(gradient), dtype=torch.int32, device=self.device)
            noise.random_(-(2**31), 2**31, generator=self.generator)
            mean = self._read(state, "exp_avg", tile)
            mean.lerp_(gradient, 1 - BETA1)
            root = self._read(state, "exp_avg_sq", tile)
            root.square_().mul_(BETA2)
            root.addcmul_(gradient, gradient, value=1 - BETA2).sqrt_()
            updated = weights[tile].float() * (1 - decay)
            updated.addcdiv_(mean, root / root_correction + EPS, value=-rate / mean_correction)
            if parameter.dtype == torch.bfloat16:
                _round_to_bf16_(updated, noise)
            weights[tile] = updated
            self._write(state, "exp_avg", tile, values=mean, noise=(noise >> 16) & 0xFF)
            self._write(state, "exp_avg_sq", tile, values=root, noise=(noise >> 24) & 0xFF)

    def end_step(self) -> float:
        """Ends a step; returns the norm of all its gradients. Raises NonFiniteGradients if that is not finite."""
        squares = torch.stack(self.norms).square()
        norm = float(squares.sum().sqrt())
        self.norms = []
        if not math.isfinite(norm):
            remedy = "Lower --learning-rate, or look for broken rows in --data, and continue with --resume auto."
            raise NonFiniteGradients(
                f"gradients are not finite (norm {norm}); some weights were updated",
                remedy,
                code="gradients-not-finite-8bit",
            )
        return norm

    def _fill(self, state: dict[str, Tensor], count: int) -> None:
        """Fills the state of a parameter of `count` weights before its first update."""
        state["step"] = torch.zeros((), dtype=torch.int64)
        for name in MOMENTS:
            if count < MIN_WEIGHTS or count % BLOCK:
                state[name] = torch.zeros(count, device=self.device)
            else:
                blocks = count // BLOCK
                state[name] = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=self.device)
                state[f"{name}_scale"] = torch.zeros(blocks, 1, device=self.device)

    def _read(self, state: dict[str, Tensor], name: str, tile: slice) -> Tensor:
        """A copy of a tile of a moment, in fp32."""
        if state[name].dtype == torch.float32:
            return state[name][tile].clone()
        blocks = _blocks(tile)
        codes = state[name][blocks]
        scale = state[f"{name}_scale"][blocks]
        return decoded(codes, scale, MOMENTS[name]).view(-1)

    def _write(
        self,
        state: dict[str, Tensor],
        name: str,
        tile: slice,
        values: Tensor,
        noise: Tensor,
    ) -> None:
        if state[name].dtype == torch.float32:
            state[name][tile] = values
            return
        blocks = _blocks(tile)
        codes, scale = encoded(
            values.view(-1, BLOCK),
            noise=noise.view(-1, BLOCK),
            mantissa=MOMENTS[name],
        )
        state[name][blocks] = codes
        state[f"{name}_scale"][blocks] = scale


def _blocks(tile: slice) -> slice:
    """The blocks of a tile of weights."""
    return slice(tile.start // BLOCK, tile.stop // BLOCK)


def _round_to_bf16_(values: Tensor, noise: Tensor) -> None:
    """Rounds fp32 values to the upper 16 bits, which bf16 has: up or down by the lower 16 bits of `noise`, in place."""
    values.view(torch.int32).add_(noise & 0xFFFF).bitwise_and_(-0x10000)


def encoded(values: Tensor, noise: Tensor, mantissa: int) -> tuple[Tensor, Tensor]:
    """Returns the codes [blocks, BLOCK] in uint8 and scales [blocks, 1] of fp32 values [blocks, BLOCK].

    With 3 bits of mantissa the eighth bit is the sign. `noise` in [0, 256) decides which way a number is rounded.
    """
    shift = 23 - mantissa
    magnitudes = values.abs()
    scale = magnitudes.amax(-1, keepdim=True)
    magnitudes.mul_(_top(mantissa) / scale.clamp(min=1e-37))
    codes = magnitudes.view(torch.int32)
    codes.sub_(LOWEST).add_(noise << (shift - 8)).bitwise_right_shift_(shift)
    codes.clamp_(0, (16 << mantissa) - 1)
    if mantissa == 3:
        codes |= (values.view(torch.int32) >> 24) & 0x80
    return codes.to(torch.uint8), scale


def decoded(codes: Tensor, scale: Tensor, mantissa: int) -> Tensor:
    """Returns the fp32 values of what `encoded` returned.

    The code 0 is 0 in the first moment, but not in the root of the second, because updates are divided by it.
    """
    bits = codes.int()
    if mantissa == 4:
        values = (bits << 19).add_(LOWEST).view(torch.float32)
        return values.mul_(scale / _top(mantissa))
    magnitudes = bits & 0x7F
    signs = (bits & 0x80) << 24
    values = (magnitudes << 20).add_(LOWEST).bitwise_or_(signs).view(torch.float32)
    return values.mul_(magnitudes != 0).mul_(scale / _top(mantissa))


def _top(mantissa: int) -> float:
    """The largest number of a code, which a block's largest becomes, so that it is exact."""
    return 1 - 2.0 ** -(mantissa + 1)
