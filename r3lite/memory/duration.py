"""Predicts how long a run takes, from the bytes that it moves, its matrix products, and its launches of kernels.

These are counted from the model's sizes and divided by the speeds of the device; nothing is run. Measured times, on
CPUs and on two cards, were within a factor of two of the predictions (`bench/memory.py` shows both). Not counted:
loading, retrieval, judges, checkpoints, and refills of groups. Episodes and rows are taken to have the maximum length,
unless their lengths are known. Once a run has taken a step, its progress line uses measured times instead.
"""

import math
from dataclasses import dataclass, replace

from r3lite.core.grant import Memory
from r3lite.devices.cards import MEASURED, Speeds
from r3lite.memory.layer_tensors import delta_heads, layer_tensors, layers_by_taps, tensor_sizes
from r3lite.memory.parameters import layers_bytes
from r3lite.memory.planner import as_teacher, runs_graphs
from r3lite.memory.work import Workload
from r3lite.models.gated_delta import CHUNK

# The share of a device's speed, as measured with large products or stated in a data sheet, that a network reaches.
REACHED_SHARE = 0.5
# Numbers of kernels, as bench/kernels.py counts them.
FORWARD_KERNELS = 24  # of a layer
BACKWARD_KERNELS = 58  # of a layer
NF4_KERNELS = 16  # in addition, in a layer's forward pass, if its weights are in NF4
RULE_KERNELS = 45  # in addition, for each chunk of a row, in a layer with the gated delta rule
OTHER_KERNELS = 60  # of a pass, outside of its layers
# The time of a kernel in a network, with the Python code around it, as a multiple of `Speeds.launch`, which is the time
# of a kernel in a loop of nothing else.
LAUNCHES = 10.0
LAUNCHES_IN_GRAPH = 1.5  # the same in a CUDA graph
TRAINED_BYTES = 40  # in full fine-tuning an optimizer step moves so many bytes for each weight
EXAMPLE_ROWS = 1000  # rows of the example run that is predicted for SFT if its data are not known
UNITS = (  # a unit's name, its seconds, and the shortest time in seconds that is stated in it
    ("days", 86400, 2 * 86400),
    ("h", 3600, 2 * 3600),
    ("min", 60, 2 * 60),
    ("s", 1, 1),
    ("ms", 0.001, 0),
)


@dataclass(frozen=True)
class Cost:
    """What one or more passes move, compute and launch."""

    moved: float = 0.0  # bytes that are read in the device's memory: weights, and the KV cache in decoding
    operations: float = 0.0  # floating-point operations of matrix products, those of attention included
    launches: float = 0.0  # the time of launching kernels, as a multiple of `Speeds.launch`
    copied: float = 0.0  # bytes of streamed layers, from the host's memory to the device's

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.moved + other.moved,
            self.operations + other.operations,
            self.launches + other.launches,
            self.copied + other.copied,
        )

    def __mul__(self, times: float) -> "Cost":
        return Cost(
            self.moved * times,
            self.operations * times,
            self.launches * times,
            self.copied * times,
        )

    def seconds(self, speeds: Speeds, dtype: str) -> float:
        """Returns the time on a device."""
        bandwidth = speeds.bandwidth[dtype]
        copy_bandwidth = speeds.link or bandwidth  # a CPU has no link: it copies within its memory
        moving = self.moved / bandwidth + self.copied / copy_bandwidth
        return (moving + self.operations / speeds.flops[dtype]) / REACHED_SHARE + self.launches * speeds.launch


def bytes_per_weight(w: Workload, memory: Memory) -> int:
    """Returns how many bytes a product moves for each weight.

    In NF4 each weight has an index of 2 bytes and its dequantized value, and both are written and read, see
    nf4.dequantize.
    """
    if memory.nf4:
        return 2 * (2 + w.element)
    return w.element


