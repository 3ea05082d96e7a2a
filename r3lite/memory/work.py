"""What a run computes, in the sizes that the planner and the prediction of time take."""

from dataclasses import dataclass

from r3lite.core.grant import Memory
from r3lite.devices.cards import Speeds
from r3lite.memory.cuda_parts import LAPTOP, Beside
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.nf4 import Packed


@dataclass(frozen=True)
class TeacherWork:
    """A second model that reads a round's episodes, without gradients, and is there for as long as that takes."""

    model: ModelConfig
    nf4: bool
    top: int  # tokens of a distribution that are kept
    adapters: int = 0
    lora_r: int = 8
    targets: tuple[str, ...] = ()
    packed: Packed | None = None


@dataclass(frozen=True)
class JudgeWork:
    """A second model that replies to what it is asked, and is there for as long as that takes."""

    model: ModelConfig
    vocabulary: int
    memory: Memory  # its figures are its own: `rollout_batch_size` requests are answered together
    row_tokens: int  # of a request and its reply at most
    packed: Packed | None = None


@dataclass(frozen=True)
class Workload:
    """The sizes of all that a run computes, whatever memory it is given."""

    model: ModelConfig
    vocabulary: int  # rows of the head that are used: ids of the tokenizer
    element: int  # bytes of a weight and of an activation: 2 or 4
    row_tokens: int  # of the longest row or episode
    packed: Packed | None = None  # the folder's weights, if it is in NF4 whatever --quantize says
    trains: bool = True
    full_tuning: bool = False  # all weights are trained, and there is no adapter
    lora_r: int = 8
    targets: tuple[str, ...] = ()
    rows: int = 1  # of one backward pass at most
    step_rows: int = 1  # of one optimizer step: from its second pass on, all gradients are there
    scored_rows: int = 1  # of one pass under the reference policy at most
    shared: int = 0  # tokens that all rows begin with, as far as is known: read once in a pass
    # Reinforcement learning and evaluation only.
    episodes: int = 0  # sampled in a round; 0: nothing is sampled
    reads: int = 0  # tokens given to a row at once at most: a prompt, or documents
    draft_tokens: int = 0  # of a row in one pass of decoding at most
    retrieves: bool = False  # documents are read when the cache is nearly full; a prompt, when it is empty
    off_policy: int = 0  # episodes of others that a round learns from at most
    scores: float = 0  # passes over a round's episodes without gradients, such as under the reference
    adapters: int = 1  # the policy's, and the reference's if it has one of its own
    keeps_step: bool = False  # host memory has a copy of weights and moments before the last update
    critic: bool = False
    guided: bool = False  # a teacher may speak of any of the episodes, which then go through the model apart
    teacher: TeacherWork | None = None  # loaded for each round
    judge: JudgeWork | None = None  # loaded whenever it is asked
    on_cuda: bool = False
    beside: Beside = LAPTOP  # tensors, on CUDA
    # What only the time depends on; see duration.py.
    dtype: str = "fp32"  # of products
    mean_tokens: float = 0  # of a row, or of an episode at most; 0: row_tokens
    writes: float = 0  # of these, sampled or trained on; 0: all
    epochs: int = 1  # passes over the episodes of a round
    contexts: "Workload | None" = None  # the whole episodes, some of whose last turns are sampled several times
    expanded: int = 0  # episodes of a round that get another end at most
    refills: int = 0  # that a round may take; their number is not known beforehand
    held_out: int = 0  # questions of a validation; 0: there is none
    validate_every: int = 1  # rounds
    steps: int | None = None  # optimizer steps or rounds of the run; None: not known
    device: str | None = None  # of this machine, whose speeds are measured; None: it is elsewhere
    speeds: Speeds | None = None  # of the device, if they are known without

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass at least: of a row, or in full fine-tuning of all rows of a step."""
        return self.row_tokens * (self.rows if self.full_tuning else 1)

    @property
    def learned_rows(self) -> int:
        """The most rows that a round, or a step of SFT, learns from."""
        return (self.episodes + self.joining) or self.step_rows

    @property
    def joining(self) -> int:
        """Episodes that a round learns from at most beside those that it samples from their prompts on."""
        return self.off_policy + self.expanded
