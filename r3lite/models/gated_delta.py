"""The gated delta rule (arXiv 2412.06464, equation 10), the linear attention of Qwen3.5: step by step and in chunks.

Each head has a state S [D_k, D_v] in the place of a KV cache. A token with key k, value v, decay a and strength b makes

    S <- a S + b k (v - a S^T k)^T        and then its query q reads        o = S^T q / sqrt(D_k)

where q and k are scaled to length 1. In chunks of tokens (the WY representation of arXiv 2406.06484, section 3, with
the decay of 2412.06464, section 3.3) the rule is a few products of matrices, and only states go from chunk to chunk.
All is computed in fp32. Knows nothing of models: callers pass tensors, and a plan of which tokens follow which.

In this file H is the number of value heads, N the number of tokens, C the tokens of a chunk, D_k and D_v the sizes of a
key and of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64  # tokens
TOGETHER = 4  # the most chunks that are computed at once: the temporaries of more would take much memory
EPS = 1e-6  # added to the squared length of queries and keys


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a layer. Each key head, with its query head, serves the same number of value heads."""

    key_heads: int  # the number of key heads, and of query heads
    value_heads: int  # H, the number of value heads, a multiple of `key_heads`
    key_dim: int  # D_k, numbers of a query or a key in one head
    value_dim: int  # D_v, numbers of a value in one head

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many numbers a token has in its queries, in its keys and in its values, over all heads."""
        key_numbers = self.key_heads * self.key_dim
        return key_numbers, key_numbers, self.value_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the states of a row: [H, D_k, D_v]."""
        return self.value_heads, self.key_dim, self.value_dim


class DeltaInputs(NamedTuple):
    """What the rule reads of N tokens. In some places [chunks, C] or [B, T] stands for N."""

    qkv: Tensor  # [N, sum of DeltaHeads.sizes]
    log_decay: Tensor  # log a, [N, H], at most 0; fp32
    strength: Tensor  # b, [N, H], from 0 to 1

    def flat(self) -> "DeltaInputs":
        """Returns inputs of [B, T] tokens as those of B T tokens."""
        return DeltaInputs(*(tensor.flatten(0, 1) for tensor in self))


@dataclass
class _Part:
    """Some chunks of a level that are computed at once. Short chunks are padded to C tokens."""

    chunks: slice  # the chunks, by their numbers in the level
    places: Tensor  # [chunks, C], the tokens' numbers among the N tokens; padding repeats the chunk's last token
    targets: Tensor  # [chunks, C], the same numbers, but N in place of padding


@dataclass
class _Level:
    """The chunks of equal depth in the forest, see ChunkPlan."""

    # For each chunk, whose state it starts from: in level 0 the number of a root, else of a chunk of the level before.
    previous: list[int] = field(default_factory=list)
    spans: list[range] = field(default_factory=list)  # for each chunk, the numbers of its tokens among the N tokens
    # The stretches whose last chunk is in this level: the stretch's number, and the number of its last chunk.
    ends: list[tuple[int, int]] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)

    def add(self, previous: int, span: range) -> int:
        """Adds a chunk and returns its number in the level."""
        self.previous.append(previous)
        self.spans.append(span)
        return len(self.spans) - 1