def forward(w: Workload, memory: Memory, passes: float, tokens: float, keys: float) -> Cost:
    """Returns the cost of all layers over `tokens` tokens in `passes` passes, without gradients.

    A token attends to `keys` keys on average.
    """
    m = w.model
    layers = m.num_hidden_layers
    attention_layers = layers_by_taps(m)[0]
    weights = 0
    for taps, count in layers_by_taps(m).items():
        weights += count * sum(out * into for out, into in layer_tensors(m, taps).linears.values())
    # Operations of a token: for each number of its queries and each key, 2 for the score and 2 for the output.
    attention = attention_layers * 4 * m.num_attention_heads * m.head_dim * keys
    kernels = layers * FORWARD_KERNELS
    if memory.nf4:
        kernels += layers * NF4_KERNELS
    if delta_heads(m):
        chunks = math.ceil(min(tokens / passes, w.row_tokens) / CHUNK)
        kernels += (layers - attention_layers) * chunks * RULE_KERNELS
    return Cost(
        moved=passes * weights * bytes_per_weight(w, memory),
        operations=tokens * (2 * weights + attention),
        launches=passes * (kernels + OTHER_KERNELS) * LAUNCHES,
        copied=passes * layers_bytes(w, memory.nf4) if memory.stream_layers else 0,
    )


def head(w: Workload, passes: float, tokens: float, products: int = 1) -> Cost:
    """Returns the cost of the head over `tokens` tokens in `passes` passes.

    A pass multiplies by the head `products` times: once in the forward pass, and again in the backward pass.
    """
    weights = w.vocabulary * w.model.hidden_size
    return Cost(
        moved=passes * products * weights * w.element,
        operations=tokens * products * 2 * weights,
    )


@dataclass(frozen=True)
class Packs:
    """Passes over rows that are laid end to end. The first tokens that all rows share are read once in each pass."""

    passes: int
    tokens: float  # of all passes
    loss_tokens: float  # tokens of all passes that the head runs on
    keys: float  # keys that a token attends to, on average


def count_packs(w: Workload, memory: Memory, rows: int, rows_per_pass: int) -> Packs:
    """Returns the passes over `rows` rows, with at most `rows_per_pass` rows in a pass."""
    length = w.mean_tokens or w.row_tokens
    shared = min(w.shared, length)
    pass_tokens = max(memory.micro_batch_tokens, w.pass_tokens)
    rows_that_fit = max(1, int((pass_tokens - shared) / max(1, length - shared)))
    passes = math.ceil(rows / min(rows_that_fit, rows_per_pass))
    return Packs(
        passes=passes,
        tokens=rows * (length - shared) + passes * shared,
        loss_tokens=rows * (w.writes or length),
        keys=length / 2,
    )


def decode(w: Workload, memory: Memory, rows: int, slots: float) -> Cost:
    """Returns the cost of one more token in each of `rows` rows, whose caches hold `slots` tokens on average."""
    m = w.model
    step = forward(w, memory, passes=1, tokens=rows, keys=slots)
    if runs_graphs(w, memory):
        step = replace(step, launches=step.launches * LAUNCHES_IN_GRAPH / LAUNCHES)
    attention_layers = layers_by_taps(m)[0]
    cached_numbers = 2 * m.num_key_value_heads * m.head_dim * attention_layers  # of a token: its keys and values
    cache = Cost(moved=rows * slots * cached_numbers * w.element)
    return step + head(w, passes=1, tokens=rows) + cache


def sample(w: Workload, memory: Memory, episodes: int) -> Cost:
    """Returns the cost of sampling `episodes` episodes.

    Tokens that the model does not write are read in passes; those that it writes are decoded one after another.
    """
    rows = min(memory.rollout_batch_size, episodes)
    length = w.mean_tokens or w.row_tokens
    read_tokens = length - w.writes
    shared = min(w.shared, read_tokens)
    # With --learn answer, all episodes that begin with one context share it. Otherwise all episodes share one prefix.
    prefixes = w.contexts.episodes if w.contexts else 1
    tokens = episodes * (read_tokens - shared) + prefixes * shared
    passes = math.ceil(tokens / memory.micro_batch_tokens)
    reading = forward(w, memory, passes, tokens, keys=read_tokens / 2)
    # Tokens in the cache when a row's first token is decoded: the shared prompt. If it is not known (0), as many as are
    # read at once.
    first_slots = min(read_tokens, w.shared or w.reads)
    step = decode(w, memory, rows, slots=(first_slots + length) / 2)
    return reading + step * (w.writes * episodes / rows)


