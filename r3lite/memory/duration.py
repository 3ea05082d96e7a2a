"""How long a run takes, in closed form: what its work moves, computes and launches, over the speeds of a device.

The costs are in bytes, operations and kernels, from the model's sizes and from how memory divides the work; nothing is
run to find them. `bench/memory.py` holds the seconds against measured ones. Not counted: loading, retrieval, judges,
checkpoints, and refills of groups, whose number is not known before. Episodes and rows are taken to be as long as they
may be, unless it is known that they are not.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from r3lite.core.grant import Memory
from r3lite.devices.cards import BESIDE_OTHERS, MEASURED, Speeds
from r3lite.memory.planner import adapter_bytes, as_teacher, layer_bytes, linears, sizes
from r3lite.memory.work import Workload

# Kernels: of a layer, forward, and backward; more for casts of adapters and their gradients in half precision, and for
# the weights of a layer in NF4; of all else in a pass; of the loss of a chunk of logits; of clipping and AdamW for each
# tensor of an adapter. Views are none. bench/kernels.py counts them.
LAYER_FORWARD, LAYER_BACKWARD, LAYER_CASTS, LAYER_NF4, AROUND, CHUNK, PER_TENSOR = 24, 49, 9, 16, 30, 16, 5
# Numbers that are read or written for a token in a layer, beside products: of the width of hidden states, and of the
# inside of the MLP.
FORWARD, BACKWARD = (30, 5), (60, 12)
# Bytes that are read or written for each logit: of a loss, of a loss with entropies, of scoring, of sampling.
LOSS, POLICY_LOSS, SCORING, SAMPLING = 32, 64, 12, 20
NF4_INDEX = 4.6  # bytes that are moved for each NF4 weight: its code, an index made of it, its share of the absmax
NF4_IN_CACHE = 6  # the same, and the weight written and read, on a CPU, where what a tile takes stays in the cache
TRAINED = 40  # bytes that an optimizer step moves for each trained weight


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's speeds that kinds of work reach."""

    activations: float  # of the bandwidth: what goes through activations number by number
    attention: float  # of the speed of matrix products
    launches: float  # how many launches in a loop one in a pass costs, with the Python and the views around it
    overlaps: bool  # whether weights are read while products are computed


# The CPU's are fitted to SFT, prefill and decoding of Qwen2.5-0.5B in bf16 and fp32 on one and two cores of AMD EPYCs.
# A card is taken to reach its speeds. Its launches are fitted to SFT of the same model on an H200, where the host sets
# the pace: 93 ms a step of 1,024 tokens. A CUDA graph launches all of a step at once.
CPU, CARD = Efficiency(0.35, 0.35, 20.0, False), Efficiency(1.0, 1.0, 2.5, True)
IN_GRAPH = 0.4  # launches that a kernel of a graph costs, of one in a pass


@dataclass(frozen=True)
class Cost:
    """What passes of one kind move, compute and launch."""

    weights: float = 0.0  # bytes of weights, and of the KV cache in decoding
    products: float = 0.0  # operations of matrix products with weights
    attention: float = 0.0  # operations of attention
    activations: float = 0.0  # bytes, read or written
    kernels: float = 0.0
    copied: float = 0.0  # bytes of layers, from the host's memory

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: float) -> "Cost":
        return Cost(*(a * times for a in vars(self).values()))

    def seconds(self, speeds: Speeds, dtype: str, efficiency: Efficiency) -> float:
        return self.computing(speeds, dtype, efficiency) + self.exposed(speeds, dtype, efficiency)

    def copying(self, speeds: Speeds) -> float:
        """Seconds in which layers are copied to the device. Of a CPU, a copy within its memory."""
        return self.copied / (speeds.link or speeds.bandwidth)

    def exposed(self, speeds: Speeds, dtype: str, efficiency: Efficiency) -> float:
        """Seconds of copying that are not hidden: on a card a layer is copied while the one before it computes."""
        copying = self.copying(speeds)
        return max(0.0, copying - self.computing(speeds, dtype, efficiency)) if efficiency.overlaps else copying

    def computing(self, speeds: Speeds, dtype: str, efficiency: Efficiency) -> float:
        flops, e = speeds.flops[dtype], efficiency
        read, computed = self.weights / speeds.reads.get(dtype, speeds.bandwidth), self.products / flops
        products = max(read, computed) if e.overlaps else read + computed
        beside = self.activations / (e.activations * speeds.bandwidth) + self.attention / (e.attention * flops)
        return products + beside + self.kernels * e.launches * speeds.launch


