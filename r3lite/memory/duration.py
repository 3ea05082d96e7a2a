"""How long a run takes, about: the bytes of weights that it reads, its matrix products, and its launches of kernels.

These are counted from the model's sizes and divided by the speeds of the device; nothing is run. What was measured,
on CPUs and on two cards, lay within a factor of two of it (`bench/memory.py` holds the two side by side). Not counted:
loading, retrieval, judges, checkpoints, and refills of groups. Episodes and rows are taken to be as long as they may
be, unless it is known that they are not. Once a run has taken two steps, its progress line counts by those instead.
"""

import math
from dataclasses import dataclass, replace

from r3lite.core.grant import Memory
from r3lite.devices.cards import MEASURED, Speeds
from r3lite.memory.planner import as_teacher, kinds, layers_bytes, linears, sizes
from r3lite.memory.work import Workload

REACHED = 0.5  # share of the speeds of large products, and of data sheets, that a network's products reach
# Kernels of a layer, forward and backward, more for weights in NF4, and of all else in a pass: see bench/kernels.py.
FORWARD_KERNELS = 24
BACKWARD_KERNELS = 58
NF4_KERNELS = 16
OTHER_KERNELS = 60
# Launches in a loop that a kernel in a network costs, with the Python around it; and one of a CUDA graph.
LAUNCHES = 10.0
LAUNCHES_IN_GRAPH = 1.5
UNITS = (  # name, seconds, and from how many seconds on it is used
    ("days", 86400, 2 * 86400),
    ("h", 3600, 2 * 3600),
    ("min", 60, 2 * 60),
    ("s", 1, 1),
    ("ms", 0.001, 0),
)
TRAINED_BYTES = 40  # that an optimizer step moves for each weight in full fine-tuning


@dataclass(frozen=True)
class Cost:
    """The bytes and operations of some passes."""

    read: float = 0.0  # bytes of weights, and of the KV cache in decoding
    products: float = 0.0  # operations of matrix products, attention among them
    launches: float = 0.0  # as many as of one kernel in a loop
    copied: float = 0.0  # bytes of layers, from the host's memory

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.read + other.read,
            self.products + other.products,
            self.launches + other.launches,
            self.copied + other.copied,
        )

    def __mul__(self, times: float) -> "Cost":
        return Cost(
            self.read * times,
            self.products * times,
            self.launches * times,
            self.copied * times,
        )

    def seconds(self, speeds: Speeds, dtype: str) -> float:
        """Returns the time on a device; a CPU copies within its memory."""
        bandwidth = speeds.bandwidth[dtype]
        moved = self.read / bandwidth + self.copied / (speeds.link or bandwidth)
        return (moved + self.products / speeds.flops[dtype]) / REACHED + self.launches * speeds.launch


def moved_bytes(w: Workload, memory: Memory) -> int:
    """Returns the bytes that are moved for a weight in a product; in NF4 its code, and the weight, written and read."""
    return 4 + 2 * w.element if memory.nf4 else w.element


def forward(w: Workload, memory: Memory, passes: float, tokens: float, keys: float) -> Cost:
    """Returns the cost of all layers over `tokens` tokens in `passes` passes, without gradients.

    A token attends to `keys` keys in the mean.
    """
    m = w.model
    layers = m.num_hidden_layers
    weights = 0
    for taps, count in kinds(m).items():
        weights += count * sum(out * into for out, into in linears(m, taps).values())
    attention = kinds(m)[0] * 4 * m.num_attention_heads * m.head_dim * keys
    kernels = FORWARD_KERNELS + (NF4_KERNELS if memory.nf4 else 0)
    return Cost(
        read=passes * weights * moved_bytes(w, memory),
        products=tokens * (2 * weights + attention),
        launches=passes * (layers * kernels + OTHER_KERNELS) * LAUNCHES,
        copied=passes * layers_bytes(w, memory.nf4) if memory.stream_layers else 0,
    )


