"""What a run computes: the sizes from which its memory (planner.py) and its time (duration.py) are predicted."""

from dataclasses import dataclass

from r3lite.core.grant import Memory
from r3lite.devices.cards import Speeds
from r3lite.memory.cuda_parts import LAPTOP, Beside
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.nf4 import Packed


@dataclass(frozen=True)
class TeacherWork:
    """A second model that reads a round's episodes without gradients. It is in memory only while it reads."""

    model: ModelConfig
    nf4: bool
    top: int  # how many tokens of each distribution are kept, the most probable ones
    adapters: int = 0  # 1 if the teacher has an adapter
    lora_r: int = 8
    targets: tuple[str, ...] = ()
    packed: Packed | None = None


@dataclass(frozen=True)
class JudgeWork:
    """A second model that judges answers. It is in memory only while it judges."""

    model: ModelConfig
    vocabulary: int
    memory: Memory  # figures of its own, not those of the run: `rollout_batch_size` requests are answered together
    row_tokens: int  # the most tokens of a request and its reply
    packed: Packed | None = None


@dataclass(frozen=True)
class Workload:
    """The sizes of all that a run computes. They do not depend on the memory figures that are chosen for the run."""

    model: ModelConfig
    vocabulary: int  # the number of the tokenizer's ids: only so many rows of the head are used
    element: int  # bytes of a weight and of an activation: 2 or 4
    row_tokens: int  # tokens of the longest row or episode
    packed: Packed | None = None  # set if the model's folder is in NF4 already, whatever --quantize says
    trains: bool = True
    full_tuning: bool = False  # all weights are trained, and there is no adapter
    lora_r: int = 8
    targets: tuple[str, ...] = ()
    rows: int = 1  # the most rows of one backward pass
    step_rows: int = 1  # rows of one optimizer step
    captures: bool = False  # passes of SFT are run as CUDA graphs
    scored_rows: int = 1  # the most rows of one pass without gradients, such as by the reference policy
    shared: int = 0  # how many first tokens all rows are known to share: they are read once in a pass
    # For reinforcement learning and evaluation only.
    episodes: int = 0  # episodes that are sampled in a round; 0: nothing is sampled
    reads: int = 0  # the most tokens that a row is given at once: a prompt, or documents
    draft_tokens: int = 0  # the most tokens that are drafted for a row in one pass of decoding
    truncates: bool = False  # tokens are, or may be, sampled with top-k or top-p
    own_samplers: bool = False  # rows may have samplers of their own (serve): each copies the logits of its rows
    lanes: int = 1  # adapters that sample in turns (serve), each with rows, a KV cache and CUDA graphs of its own
    retrieves: bool = False  # documents are read, which happens when the KV cache may be nearly full
    off_policy: int = 0  # the most off-policy episodes that a round learns from
    scores: float = 0  # how often a round's episodes are read without gradients, such as by the reference policy
    adapters: int = 1  # number of adapters: the policy's, and the reference's if it has one of its own
    keeps_step: bool = False  # --kl-budget: host memory has copies of weights and moments from before the last updates
    critic: bool = False
    guided: bool = False  # episodes may have a teacher's distributions; these episodes have passes of their own
    teacher: TeacherWork | None = None
    judge: JudgeWork | None = None
    on_cuda: bool = False
    beside: Beside = LAPTOP  # what CUDA takes beside tensors
    # Only the predicted time depends on the fields below, see duration.py.
    dtype: str = "fp32"  # dtype of matrix products
    mean_tokens: float = 0  # the mean tokens of a row, or the maximum of an episode; 0: row_tokens
    writes: float = 0  # how many of these tokens are sampled or trained on; 0: all
    epochs: int = 1  # how often a round learns from each of its episodes
    # With --learn answer: the sampling of whole episodes. The last turns of some are then sampled several times.
    contexts: "Workload | None" = None
    demonstrated_contexts: bool = False  # --contexts: no episodes are sampled for them
    expanded: int = 0  # the most failed episodes of a round that are sampled again from a later step (--expand-limit)
    refills: int = 0  # the most refills of a round; their number is not known beforehand
    held_out: int = 0  # questions of a validation; 0: there is no validation
    validate_every: int = 1  # rounds from one validation to the next
    steps: int | None = None  # optimizer steps or rounds of the run; None: not known
    device: str | None = None  # the device, if it is in this machine: then its speeds are measured; None: it is not
    speeds: Speeds | None = None  # the speeds of the device, if they are known without measuring

    @property
    def pass_tokens(self) -> int:
        """The fewest tokens that the largest pass may have: those of a row, or in full fine-tuning of all `rows`."""
        return self.row_tokens * (self.rows if self.full_tuning else 1)

    @property
    def learned_rows(self) -> int:
        """The most rows that a round, or a step of SFT, learns from."""
        return (self.episodes + self.joining) or self.step_rows

    def lane_rows(self, rollout_batch_size: int) -> int:
        """Returns how many rows a lane has: its share of the episodes that are sampled at a time, but at least one."""
        return max(1, min(rollout_batch_size, self.episodes) // self.lanes)

    @property
    def joining(self) -> int:
        """The most episodes that a round learns from beside those sampled from the prompt on."""
        return self.off_policy + self.expanded