def adapter_weights(w: Workload) -> int:
    """Weights of a layer's adapters."""
    shapes = linears(w.model)
    return w.lora_r * sum(sum(shapes[name]) for name in w.targets)


def nf4_moved(w: Workload) -> float:
    """Bytes that are moved for each NF4 weight in a product: a card writes and reads it twice, see models/nf4.py."""
    return NF4_INDEX + 4 * w.element if w.on_cuda else NF4_IN_CACHE


def forward(w: Workload, memory: Memory, tokens: int, keys: float) -> Cost:
    """All layers over `tokens` tokens, each of which attends to `keys` keys in the mean, without gradients."""
    m, shapes, L = w.model, linears(w.model), w.model.num_hidden_layers
    weights = sum(out * into for out, into in shapes.values())
    adapted = [shapes[name] for name in w.targets]
    low = adapter_weights(w)
    numbers = FORWARD[0] * m.hidden_size + FORWARD[1] * m.intermediate_size
    numbers += sum(into + 2 * out for out, into in adapted)
    return Cost(
        weights=L * (weights * (0 if memory.nf4 else w.element) + 4 * low),
        products=L * 2 * (weights + low) * tokens,
        attention=L * 4 * m.num_attention_heads * m.head_dim * tokens * keys,
        activations=L * (numbers * tokens * w.element + (weights * nf4_moved(w) if memory.nf4 else 0)),
        kernels=L * (LAYER_FORWARD + (LAYER_NF4 if memory.nf4 else 0)) + AROUND,
        copied=L * layer_bytes(w, memory.nf4) if memory.stream_layers else 0,
    )


def backward(w: Workload, memory: Memory, tokens: int, keys: float) -> Cost:
    """The gradients of `forward`: of the inputs, and of the adapters' weights; layers that keep nothing run again."""
    again = forward(w, memory, tokens, keys)
    m, shapes, L = w.model, linears(w.model), w.model.num_hidden_layers
    adapted = [shapes[name] for name in w.targets]
    low = sum(out * into for out, into in shapes.values()) if w.full else adapter_weights(w)
    numbers = BACKWARD[0] * m.hidden_size + BACKWARD[1] * m.intermediate_size
    numbers += 3 * sum(into + out for out, into in adapted)
    nf4 = L * nf4_moved(w) * sum(out * into for out, into in shapes.values()) if memory.nf4 else 0
    casts = LAYER_CASTS if w.element == 2 else 0
    own = Cost(
        weights=again.weights,
        products=again.products + L * 2 * low * tokens,
        attention=2.5 * again.attention,  # its scores are computed again
        activations=L * numbers * tokens * w.element + nf4,
        kernels=L * (LAYER_BACKWARD + casts + (LAYER_NF4 if memory.nf4 else 0)) + AROUND,
    )
    own += replace(again, copied=0) * (min(memory.recompute_layers, L) / L)
    return replace(own, copied=again.copied * max(0, L - 2) / L)  # the last two layers are there