def score(w: Workload, memory: Memory) -> Cost:
    """Returns the cost of computing the log-probabilities of a round's episodes, or of trajectories, by one model."""
    packs = count_packs(w, memory, rows=w.learned_rows, rows_per_pass=w.scored_rows)
    layers = forward(w, memory, packs.passes, packs.tokens, packs.keys)
    return layers + head(w, packs.passes, packs.loss_tokens)


def update(w: Workload, memory: Memory) -> Cost:
    """Returns the cost of the optimizer steps of a round, or of one optimizer step of SFT."""
    steps = math.ceil(w.learned_rows / w.step_rows) * w.epochs
    packs = count_packs(w, memory, rows=w.step_rows, rows_per_pass=w.rows)
    forward_cost = forward(w, memory, packs.passes, packs.tokens, packs.keys)
    layers = w.model.num_hidden_layers
    backward_launches = packs.passes * (layers * BACKWARD_KERNELS + OTHER_KERNELS) * LAUNCHES
    recomputed_share = min(memory.recompute_layers, layers) / layers
    # The forward pass counts once for itself, once for the gradients of the layers' inputs, which take as many
    # products, and again for the layers that are recomputed. The gradients of an adapter take few products: they are
    # not counted.
    cost = forward_cost * (2 + recomputed_share)
    cost += Cost(launches=backward_launches)
    head_products = 3 if w.full_tuning else 2  # forward, gradients of the inputs, and in full tuning of the weights
    cost += head(w, packs.passes, packs.loss_tokens, head_products)
    if w.full_tuning:
        weights = sum(map(sum, tensor_sizes(w.model)))
        cost += Cost(moved=TRAINED_BYTES * weights, operations=forward_cost.operations)
    return cost * steps


@dataclass(frozen=True)
class Duration:
    """The predicted time of a step of SFT, of a round or of an evaluation, and of the whole run."""

    phases: dict[str, float]  # seconds of each phase of the step, round or evaluation
    workload: Workload
    validation_seconds: float = 0.0  # of one validation; 0: there is no validation

    @property
    def seconds(self) -> float:
        """Seconds of the step, round or evaluation."""
        return sum(self.phases.values())

    @property
    def run_seconds(self) -> float | None:
        """Seconds of the whole run; None if its number of steps is not known."""
        if not self.workload.steps:
            return None
        return self.workload.steps * self.seconds + self.validation_count * self.validation_seconds

    @property
    def validation_count(self) -> int:
        """How often a run validates: before the first round, every few rounds and after the last.

        0 if it does not validate, or if its number of steps is not known.
        """
        w = self.workload
        if not w.steps or not w.held_out:
            return 0
        return 1 + math.ceil(w.steps / w.validate_every)

    @property
    def unit(self) -> str:
        """In words, what takes `seconds`."""
        w = self.workload
        if w.trains:
            return "a round" if w.episodes else "a step"
        if w.episodes == 1:
            return "sampling an answer"
        if w.episodes:
            return f"sampling {w.episodes:,} answers"
        return f"reading {w.step_rows:,} trajectories"

    @property
    def is_upper_bound(self) -> bool:
        """Whether the lengths of rows or episodes are not known, so that the prediction is for the maximum length."""
        return bool(self.workload.episodes) or not self.workload.mean_tokens

    @property
    def remedy(self) -> str:
        """Says which flags shorten the time."""
        flags = "--batch-size"
        if self.workload.episodes:
            flags = "--batch-size, --num-generations" if self.workload.trains else "--limit"
        return f"Lower {flags} or --max-length."

    def line(self) -> str:
        """Returns the prediction in words: for a step, round or evaluation, by phase, and for the whole run.

        The words say whether it is an upper bound, see `is_upper_bound`.
        """
        w = self.workload
        message = f"about {in_words(self.seconds)} for {self.unit}"
        if self.is_upper_bound:
            message = f"at most {message}"
        if len(self.phases) > 1:
            parts = (f"{phase} {in_words(seconds)}" for phase, seconds in self.phases.items())
            message += f" ({', '.join(parts)})"
        if w.refills:
            message += f", without up to {w.refills} refills"
        if self.validation_seconds:
            message += f"; {in_words(self.validation_seconds)} for a validation"
        if w.trains:
            message += f"; {self._whole_run()}"
        if self.is_upper_bound:
            return f"{message}. {self._bound_in_words()}, {self._origin()}"
        return f"{message}. Within a factor of two, {self._origin()}"

    def _bound_in_words(self) -> str:
        """Says which length makes the prediction an upper bound, and how far below it the time usually is."""
        w = self.workload
        if w.episodes:
            return (
                f"Usually several times less: this is for episodes of {w.row_tokens:,} tokens, the most they may have"
            )
        return f"Usually less: this is for rows of {w.row_tokens:,} tokens, the most they may have"

    def _whole_run(self) -> str:
        """Says how long the whole run takes.

        If the number of steps is not known, names the flags that decide it. For SFT, first says how long a pass over
        EXAMPLE_ROWS rows takes.
        """
        w = self.workload
        if self.run_seconds:
            return f"{in_words(self.run_seconds)} for the run of {run_length(w)}"
        deciding = "--data or --max-steps sets how many the run takes"  # steps or rounds
        if w.episodes:
            return deciding
        example = replace(w, steps=math.ceil(EXAMPLE_ROWS / w.step_rows))
        example_seconds = example.steps * self.seconds
        time = f"{in_words(example_seconds)} for {run_length(example)}"
        return f"{time}, a pass over {EXAMPLE_ROWS:,} rows; {deciding}"

    def _origin(self) -> str:
        """Says which speeds the prediction comes from."""
        speeds = self.workload.speeds
        assert speeds
        if speeds.source == MEASURED:
            return "from this device's speed just now"
        return f"from half the peak speed of the {speeds.name}"

    def report(self) -> dict:
        """Returns the prediction as JSON values, with all times in seconds."""
        speeds = self.workload.speeds
        assert speeds
        record = {
            "phases": {phase: round(seconds, 4) for phase, seconds in self.phases.items()},
            "step": round(self.seconds, 4),
            "run": None if self.run_seconds is None else round(self.run_seconds, 1),
        }
        if self.validation_seconds:
            record["validation"] = round(self.validation_seconds, 4)
        return record | {"device": speeds.name, "speeds_from": speeds.source}


