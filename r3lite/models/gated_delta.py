"""The gated delta rule (arXiv 2412.06464, equation 10), the linear attention of Qwen3.5: step by step and in chunks.

Each head has a state S [D_k, D_v] in the place of a KV cache. A token with key k, value v, decay a and strength b makes

    S <- a S + b k (v - a S^T k)^T        and then its query q reads        o = S^T q / sqrt(D_k)

where q and k are brought to length 1. In chunks of tokens (the WY representation of arXiv 2406.06484, section 3, with
the decay of 2412.06464, section 3.3) the rule is a few products of matrices, and only states go from chunk to chunk.
All is computed in fp32. Knows nothing of models: callers hand in tensors, and how the tokens of a pass follow one
another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64  # tokens
TOGETHER = 4  # chunks that are computed at once: temporaries of many would take much memory
EPS = 1e-6  # added to the squared length of queries and keys


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a layer; all key heads, each with its query head, serve equally many value heads."""

    keys: int  # the number of query heads, and of key heads
    values: int  # the number of value heads, a multiple of `keys`
    key_dim: int
    value_dim: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many numbers the queries, keys and values of a token are."""
        key_numbers = self.keys * self.key_dim
        return key_numbers, key_numbers, self.values * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the states of a row: [H, D_k, D_v]."""
        return self.values, self.key_dim, self.value_dim


class DeltaInputs(NamedTuple):
    """What the rule reads of N tokens, or of [chunks, C] tokens."""

    qkv: Tensor  # [N, sum of DeltaHeads.sizes]
    log_decay: Tensor  # [N, H], at most 0; fp32
    strength: Tensor  # [N, H], from 0 to 1

    def flat(self) -> "DeltaInputs":
        """Returns inputs of [B, T] tokens as those of B T tokens."""
        return DeltaInputs(*(tensor.flatten(0, 1) for tensor in self))


@dataclass
class _Part:
    """Some chunks of a level that are computed at once."""

    chunks: slice  # of the level's
    places: Tensor  # [chunks, C], among the N tokens; the end of a chunk is filled up with its last token
    targets: Tensor  # [chunks, C], the same, but N where a chunk is filled up


@dataclass
class _Level:
    """The chunks of equal depth in the forest."""

    # For each chunk, what it goes on from: the number of a root's state, or of a chunk of the level before.
    previous: list[int] = field(default_factory=list)
    spans: list[range] = field(default_factory=list)  # for each chunk, its tokens
    ends: list[tuple[int, int]] = field(default_factory=list)  # the stretches that end here: (stretch, its last chunk)
    parts: list[_Part] = field(default_factory=list)

    def add(self, previous: int, span: range) -> int:
        """Adds a chunk and returns its number in the level."""
        self.previous.append(previous)
        self.spans.append(span)
        return len(self.spans) - 1


