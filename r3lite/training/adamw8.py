"""AdamW with moments of 8 bits. It updates one tensor at a time, as soon as the gradient of the tensor is computed.

Full fine-tuning uses it: a weight in bf16 takes 2 bytes and its two moments 2 more, and a gradient is needed only until
its tensor is updated.

As in arXiv 2110.02861, every BLOCK numbers of a moment share a scale, which is their largest magnitude. A scaled number
is stored as a float of 8 bits, the code. 4 bits are the exponent. The first moment (exp_avg) has a sign and 3 bits of
mantissa. Of the second moment (exp_avg_sq) the root is stored. The root is never negative: it has no sign and 4 bits of
mantissa.

Weights in bf16 and moments are rounded up or down at random, with probabilities that make the rounding right on
average. Rounding to the nearest would lose every change that is smaller than half a step of bf16.

When the norm of all gradients is known, most weights have already been updated. So the gradient of each tensor is
clipped by itself. A tensor with n of all N weights has the limit max_norm * sqrt(n / N), so the norm of all is at most
`max_norm`.
"""

import math
import random

import torch
from torch import Tensor, nn

from r3lite.devices.precision import NonFiniteGradients
from r3lite.training.uncompiled import Uncompiled

BLOCK = 256
TILE = 2**19  # weights updated at once: 25 MiB of temporaries
MIN_WEIGHTS = 4096  # tensors of fewer weights, such as norms, have moments in fp32 (as in bitsandbytes)
FP32_MANTISSA = 23  # bits
EXPONENTS = 16  # how many different exponents 4 bits can store
# The bits of 2^-16 in fp32, whose exponent has the bias 127. Numbers below about 2^-16 times the scale have code 0.
LOWEST = (127 - EXPONENTS) << FP32_MANTISSA
BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8
MOMENTS = {"exp_avg": 3, "exp_avg_sq": 4}  # bits of mantissa of a code


class AdamW8(Uncompiled):
    """Updates parameters one by one. Its random bits depend on the seed, the parameter's name and its step number."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        rate: float,
        weight_decay: float,
        max_norm: float,
        seed: int,
    ):
        """Takes parameters by name, all on one device, in bf16 or fp32. Vectors, such as biases, are not decayed."""
        group = {"params": list(parameters.items()), "lr": rate, "peak_lr": rate}
        super().__init__([group], {})
        self.weight_decay = weight_decay
        self.seed = seed
        count = sum(parameter.numel() for parameter in parameters.values())
        # The limit for a tensor of one weight: a tensor of n weights has sqrt(n) times this limit.
        self.max_norm_of_one = max_norm / math.sqrt(count)
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.device = next(iter(parameters.values())).device
        self.generator = torch.Generator(self.device)
        self.norms: list[Tensor] = []  # of the gradients of this step so far

    @torch.no_grad()
    def update(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Updates a parameter by its gradient, which may be overwritten. A gradient that is not finite counts as 0."""
        state = self.state[parameter]
        if not state:
            self._add_zeros(state, parameter.numel())
        state["step"] += 1
        step = int(state["step"])
        rate = self.param_groups[0]["lr"]
        seed = random.Random(f"{self.seed}/{step}/{self.names[parameter]}").getrandbits(63)
        self.generator.manual_seed(seed)
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        self.norms.append(norm)
        limit = self.max_norm_of_one * math.sqrt(parameter.numel())
        ratio = (limit / norm).clamp(max=1)
        clip_factor = torch.where(norm.isfinite(), ratio, 0)
        decay = rate * self.weight_decay if parameter.dim() > 1 else 0.0
        # The corrections of AdamW for moments that began at 0.
        mean_correction = 1 - BETA1**step
        root_correction = math.sqrt(1 - BETA2**step)
        weights = parameter.view(-1)
        gradients = grad.flatten()
        for start in range(0, len(weights), TILE):
            tile = slice(start, start + TILE)
            gradient = gradients[tile].float().nan_to_num_(0, 0, 0).mul_(clip_factor)
            # 32 random bits for each weight: 16 round the weight, 8 each moment.
            noise = torch.empty(len(gradient), dtype=torch.int32, device=self.device)
            noise.random_(-(2**31), 2**31, generator=self.generator)
            mean = self._read(state, "exp_avg", tile)
            mean.lerp_(gradient, 1 - BETA1)
            root = self._read(state, "exp_avg_sq", tile)  # the root of the second moment
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
        """Ends a step, and returns the norm of all its gradients. Raises NonFiniteGradients if it is not finite."""
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

    def _add_zeros(self, state: dict[str, Tensor], count: int) -> None:
        """Adds the step count and the moments, all 0, to the empty state of a parameter of `count` weights."""
        state["step"] = torch.zeros((), dtype=torch.int64)
        for name in MOMENTS:
            if count < MIN_WEIGHTS or count % BLOCK:
                state[name] = torch.zeros(count, device=self.device)
            else:
                blocks = count // BLOCK
                state[name] = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=self.device)
                state[f"{name}_scale"] = torch.zeros(blocks, 1, device=self.device)

    def _read(self, state: dict[str, Tensor], name: str, tile: slice) -> Tensor:
        """Returns a copy of the numbers of a moment in a tile, in fp32."""
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
        """Stores the fp32 numbers of a moment in a tile. `noise` in [0, 256) is as in `encoded`."""
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
    """Rounds fp32 values in place to bf16, their upper 16 bits: up or down, as the lower 16 bits of `noise` decide."""
    values.view(torch.int32).add_(noise & 0xFFFF).bitwise_and_(-0x10000)


