"""Settings of reinforcement learning, and those that each algorithm's paper has."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from r3lite.core.config import Basic, Bounds, Count, Fraction, InputPath, NonNegative, Positive, Section, Whole
from r3lite.core.needs import Needs, NeedsOthers
from r3lite.settings.common import rounded_up
from r3lite.settings.conditions import has_documents
from r3lite.settings.data import DATA_FILE
from r3lite.settings.model import ADAPTER


def is_folder(path: str) -> str:
    """Returns what an error says behind the name of a folder; "" for a file."""
    return " is a folder" if Path(path).is_dir() else ""


DEMONSTRATIONS = InputPath(remedy="Pass files that `python -m r3lite.collect` has written.", fault=is_folder)
Top = Annotated[int, Bounds(low=1, high=1024)]
# The keys of rl.algorithms.ALGORITHMS; a test checks that they are the same.
Algorithm = Literal[
    "ppo", "grpo", "dr-grpo", "dapo", "gspo", "rloo", "reinforce++", "reinforce++-baseline", "luffy", "exgrpo",
    "hybrid", "dgpo", "dpo", "verifree",
]  # fmt: skip

# The settings that --algorithm implies. The algorithms that are not listed use the defaults of RLSettings.
PAPERS = {
    "dr-grpo": {"kl_beta": 0.0},
    "dapo": {
        "clip_high": 0.28, "kl_beta": 0.0, "refill_limit": 3, "overlong_filter": "on", "overlong_penalty": 1.0,
    },
    "reinforce++-baseline": {"kl_estimator": "k2"},
    "dgpo": {"kl_beta": 0.0},
    "dpo": {"kl_beta": 0.1, "mini_batch_size": 4096},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "kl_beta": 0.0, "old_logprobs": "trainer"},
    "luffy": {"kl_beta": 0.05},
    "exgrpo": {"kl_beta": 0.05},
    "hybrid": {"kl_beta": 0.05},
    "verifree": {"kl_beta": 0.0, "learn": "answer"},
}  # fmt: skip


# The settings of rewards that --learn answer does not use. These rewards are equal for all last turns that follow
# the same turns, or teach something else than reading the documents.
UNPAID_FOR_ANSWERS = (
    "outcome_f1", "outcome_judge", "process_recall", "process_judge", "format_reward", "least_searches", "search_bonus",
    "idle_query_penalty", "rewards",
)  # fmt: skip
EXACT_MATCH_ALONE = {"outcome_em": 1.0, "outcome_f1": 0.0, "process_recall": 0.0, "format_reward": 0.0}
# verifree implies --learn answer, and so what this implies.
IMPLIED_BY_ALGORITHM = PAPERS | {"verifree": PAPERS["verifree"] | EXACT_MATCH_ALONE}


class RLSettings(Section):
    """Reinforcement learning."""

    implied: ClassVar = {"algorithm": IMPLIED_BY_ALGORITHM, "learn": {"answer": EXACT_MATCH_ALONE}}
    needs: ClassVar = (
        NeedsOthers("expand_limit", "a --format that searches and a --retriever other than none", has_documents),
        Needs("kl_estimator kl_target", "--kl-beta above 0", lambda s: s.kl_beta),
        Needs("overlong_cache", "--overlong-penalty", lambda s: s.overlong_penalty),
        Needs("contexts", "--learn answer", lambda s: s.learn == "answer"),
        Needs("teacher_adapter teacher_quantize", "--teacher", lambda s: s.teacher),
        Needs("teacher_top", "--teacher, or --teacher-logprobs in collect", lambda s: s.teacher),
    )

    algorithm: Basic[Algorithm] = "ppo"
    """how the policy learns. ppo: critic and GAE (arXiv 1707.06347); grpo: group-normalized rewards (2402.03300);
    dr-grpo: without grpo's biases (2503.20783); dapo: higher upper clip, groups with equal rewards replaced
    (2503.14476); gspo: one ratio per episode (2507.18071); rloo: mean of the other episodes as baseline (2402.14740);
    reinforce++: advantages whitened over the round (2501.03262); reinforce++-baseline: after subtracting the group
    mean; luffy: a teacher's traces join the groups (2504.14945); exgrpo: earlier successes join the groups
    (2510.02245); hybrid: luffy and exgrpo; dgpo: grpo for successful episodes, a teacher's distributions for failed
    ones (2508.20324); dpo: pairs of better and worse episodes (2305.18290); verifree: last turns, rewarded by the
    probability of the right answer (2505.21493). Each sets its paper's defaults, which flags override; see
    docs/algorithms.md"""
    learn: Literal["episode", "answer"] = "episode"
    """episode: all turns of whole episodes; answer: only the last turn of episodes that retrieved every gold paragraph.
    Each round takes --batch-size such episodes, samples their last turn --num-generations times, and rewards exact
    match alone (algorithms that compare the episodes of a question)"""
    contexts: Annotated[tuple[str, ...] | None, DEMONSTRATIONS] = None
    """comma-separated files of demonstrations of the questions, as `collect` writes them. With --learn answer, their
    last turns are sampled anew, in place of those of sampled episodes; questions without a demonstration are left out
    """
    batch_size: Basic[Annotated[int, Bounds(low=1, high=4096)]] = 8
    """questions per round"""
    num_generations: Basic[Annotated[int, Bounds(low=1, high=1024)]] = 8
    """episodes sampled per question"""
    kl_beta: Basic[NonNegative] = 0.001
    """weight of the KL divergence. It is measured from the reference adapter. With dpo it is the beta of the loss"""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """KL estimator, with d = log pi - log reference; k1: d; k2: d^2 / 2; k3: exp(-d) + d - 1; default: k1 if the KL is
    subtracted from the reward (ppo, rloo, reinforce++), k3 if it is added to the loss (the others; dpo has neither)"""
    kl_target: Positive | None = None
    """target KL divergence, in nats per token; --kl-beta is adapted each round to reach it (arXiv 1909.08593)"""
    kl_budget: Positive | None = None
    """KL divergence from the reference adapter that the run may reach by its end, in nats per token, such as 0.001: the
    policy's learning rate is scaled each round to get there, and an update that goes much too far is taken back"""
    update_epochs: Annotated[int, Bounds(low=1, high=100)] = 1
    """passes over the episodes of a round"""
    mini_batch_size: Count = 16
    """maximum episodes per optimizer step; a round is split into steps of about equal size"""
    micro_batch_size: Count | None = None
    """maximum episodes per forward and backward pass; default: as many as fit in --micro-batch-tokens"""
    clip_low: NonNegative = 0.2
    """the probability ratio is clipped below at 1 - this"""
    clip_high: NonNegative = 0.2
    """the probability ratio is clipped above at 1 + this"""
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    """old log-probabilities in the ratio; sampler: those recorded during sampling; trainer: recomputed with the same
    weights, which takes one more pass over the episodes of a round"""
    importance_cap: Positive | None = None
    """multiply each token's policy loss by pi(trainer) / pi(sampler), capped at this (truncated importance sampling);
    needs --old-logprobs trainer"""
    expand_limit: Whole = 0
    """maximum failed episodes per round that are sampled again, in the same group, after the last step that found a new
    gold paragraph (arXiv 2601.21699); 0: off (algorithms that compare the episodes of a question)"""
    refill_limit: Whole = 0
    """how many times per round to replace groups whose answers are all rewarded alike by groups of other questions; 0:
    keep them (grpo, dr-grpo, dapo, gspo, rloo, reinforce++-baseline, dpo)"""
    overlong_filter: Literal["off", "on"] = "off"
    """on: episodes that were cut off have no loss (dapo)"""
    overlong_penalty: NonNegative = 0.0
    """maximum penalty for a long episode, subtracted from its reward (dapo)"""
    overlong_cache: Annotated[float, Bounds(above=0, high=1)] = 0.2
    """the penalty rises over this last share of the tokens that an episode may sample (dapo)"""
    length_constant: Count | None = None
    """divisor of the summed token losses of an episode; default: the most tokens it may sample (dr-grpo, verifree)"""
    traces: Annotated[str | None, DATA_FILE] = None
    """a teacher's traces: a file of trajectories, or of rows with question, reasoning and answer (luffy, hybrid)"""
    trace_share: Fraction = 0.5
    """maximum share of the questions of a round that get a trace, rounded up (luffy, hybrid)"""
    trace_min_outcome: Fraction = 0.5
    """leave out traces whose answer reward is below this share of the maximum (luffy, hybrid)"""
    replay_size: Count = 10_000
    """maximum episodes kept for replay; the oldest are dropped first (exgrpo, hybrid)"""
    replay_share: Fraction = 0.3
    """share of a round's questions, rounded up, repeated with an earlier success in the group (exgrpo, hybrid)"""
    replay_min_outcome: Fraction = 0.6
    """an episode is a success if its answer reward is at least this share of the maximum (exgrpo, hybrid)"""
    replay_start: Fraction = 0.1
    """start to replay after the first round with this share of successes (exgrpo, hybrid)"""
    shaping_gamma: Positive = 0.1
    """policy shaping of off-policy tokens: their ratio r becomes r / (r + this) (luffy, exgrpo, hybrid)"""
    value_clip: NonNegative | None = 0.2
    """clip values to this distance from the old ones; none: do not clip (ppo)"""
    value_coefficient: NonNegative = 0.1
    """weight of the value loss (ppo)"""
    value_learning_rate: Positive = 1e-3
    """learning rate of the value head (ppo)"""
    negative_advantage_scale: NonNegative = 1.0
    """factor for negative advantages; below 1, small models train more stably"""
    gamma: Fraction = 1.0
    """discount (ppo, reinforce++)"""
    gae_lambda: Fraction = 0.95
    """lambda of generalized advantage estimation (arXiv 1506.02438) (ppo)"""
    entropy_coefficient: NonNegative = 0.0
    """weight of an entropy bonus"""
    likelihood_weight: NonNegative = 0.2
    """weight of the mean negative log-likelihood of the better episodes' tokens (dpo)"""
    failed_below: NonNegative | None = None
    """an episode has failed if its outcome reward is below this; default: if its answer is wrong, as the judge says or,
    without a judge, by exact match (dgpo)"""
    teacher: str | None = None
    """teacher for failed episodes: folder, hub id or tiny, with the policy's tokenizer; loaded after each round's
    sampling and unloaded before the update (dgpo)"""
    teacher_adapter: Annotated[str | None, ADAPTER] = None
    """LoRA adapter of --teacher: a run folder or its adapter/ (dgpo)"""
    teacher_quantize: Literal["nf4", "none"] = "nf4"
    """quantization of --teacher (dgpo)"""
    teacher_logprobs: Annotated[
        str | None, InputPath("folder", "Pass a folder written by collect --teacher-logprobs.")
    ] = None
    """instead of --teacher, a folder written by `collect --teacher-logprobs`: a failed episode is replaced by that
    trajectory of the same question, trained towards the teacher's distributions (dgpo)"""
    teacher_top: Top = 32
    """number of most likely tokens used from each of --teacher's distributions; the rest count as one (dgpo)"""
    teacher_weight: Positive = 1.0
    """weight of the KL divergence from the teacher (dgpo)"""

    @property
    def has_reference(self) -> bool:
        """Tells whether the episodes of a round are compared with the reference adapter."""
        return self.kl_beta > 0 or self.kl_budget is not None

    def question_count(self, share: float) -> int:
        """Returns a share of a round's questions as a number of questions, rounded up."""
        return rounded_up(share * self.batch_size)