class ChunkPlan:
    """How the N tokens of a pass are cut into chunks, and which states these go on from.

    The tokens are stretches, laid end to end. A stretch goes on from the end of its parent, an earlier stretch; if it
    has none, it is a root, and goes on from a state that is handed in. So the chunks are a forest. Those of one depth,
    a level, are computed together, and what several branches go on from is computed once.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        parents: Sequence[int | None],
        device: torch.device,
    ):
        """`sizes` and `parents` of the stretches; a size is at least 1."""
        chunk = min(CHUNK, max(sizes))
        self.roots = 0
        self.levels: list[_Level] = []
        last_chunks: list[tuple[int, int]] = []  # of each stretch: its last chunk's level, and its number there
        first = 0
        for stretch, (size, parent) in enumerate(zip(sizes, parents, strict=True)):
            if parent is None:
                depth = 0
                previous = self.roots
                self.roots += 1
            else:
                parent_depth, previous = last_chunks[parent]
                depth = parent_depth + 1
            end = first + size
            for start in range(first, end, chunk):
                if depth == len(self.levels):
                    self.levels.append(_Level())
                span = range(start, min(start + chunk, end))
                previous = self.levels[depth].add(previous, span)
                depth += 1
            last_chunks.append((depth - 1, previous))
            self.levels[depth - 1].ends.append((stretch, previous))
            first = end
        self.tokens = first
        self.stretches = len(sizes)
        self._lay_out(chunk, device)

    def _lay_out(self, chunk: int, device: torch.device) -> None:
        """Makes the parts of all levels, whose indices reach the device in one transfer."""
        places = []
        targets = []
        for level in self.levels:
            for span in level.spans:
                padding = chunk - len(span)
                places.append([*span, *[span[-1]] * padding])
                targets.append([*span, *[self.tokens] * padding])
        indices = torch.tensor([places, targets]).to(device, non_blocking=True)
        first = 0
        for level in self.levels:
            count = len(level.spans)
            level_places, level_targets = indices[:, first : first + count]
            for start in range(0, count, TOGETHER):
                chunks = slice(start, min(start + TOGETHER, count))
                level.parts.append(_Part(chunks, level_places[chunks], level_targets[chunks]))
            first += count


def delta_step(
    inputs: DeltaInputs,
    states: Tensor,
    heads: DeltaHeads,
) -> tuple[Tensor, Tensor]:
    """Runs one token in each of N rows, which have the states [N, H, D_k, D_v] in fp32.

    Returns the outputs [N, H D_v] in the dtype of the inputs' qkv, and the new states.
    """
    with torch.autocast(states.device.type, enabled=False):
        q, k, v = _by_head(inputs.qkv, heads)  # [N, H, D] each
        states = states * inputs.log_decay.exp()[..., None, None]
        recalled = (k[:, :, None] @ states)[:, :, 0]  # what the states have for k, [N, H, D_v]
        change = (v - recalled) * inputs.strength.float()[..., None]
        # In one operation, which makes no tensor of all changes: states are large.
        flat = torch.baddbmm(states.flatten(0, 1), k.flatten(0, 1)[..., None], change.flatten(0, 1)[:, None])
        states = flat.view_as(states)
        out = (q[:, :, None] @ states)[:, :, 0]
    return out.flatten(1).to(inputs.qkv.dtype), states


def delta_chunks(
    inputs: DeltaInputs,
    states: Tensor | None,
    heads: DeltaHeads,
    plan: ChunkPlan,
) -> tuple[Tensor, Tensor]:
    """Runs the stretches of a plan from the states [roots, H, D_k, D_v] in fp32; without them from zeros.

    Returns the outputs [N, H D_v] in the dtype of the inputs' qkv, and the states [stretches, H, D_k, D_v] after each
    stretch. The backward pass runs each chunk again, so that only the inputs and one state per chunk are kept for it.
    """
    if states is None:
        states = inputs.log_decay.new_zeros(plan.roots, *heads.state_shape)
    return _Chunks.apply(*inputs, states, heads, plan)


class _Chunks(torch.autograd.Function):
    """Is `delta_chunks`: level by level, and in the backward pass in the opposite order."""

    @staticmethod
    def forward(ctx, qkv, log_decay, strength, states, heads, plan):
        inputs = DeltaInputs(qkv, log_decay, strength)
        out = qkv.new_empty(plan.tokens + 1, heads.values * heads.value_dim)  # the last one is never read
        final_states = states.new_empty(plan.stretches, *heads.state_shape)
        starts = []  # the states that the chunks of each level go on from
        for level in plan.levels:
            states = _of_chunks(states, level)
            if any(ctx.needs_input_grad):
                starts.append(states)
            next_states = []
            for part in level.parts:
                part_out, part_states = _run_chunks(_of_part(inputs, part), states[part.chunks], heads)
                out[part.targets] = part_out.to(out.dtype)
                next_states.append(part_states)
            states = torch.cat(next_states)
            for stretch, chunk in level.ends:
                final_states[stretch] = states[chunk]
        ctx.save_for_backward(*inputs, *starts)
        ctx.heads = heads
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return out[:-1], final_states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_final):
        qkv, log_decay, strength, *starts = ctx.saved_tensors
        inputs = DeltaInputs(qkv, log_decay, strength)
        if grad_out is None:
            grad_out = torch.zeros_like(qkv[:, : ctx.heads.sizes[2]])
        grads = DeltaInputs(*(tensor.new_empty(len(tensor) + 1, *tensor.shape[1:]) for tensor in inputs))
        grad_next: Tensor | None = None  # with respect to the states that the next level's chunks go on from
        next_level: _Level | None = None
        for level, states in zip(reversed(ctx.plan.levels), reversed(starts), strict=True):
            grad_states = torch.zeros_like(states)  # of states after the level's chunks, at last of those before
            if next_level is not None:
                _add_to_previous(grad_states, grad_next, next_level)
            if grad_final is not None:
                for stretch, chunk in level.ends:
                    grad_states[chunk] += grad_final[stretch]
            for part in level.parts:
                part_grad = grad_out[part.places].float()
                is_padding = part.targets == ctx.plan.tokens
                part_grad = part_grad.masked_fill_(is_padding[..., None], 0)
                *input_grads, grad_states[part.chunks] = _chunks_backward(
                    _of_part(inputs, part),
                    states[part.chunks],
                    heads=ctx.heads,
                    grad_out=part_grad,
                    grad_states=grad_states[part.chunks],
                )
                for grad, input_grad in zip(grads, input_grads, strict=True):
                    grad[part.targets] = input_grad.to(grad.dtype)
            grad_next = grad_states
            next_level = level
        grad_roots = grad_next.new_zeros(ctx.plan.roots, *ctx.heads.state_shape)
        _add_to_previous(grad_roots, grad_next, next_level)
        return *(grad[:-1] for grad in grads), grad_roots, None, None


def _of_chunks(states: Tensor, level: _Level) -> Tensor:
    """Returns the state that each chunk of a level goes on from."""
    if level.previous == list(range(len(states))):
        return states
    return torch.stack([states[previous] for previous in level.previous])


def _add_to_previous(
    grad_before: Tensor,
    grad_states: Tensor,
    level: _Level,
) -> None:
    """Adds `grad_states`, of the states that a level's chunks go on from, to the gradients of the level before.

    They are added one by one, so that the sum of several branches has a fixed order.
    """
    if level.previous == list(range(len(grad_before))):
        grad_before += grad_states
        return
    for chunk, previous in enumerate(level.previous):
        grad_before[previous] += grad_states[chunk]


def _of_part(inputs: DeltaInputs, part: _Part) -> DeltaInputs:
    """Returns the inputs of a part's chunks. What fills a chunk up neither decays the state nor writes to it."""
    is_padding = (part.targets == len(inputs.qkv))[..., None]
    return DeltaInputs(
        qkv=inputs.qkv[part.places],
        log_decay=inputs.log_decay[part.places].masked_fill_(is_padding, 0),
        strength=inputs.strength[part.places].masked_fill_(is_padding, 0),
    )