class ChunkPlan:
    """How the N tokens of a pass are cut into chunks, and which state each chunk starts from.

    The tokens are stretches, laid end to end. A stretch with a parent, which is an earlier stretch, starts from the
    state at the parent's end. A stretch without a parent is a root, and starts from a state that the caller passes. So
    the chunks form a forest. The chunks of one depth, a level, are computed together, and a chunk that several branches
    start from is computed once.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        parents: Sequence[int | None],
        device: torch.device,
    ):
        """`sizes`: the tokens of each stretch, at least 1. `parents`: the number of its parent; None for a root."""
        chunk = min(CHUNK, max(sizes))
        self.roots = 0  # number of roots
        self.levels: list[_Level] = []
        last_chunks: list[tuple[int, int]] = []  # for each stretch, the level of its last chunk and its number there
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
        self.tokens = first  # N
        self.stretches = len(sizes)  # number of stretches
        self._lay_out(chunk, device)

    def _lay_out(self, chunk: int, device: torch.device) -> None:
        """Makes the parts of all levels, with chunks of `chunk` tokens. Their indices go to the device in one copy."""
        places = []
        targets = []
        for level in self.levels:
            for span in level.spans:
                padding = chunk - len(span)
                last_token = span[-1]
                places.append([*span] + [last_token] * padding)
                targets.append([*span] + [self.tokens] * padding)
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
        recalled = (k[:, :, None] @ states)[:, :, 0]  # (a S)^T k, [N, H, D_v]
        change = (v - recalled) * inputs.strength.float()[..., None]  # [N, H, D_v]
        # baddbmm adds k change^T without a tensor of its own for this product: states are large.
        flat_states = torch.baddbmm(
            states.flatten(0, 1),  # [N H, D_k, D_v]
            k.flatten(0, 1)[..., None],  # [N H, D_k, 1]
            change.flatten(0, 1)[:, None],  # [N H, 1, D_v]
        )
        states = flat_states.view_as(states)
        out = (q[:, :, None] @ states)[:, :, 0]
    return out.flatten(1).to(inputs.qkv.dtype), states


def delta_chunks(
    inputs: DeltaInputs,
    states: Tensor | None,
    heads: DeltaHeads,
    plan: ChunkPlan,
) -> tuple[Tensor, Tensor]:
    """Runs the stretches of a plan from the roots' states [roots, H, D_k, D_v] in fp32; None stands for zeros.

    Returns the outputs [N, H D_v] in the dtype of the inputs' qkv, and the states [stretches, H, D_k, D_v] after each
    stretch. The backward pass runs each chunk again, so that only the inputs and one state per chunk are kept for it.
    """
    if states is None:
        states = inputs.log_decay.new_zeros(plan.roots, *heads.state_shape)
    return _Chunks.apply(*inputs, states, heads, plan)


class _Chunks(torch.autograd.Function):
    """Computes `delta_chunks` level by level, and its gradients from the last level to the first."""

    @staticmethod
    def forward(ctx, qkv, log_decay, strength, states, heads, plan):
        inputs = DeltaInputs(qkv, log_decay, strength)
        out = qkv.new_empty(plan.tokens + 1, heads.value_heads * heads.value_dim)  # place N is for padding: never read
        final_states = states.new_empty(plan.stretches, *heads.state_shape)
        starts = []  # for each level, the states that its chunks start from
        for level in plan.levels:
            states = _start_states(states, level)
            if any(ctx.needs_input_grad):
                starts.append(states)
            next_states = []
            for part in level.parts:
                part_inputs = _inputs_of_part(inputs, part)
                part_out, part_states = _run_chunks(part_inputs, states[part.chunks], heads)
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
        # Gradients of the inputs. Place N is for padding: never read.
        grads = [tensor.new_empty(len(tensor) + 1, *tensor.shape[1:]) for tensor in inputs]
        grad_next: Tensor | None = None  # of the states that the chunks of `next_level` start from
        next_level: _Level | None = None
        for level, states in zip(reversed(ctx.plan.levels), reversed(starts), strict=True):
            # At first these are the gradients of the states after the level's chunks. Part by part they are replaced by
            # the gradients of the states that the chunks start from.
            grad_states = torch.zeros_like(states)
            if next_level is not None:
                _add_to_previous(grad_states, grad_next, next_level)
            if grad_final is not None:
                for stretch, chunk in level.ends:
                    grad_states[chunk] += grad_final[stretch]
            for part in level.parts:
                part_grad = grad_out[part.places].float()
                is_padding = part.targets == ctx.plan.tokens
                part_grad = part_grad.masked_fill_(is_padding[..., None], 0)
                *input_grads, start_grads = _chunks_backward(
                    _inputs_of_part(inputs, part),
                    states[part.chunks],
                    heads=ctx.heads,
                    grad_out=part_grad,
                    grad_states=grad_states[part.chunks],
                )
                grad_states[part.chunks] = start_grads
                for grad, input_grad in zip(grads, input_grads, strict=True):
                    grad[part.targets] = input_grad.to(grad.dtype)
            grad_next = grad_states
            next_level = level
        grad_roots = grad_next.new_zeros(ctx.plan.roots, *ctx.heads.state_shape)
        _add_to_previous(grad_roots, grad_next, next_level)
        return *(grad[:-1] for grad in grads), grad_roots, None, None


def _start_states(states: Tensor, level: _Level) -> Tensor:
    """Returns the state that each chunk of a level starts from.

    `states` are those after the level before or, for level 0, those of the roots.
    """
    if level.previous == list(range(len(states))):
        return states
    return torch.stack([states[previous] for previous in level.previous])


def _add_to_previous(
    grad_before: Tensor,
    grad_states: Tensor,
    level: _Level,
) -> None:
    """Adds the gradients of the states that a level's chunks start from to those of the states they were copied from.

    `grad_before` has the gradients of the states after the level before, or of the roots' states. A state that several
    branches start from gets several gradients; these are added one by one, so that the sum has a fixed order.
    """
    if level.previous == list(range(len(grad_before))):
        grad_before += grad_states
        return
    for chunk, previous in enumerate(level.previous):
        grad_before[previous] += grad_states[chunk]


def _inputs_of_part(inputs: DeltaInputs, part: _Part) -> DeltaInputs:
    """Returns the inputs of a part's chunks. Padding neither decays the state nor writes to it."""
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
    """Runs n chunks, none of which follows another: inputs of [n, C] tokens, from the states S [n, H, D_k, D_v].

    Returns the outputs [n, C, H D_v] in fp32, and the states after the chunks. Let g_i be the decay from the chunk's
    start to token i (its own included). The changes u_i that tokens make to the state solve one triangular system,
    u_i + sum_{j < i} b_i (g_i / g_j) (k_i^T k_j) u_j = b_i (v_i - g_i S^T k_i).
    Then o_i = g_i S^T q_i + sum_{j <= i} (g_i / g_j) (q_i^T k_j) u_j, and the state after the chunk of C tokens is
    g_C S + sum_j (g_C / g_j) k_j u_j^T.
    """
    with torch.autocast(states.device.type, enabled=False):
        q, k, v = (tensor.transpose(1, 2) for tensor in _by_head(inputs.qkv, heads))  # [n, H, C, D]
        log_decay = inputs.log_decay.transpose(1, 2)  # [n, H, C]
        strength = inputs.strength.float().transpose(1, 2)[..., None]  # [n, H, C, 1]
        log_g = log_decay.cumsum(-1)  # [n, H, C]
        log_ratio = log_g[..., None] - log_g[..., None, :]  # log (g_i / g_j) at [i, j], [n, H, C, C]
        is_later = torch.ones_like(log_ratio[0, 0], dtype=torch.bool).triu(1)  # j > i
        ratio = log_ratio.masked_fill(is_later, float("-inf")).exp()
        g = log_g.exp()[..., None]  # [n, H, C, 1]
        # The solver ignores the diagonal and takes it as ones. S is not part of the right side yet: solved with b v and
        # with b g k, the system gives x and y, and the changes are x - y S.
        system = (k @ k.transpose(2, 3)) * ratio * strength
        right = torch.cat((v, k * g), dim=-1) * strength
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        x, y = solved.split((heads.value_dim, heads.key_dim), dim=-1)
        changes = x - y @ states  # u, [n, H, C, D_v]
        out = (q * g) @ states + ((q @ k.transpose(2, 3)) * ratio) @ changes
        ratio_at_end = (log_g[..., -1:] - log_g).exp()[..., None]  # g_C / g_j, [n, H, C, 1]
        next_states = states * g[:, :, -1:] + (k * ratio_at_end).transpose(2, 3) @ changes
    return out.transpose(1, 2).flatten(2), next_states


def _by_head(qkv: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values [..., H, D] in fp32, one of each for every value head.

    Queries have the length 1 / sqrt(D_k), keys the length 1.
    """
    q, k, v = qkv.float().split(heads.sizes, dim=-1)
    q = _normalized(q.unflatten(-1, (heads.key_heads, heads.key_dim))) * heads.key_dim**-0.5
    k = _normalized(k.unflatten(-1, (heads.key_heads, heads.key_dim)))
    v = v.unflatten(-1, (heads.value_heads, heads.value_dim))
    repeats = heads.value_heads // heads.key_heads
    if repeats > 1:
        q = q.repeat_interleave(repeats, dim=-2)
        k = k.repeat_interleave(repeats, dim=-2)
    return q, k, v


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