def head(w: Workload, memory: Memory, tokens: int, per_logit: int, products: int) -> Cost:
    """The head on `tokens` tokens, in `products` products; what is done with a logit moves `per_logit` bytes."""
    size, chunks = w.vocabulary * w.model.hidden_size, -(-tokens // memory.loss_chunk)
    return Cost(
        weights=chunks * products * size * w.element,
        products=products * 2 * size * tokens,
        activations=per_logit * w.vocabulary * tokens,
        kernels=chunks * CHUNK,
    )


def optimizer_step(w: Workload) -> Cost:
    weights = sum(map(sum, sizes(w.model))) if w.full else adapter_bytes(w) / 4
    return Cost(activations=TRAINED * weights, kernels=PER_TENSOR * 2 * len(w.targets) * w.model.num_hidden_layers)


@dataclass(frozen=True)
class Packs:
    """Passes over rows that are laid end to end, and begin alike."""

    count: int
    tokens: int  # of one pass
    keys: float  # that a token attends to, in the mean
    said: int  # tokens of one pass that the rows did not begin with as given ones


def packs(w: Workload, memory: Memory, rows: int, most: int) -> Packs:
    """The passes over `rows` rows, at most `most` of them in one."""
    length = w.mean_tokens or w.row_tokens
    shared = min(w.shared, length)
    apart = length - shared
    fit = max(1, (max(memory.micro_batch_tokens, w.pass_tokens) - shared) // max(1, apart))
    count = -(-rows // min(fit, most))
    each = rows / count
    tokens = shared + each * apart
    keys = (shared * shared / 2 + each * apart * (shared + apart / 2)) / tokens
    return Packs(count, tokens, keys, each * (w.writes or length))


def sample(w: Workload, memory: Memory) -> list[Cost]:
    """The episodes of a round: given tokens are read, the others decoded one after the other."""
    rows, length = min(memory.rollout_batch_size, w.episodes), w.mean_tokens or w.row_tokens
    given = length - w.writes
    start = min(given, w.shared or w.reads)
    prefixes = w.contexts.episodes if w.contexts else 1
    reading = w.episodes * (given - min(w.shared, given)) + prefixes * min(w.shared, given)
    passes = max(1, -(-reading // memory.micro_batch_tokens))
    read = forward(w, memory, reading / passes, given / 2) * passes
    return [read, *(c * (w.episodes * w.writes / rows) for c in decode(w, memory, rows, (start + length) / 2))]


def expand(w: Workload, memory: Memory) -> list[Cost]:
    """Other ends of some episodes, whose beginnings are read and not sampled."""
    return sample(replace(w, episodes=w.expanded, writes=w.expanded_writes), memory)


def validate(w: Workload, memory: Memory) -> list[Cost]:
    """Answers to the questions held out, as many at a time as a round has episodes."""
    at_once = replace(w, episodes=min(w.held_out, w.episodes))
    return [cost * (w.held_out / at_once.episodes) for cost in sample(at_once, memory)]


def decode(w: Workload, memory: Memory, rows: int, slots: float) -> list[Cost]:
    """One more token in each of `rows` rows, whose caches hold `slots` tokens in the mean."""
    m = w.model
    cache = rows * slots * 2 * m.num_key_value_heads * m.head_dim * w.element * m.num_hidden_layers
    step = forward(w, memory, rows, slots)
    step = replace(step, kernels=step.kernels * (IN_GRAPH if w.on_cuda and not memory.stream_layers else 1))
    return [step, head(w, memory, rows, SAMPLING, products=1), Cost(weights=cache)]


def score(w: Workload, memory: Memory) -> list[Cost]:
    """Log-probabilities of a round's episodes, or of rows, under the reference policy or a teacher."""
    p = packs(w, memory, (w.episodes + w.joining) or w.step_rows, w.scored_rows)
    return [forward(w, memory, p.tokens, p.keys) * p.count, head(w, memory, p.said, SCORING, products=1) * p.count]


def update(w: Workload, memory: Memory) -> list[Cost]:
    """The optimizer steps of a round, or one of SFT."""
    rows = (w.episodes + w.joining) or w.step_rows
    steps = -(-rows // w.step_rows)
    p = packs(w, memory, w.step_rows, w.rows)
    loss = head(w, memory, p.said, POLICY_LOSS if w.episodes else LOSS, products=3 if w.full else 2)
    if w.ratios_first:
        loss += head(w, memory, p.said, SCORING, products=1)
    passes = p.count * rows / w.step_rows * w.epochs
    one = forward(w, memory, p.tokens, p.keys), backward(w, memory, p.tokens, p.keys), loss
    return [*(cost * passes for cost in one), optimizer_step(w) * steps * w.epochs]


@dataclass(frozen=True)
class Duration:
    """The predicted time of a step of SFT, of a round or of an evaluation, and of all of a run's."""

    phases: dict[str, float]  # seconds
    workload: Workload
    validation: float = 0.0  # seconds of one; 0: there is none
    # Of layers that are streamed, by phase: seconds of copying, and those that are not hidden.
    copies: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def run(self) -> float | None:
        """Seconds of the whole run; None if its steps are not known."""
        if not self.workload.steps:
            return None
        return self.workload.steps * self.seconds + self.validations * self.validation

    @property
    def validations(self) -> int:
        """Of the whole run, whose steps are known: before the first round, every few and after the last."""
        w = self.workload
        return 1 + math.ceil(w.steps / w.validate_every) if w.steps and w.held_out else 0

    @property
    def what(self) -> str:
        w = self.workload
        if w.episodes:
            return "a round" if w.trains else f"sampling {w.episodes:,} episodes"
        return "a step" if w.trains else f"{w.step_rows:,} trajectories"

    @property
    def remedy(self) -> str:
        """What makes it shorter."""
        w = self.workload
        fewer = ("--batch-size, --num-generations" if w.trains else "--limit") if w.episodes else "--batch-size"
        return f"Lower {fewer} or --max-length."

    def line(self) -> str:
        """For people."""
        w, speeds = self.workload, self.workload.speeds
        assert speeds
        about = "about" if w.mean_tokens and not w.episodes else "up to"  # episodes may end early
        message = f"{about} {in_words(self.seconds)} for {self.what}"
        if len(self.phases) > 1:
            message += f" ({', '.join(f'{phase} {in_words(s)}' for phase, s in self.phases.items())})"
        if self.run and w.trains:
            message += f", {in_words(self.run)} for {w.steps:,}"
        if self.validation:
            many = f" and {self.validations:,} validations" if self.run else ", a validation"
            message += f"{many} of {in_words(self.validation)}"
        message += "".join(f"; {line}" for line in self._streaming())
        if w.refills:
            message += f"; without up to {w.refills} refills per round, each up to {in_words(self.phases['sample'])}"
        if speeds.source in (MEASURED, BESIDE_OTHERS):
            return f"{message}; predicted from this device's speed, {speeds.source}"
        return f"{message}; predicted from the peak speed of the {speeds.name}, so a lower bound"

    def _streaming(self) -> Iterator[str]:
        """What copying layers does to each phase, and how fast episodes are sampled meanwhile."""
        for phase, (copying, exposed) in self.copies.items():
            limit = "copying" if copying > self.phases[phase] - exposed else "computing"
            hidden = 100 * (1 - exposed / copying)
            yield f"{phase}: {in_words(copying)} to copy layers, {hidden:.0f} % hidden; limited by {limit}"
            if phase == "sample":
                yield f"{self.sampled_tokens_per_second:,.1f} tokens/s sampled"

    @property
    def sampled_tokens_per_second(self) -> float:
        w = self.workload
        return w.episodes * (w.writes or w.row_tokens) / self.phases["sample"]

    def report(self) -> dict:
        """As JSON."""
        speeds = self.workload.speeds
        assert speeds
        phases = {phase: round(s, 4) for phase, s in self.phases.items()}
        run = None if self.run is None else round(self.run, 1)
        record = {"phases": phases, "step": round(self.seconds, 4), "run": run}
        record |= {"validation": round(self.validation, 4)} if self.validation else {}
        if self.copies:
            record["copying"] = {
                phase: {"seconds": round(copying, 4), "hidden_percent": round(100 * (1 - exposed / copying), 1)}
                for phase, (copying, exposed) in self.copies.items()
            }
            if "sample" in self.phases:
                record["sampled_tokens_per_second"] = round(self.sampled_tokens_per_second, 1)
        return record | {"device": speeds.name, "speeds_from": speeds.source}


def predict(w: Workload, memory: Memory) -> Duration | None:
    """How long it takes; None if the device's speeds are not known."""
    if w.speeds is None or w.dtype not in w.speeds.flops:
        return None
    if memory.stream_layers and w.on_cuda and not w.speeds.link:  # measured by an earlier version
        return None
    costs = {"contexts": sample(w.contexts, memory)} if w.contexts else {}
    costs |= {"sample": sample(w, memory)} if w.episodes else {}
    costs |= {"expand": expand(w, memory)} if w.expanded else {}
    costs |= {"score": [cost * w.scores for cost in score(w, memory)]} if w.scores else {}
    costs |= {"teach": score(*as_teacher(w, memory, w.teacher))} if w.teacher else {}
    costs |= {"update": update(w, memory)} if w.trains else {}
    speeds = w.speeds, w.dtype, CARD if w.on_cuda else CPU

    def seconds(parts: list[Cost]) -> float:
        return sum(cost.seconds(*speeds) for cost in parts)

    validation = seconds(validate(w, memory)) if w.held_out else 0.0
    copies = {
        phase: (sum(cost.copying(w.speeds) for cost in parts), sum(cost.exposed(*speeds) for cost in parts))
        for phase, parts in costs.items()
        if any(cost.copied for cost in parts)
    }
    return Duration({phase: seconds(parts) for phase, parts in costs.items()}, w, validation, copies)


def in_words(seconds: float) -> str:
    """A time in words, to two digits."""
    units = {"days": 86400, "h": 3600, "min": 60, "s": 1, "ms": 0.001}
    name = next((name for name, size in units.items() if seconds >= (2 * size if size > 1 else size)), "ms")
    number = seconds / units[name]
    return f"{number:.1f} {name}" if number < 9.95 else f"{number:,.0f} {name}"