def encoded(values: Tensor, noise: Tensor, mantissa: int) -> tuple[Tensor, Tensor]:
    """Returns the codes [blocks, BLOCK] in uint8 and scales [blocks, 1] of fp32 values [blocks, BLOCK].

    A scale is the largest magnitude of its block. With 3 bits of mantissa, the highest bit of a code is the sign.
    `noise` [blocks, BLOCK] in [0, 256) decides which way a number is rounded.
    """
    shift = FP32_MANTISSA - mantissa
    magnitudes = values.abs()
    scale = magnitudes.amax(-1, keepdim=True)
    magnitudes.mul_(_top(mantissa) / scale.clamp(min=1e-37))  # a block of zeros is not divided by 0
    # A code is the upper bits of the fp32 number, with exponents counted from that of LOWEST.
    codes = magnitudes.view(torch.int32)
    codes.sub_(LOWEST).add_(noise << (shift - 8)).bitwise_right_shift_(shift)
    codes.clamp_(0, (EXPONENTS << mantissa) - 1)
    if mantissa == 3:
        codes |= (values.view(torch.int32) >> 24) & 0x80  # the sign
    return codes.to(torch.uint8), scale


def decoded(codes: Tensor, scale: Tensor, mantissa: int) -> Tensor:
    """Returns the fp32 values [blocks, BLOCK] of the codes and scales that `encoded` returned.

    In the first moment the code 0 is the number 0. In the root of the second moment it is about 2^-16 times the
    scale, because updates are divided by the root.
    """
    shift = FP32_MANTISSA - mantissa
    bits = codes.int()
    if mantissa == 4:
        values = (bits << shift).add_(LOWEST).view(torch.float32)
        return values.mul_(scale / _top(mantissa))
    magnitudes = bits & 0x7F
    signs = (bits & 0x80) << 24
    values = (magnitudes << shift).add_(LOWEST).bitwise_or_(signs).view(torch.float32)
    return values.mul_(magnitudes != 0).mul_(scale / _top(mantissa))


def _top(mantissa: int) -> float:
    """The largest number that a code can store. The largest magnitude of a block is scaled to it, and is exact."""
    return 1 - 2.0 ** -(mantissa + 1)