def _chunks_backward(
    inputs: DeltaInputs,
    states: Tensor,
    heads: DeltaHeads,
    grad_out: Tensor,
    grad_states: Tensor,
) -> tuple[Tensor, ...]:
    """Returns the gradients with respect to the inputs and the states of `_run_chunks`, which is run again."""
    leaves = [tensor.detach().requires_grad_() for tensor in (*inputs, states)]
    *leaf_inputs, leaf_states = leaves
    with torch.enable_grad():
        results = _run_chunks(DeltaInputs(*leaf_inputs), leaf_states, heads)
    return torch.autograd.grad(results, leaves, (grad_out, grad_states))


def _run_chunks(
    inputs: DeltaInputs,
    states: Tensor,
    heads: DeltaHeads,
) -> tuple[Tensor, Tensor]:
    """Runs n chunks by themselves: inputs of [n, C] tokens, and the states [n, H, D_k, D_v] before them.

    Returns the outputs [n, C, H D_v] in fp32, and the states after the chunks. With g_i the decay from the chunk's
    start to token i, the changes u_i that tokens make solve one triangular system,
    u_i = b_i (v_i - g_i S^T k_i - sum_{j < i} (g_i / g_j) (k_i k_j) u_j).
    """
    with torch.autocast(states.device.type, enabled=False):
        q, k, v = (x.transpose(1, 2) for x in _by_head(inputs.qkv, heads))  # [n, H, C, D]
        log_decay = inputs.log_decay.transpose(1, 2)  # [n, H, C]
        strength = inputs.strength.float().transpose(1, 2)[..., None]  # [n, H, C, 1]
        since_start = log_decay.cumsum(-1)
        since_token = since_start[..., None] - since_start[..., None, :]  # [n, H, C, C]: at i, since j
        is_later = torch.ones_like(since_token[0, 0], dtype=torch.bool).triu(1)
        decay = since_token.masked_fill(is_later, float("-inf")).exp()
        from_start = since_start.exp()[..., None]  # [n, H, C, 1]
        system = k @ k.transpose(2, 3) * decay * strength  # the solver takes its diagonal as ones
        right = torch.cat((v, k * from_start), dim=-1) * strength
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        of_values, of_states = solved.split((heads.value_dim, heads.key_dim), dim=-1)
        changes = of_values - of_states @ states  # [n, H, C, D_v]
        out = q * from_start @ states + q @ k.transpose(2, 3) * decay @ changes
        to_end = (since_start[..., -1:] - since_start).exp()[..., None]
        next_states = states * from_start[:, :, -1:] + (k * to_end).transpose(2, 3) @ changes
    return out.transpose(1, 2).flatten(2), next_states


def _by_head(qkv: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values [..., H, D] in fp32; queries have length 1 / sqrt(D_k), keys 1."""
    q, k, v = qkv.float().split(heads.sizes, dim=-1)
    q = _normalized(q.unflatten(-1, (heads.keys, heads.key_dim))) * heads.key_dim**-0.5
    k = _normalized(k.unflatten(-1, (heads.keys, heads.key_dim)))
    v = v.unflatten(-1, (heads.values, heads.value_dim))
    served = heads.values // heads.keys
    if served > 1:
        q = q.repeat_interleave(served, dim=-2)
        k = k.repeat_interleave(served, dim=-2)
    return q, k, v


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