def head(w: Workload, passes: float, tokens: float, products: int = 1) -> Cost:
    """Returns the cost of the head on `tokens` tokens, in so many products a token."""
    weights = w.vocabulary * w.model.hidden_size
    return Cost(
        read=passes * products * weights * w.element,
        products=tokens * products * 2 * weights,
    )


@dataclass(frozen=True)
class Packs:
    """Passes over rows that are laid end to end and begin alike: sums over all passes."""

    passes: int
    tokens: float
    loss_tokens: float
    keys: float  # that a token attends to in the mean


def packs(w: Workload, memory: Memory, rows: int, rows_per_pass: int) -> Packs:
    """Returns the passes over `rows` rows, at most `rows_per_pass` of them in one."""
    length = w.mean_tokens or w.row_tokens
    shared = min(w.shared, length)
    pass_tokens = max(memory.micro_batch_tokens, w.pass_tokens)
    fitting = max(1, int((pass_tokens - shared) / max(1, length - shared)))
    passes = math.ceil(rows / min(fitting, rows_per_pass))
    return Packs(
        passes=passes,
        tokens=rows * (length - shared) + passes * shared,
        loss_tokens=rows * (w.writes or length),
        keys=length / 2,
    )


def decode(w: Workload, memory: Memory, rows: int, slots: float) -> Cost:
    """Returns the cost of one more token in each of `rows` rows, whose caches hold `slots` tokens in the mean."""
    m = w.model
    step = forward(w, memory, passes=1, tokens=rows, keys=slots)
    if w.on_cuda and not memory.stream_layers:
        step = replace(step, launches=step.launches * LAUNCHES_IN_GRAPH / LAUNCHES)
    numbers = 2 * m.num_key_value_heads * m.head_dim * kinds(m)[0]
    cache = Cost(read=rows * slots * numbers * w.element)
    return step + head(w, passes=1, tokens=rows) + cache


def sample(w: Workload, memory: Memory, episodes: int) -> Cost:
    """Returns the cost of episodes: given tokens are read, the others decoded one after the other."""
    rows = min(memory.rollout_batch_size, episodes)
    length = w.mean_tokens or w.row_tokens
    read_tokens = length - w.writes
    shared = min(w.shared, read_tokens)
    prefixes = w.contexts.episodes if w.contexts else 1
    tokens = episodes * (read_tokens - shared) + prefixes * shared
    passes = math.ceil(tokens / memory.micro_batch_tokens)
    reading = forward(w, memory, passes, tokens, keys=read_tokens / 2)
    prompt = min(read_tokens, w.shared or w.reads)
    step = decode(w, memory, rows, slots=(prompt + length) / 2)
    return reading + step * (w.writes * episodes / rows)


def score(w: Workload, memory: Memory) -> Cost:
    """Returns the cost of log-probabilities of a round's episodes, or of rows, under another model."""
    p = packs(w, memory, w.learned_rows, w.scored_rows)
    layers = forward(w, memory, p.passes, p.tokens, p.keys)
    return layers + head(w, p.passes, p.loss_tokens)


def update(w: Workload, memory: Memory) -> Cost:
    """Returns the cost of the optimizer steps of a round, or of one of SFT."""
    steps = math.ceil(w.learned_rows / w.step_rows) * w.epochs
    p = packs(w, memory, w.step_rows, w.rows)
    once = forward(w, memory, p.passes, p.tokens, p.keys)
    layers = w.model.num_hidden_layers
    backward_kernels = p.passes * (layers * BACKWARD_KERNELS + OTHER_KERNELS) * LAUNCHES
    recomputed = min(memory.recompute_layers, layers) / layers
    cost = once * (2 + recomputed)
    cost += Cost(launches=backward_kernels)
    cost += head(w, p.passes, p.loss_tokens, products=3 if w.full_tuning else 2)
    if w.full_tuning:
        weights = sum(map(sum, sizes(w.model)))
        cost += Cost(read=TRAINED_BYTES * weights, products=once.products)
    return cost * steps