def run_length(w: Workload) -> str:
    """Returns the number of steps or rounds of a run in words, such as `300 steps`; "" if it is not known."""
    if not w.steps:
        return ""
    unit = "round" if w.episodes else "step"
    plural = "s" if w.steps > 1 else ""
    return f"{w.steps:,} {unit}{plural}"


def predict(w: Workload, memory: Memory) -> Duration | None:
    """Returns how long a run takes; None if the device's speeds in its dtype are not known."""
    if w.speeds is None or w.dtype not in w.speeds.flops:
        return None
    costs = {}
    if w.contexts and not w.demonstrated_contexts:
        costs["contexts"] = sample(w.contexts, memory, w.contexts.episodes)
    if w.episodes:
        costs["sample"] = sample(w, memory, w.episodes)
    if w.expanded:
        costs["expand"] = sample(w, memory, w.expanded)
    if w.scores:
        costs["score"] = score(w, memory) * w.scores
    if w.teacher:
        teacher_work, teacher_memory = as_teacher(w, memory, w.teacher)
        costs["teach"] = score(teacher_work, teacher_memory)
    if w.trains:
        costs["update"] = update(w, memory)
    phases = {}
    for phase, cost in costs.items():
        phases[phase] = cost.seconds(w.speeds, w.dtype)
    validation = 0.0
    if w.held_out:
        whole_episodes = w.contexts or w  # with --learn answer, too, a validation samples whole episodes
        validation = sample(whole_episodes, memory, w.held_out).seconds(w.speeds, w.dtype)
    return Duration(phases, w, validation)


def in_words(seconds: float) -> str:
    """Returns a time in words: to a tenth of its unit below 10, else to a whole number."""
    unit, size = next((unit, size) for unit, size, smallest in UNITS if seconds >= smallest)
    number = seconds / size
    if number < 9.95:  # with one decimal, a larger number would be 10.0
        return f"{number:.1f} {unit}"
    return f"{number:,.0f} {unit}"