@dataclass(frozen=True)
class Duration:
    """The predicted time of a step of SFT, of a round or of an evaluation, and of all of a run's."""

    phases: dict[str, float]  # seconds
    workload: Workload
    validation: float = 0.0  # seconds of one; 0: there is none

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
        """Validations of a run whose steps are known: before the first round, every few and after the last."""
        w = self.workload
        if not w.steps or not w.held_out:
            return 0
        return 1 + math.ceil(w.steps / w.validate_every)

    @property
    def unit(self) -> str:
        """The piece of the run that `seconds` are of."""
        w = self.workload
        if w.trains:
            return "a round" if w.episodes else "a step"
        if w.episodes:
            return f"sampling {w.episodes:,} episodes"
        return f"reading {w.step_rows:,} trajectories"

    @property
    def remedy(self) -> str:
        """The flags that make it shorter."""
        flags = "--batch-size"
        if self.workload.episodes:
            flags = "--batch-size, --num-generations" if self.workload.trains else "--limit"
        return f"Lower {flags} or --max-length."

    def line(self) -> str:
        """Returns the prediction in words: of a step, by phase, and of the run."""
        w = self.workload
        message = f"about {in_words(self.seconds)} for {self.unit}"
        if len(self.phases) > 1:
            parts = (f"{phase} {in_words(seconds)}" for phase, seconds in self.phases.items())
            message += f" ({', '.join(parts)})"
        if w.episodes or not w.mean_tokens:
            noun = "episode" if w.episodes else "row"
            message += f" if every {noun} has {w.row_tokens:,} tokens, the most it may"
        if w.refills:
            message += f", without up to {w.refills} refills"
        if self.validation:
            message += f"; {in_words(self.validation)} for a validation"
        if self.run:
            message += f"; {in_words(self.run)} for the run of {w.steps:,}"
        elif w.trains:
            message += f"; the run: {self.unit} times their number, which --max-steps sets"
        return f"{message}. Within a factor of two, {self._origin()}"

    def _origin(self) -> str:
        speeds = self.workload.speeds
        assert speeds
        if speeds.source == MEASURED:
            return "from this device's speed just now"
        return f"from half the peak speed of the {speeds.name}"

    def report(self) -> dict:
        """Returns the prediction as JSON."""
        speeds = self.workload.speeds
        assert speeds
        record = {
            "phases": {phase: round(seconds, 4) for phase, seconds in self.phases.items()},
            "step": round(self.seconds, 4),
            "run": None if self.run is None else round(self.run, 1),
        }
        if self.validation:
            record["validation"] = round(self.validation, 4)
        return record | {"device": speeds.name, "speeds_from": speeds.source}


def predict(w: Workload, memory: Memory) -> Duration | None:
    """Returns how long a run takes; None if the device's speeds are not known."""
    if w.speeds is None or w.dtype not in w.speeds.flops:
        return None
    costs = {}
    if w.contexts:
        costs["contexts"] = sample(w.contexts, memory, w.contexts.episodes)
    if w.episodes:
        costs["sample"] = sample(w, memory, w.episodes)
    if w.expanded:
        costs["expand"] = sample(w, memory, w.expanded)
    if w.scores:
        costs["score"] = score(w, memory) * w.scores
    if w.teacher:
        costs["teach"] = score(*as_teacher(w, memory, w.teacher))
    if w.trains:
        costs["update"] = update(w, memory)
    phases = {}
    for phase, cost in costs.items():
        phases[phase] = cost.seconds(w.speeds, w.dtype)
    validation = 0.0
    if w.held_out:
        validation = sample(w, memory, w.held_out).seconds(w.speeds, w.dtype)
    return Duration(phases, w, validation)


def in_words(seconds: float) -> str:
    """Returns a time in words, to two digits."""
    unit, size = next((unit, size) for unit, size, smallest in UNITS if seconds >= smallest)
    number = seconds / size
    return f"{number:.1f} {unit}" if number < 9.95 else f"{number:,.0f} {unit}"
