"""Every setting of every command, by section. Each command puts together the sections it needs.

The two that train do so here, because the planner takes the same flags as they do.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from r3lite.config import Bounds, Count, Fraction, NonNegative, Positive, Section, Whole

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Common(Section):
    """General."""

    preset: str = "laptop-4gb"
    """name of a shipped set of defaults"""
    config: str | None = None
    """TOML file of settings, such as the config.toml of an earlier run"""
    output: str | None = None
    """folder or file to write; by default runs/<command>-<time>"""
    seed: Annotated[int, Bounds(low=0, high=2**63 - 1)] = 0
    """seed of every random stream"""
    dry_run: bool = False
    """print the resolved settings and exit"""


@dataclass(frozen=True)
class Schedule(Section):
    """Length of the run, checkpoints and resuming."""

    max_steps: Count | None = None
    """optimizer steps (SFT) or rollout-and-update rounds (RL); the learning-rate schedule spans them"""
    epochs: Positive = 1.0
    """passes over the data, where --max-steps is not given; unsets the max_steps of default, preset or file"""
    save_every: Whole = 50
    """steps between checkpoints; 0: only at the end"""
    keep_checkpoints: Count = 2
    """newest checkpoints kept"""
    stop_after: Count | None = None
    """leave cleanly after this many steps of this process, with the schedule unchanged"""
    resume: str | None = None
    """auto: newest sound checkpoint in --output, or a fresh start; or the folder of a run or a checkpoint"""


@dataclass(frozen=True)
class ModelSettings(Section):
    """Model."""

    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """folder, hub id, or tiny (the shipped checkpoint)"""
    adapter: str | None = None
    """LoRA adapter to start from: a run folder or its adapter/"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """precision of the frozen base and of autocast; auto: bf16 where the device has it, else fp16 (on a CPU fp32)"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda where there is one, else mps, else cpu"""


@dataclass(frozen=True)
class MemorySettings(Section):
    """Memory. What is not given is chosen so that the run fits, the fastest way first."""

    vram_budget: str | None = None
    """most memory, such as 4GiB or 1300MiB; by default 4GiB, or what is free on the device, less a margin"""
    quantize: Literal["auto", "none", "nf4"] = "auto"
    """4-bit base (QLoRA, arXiv 2305.14314); auto: only where the run does not fit without"""
    nf4_cache: str | None = "~/.cache/r3lite"
    """folder that keeps NF4 weights for the next start; none: they are quantized at each"""
    recompute_layers: Whole | None = None
    """layers whose activations are computed again in the backward pass: less memory, a third more time for all"""
    micro_batch_tokens: Count | None = None
    """most tokens of one pass; a longer row goes alone"""
    loss_chunk: Count | None = None
    """rows of logits that exist at a time"""
    mlp_tile: Count | None = None
    """tokens for which the inside of an MLP exists at a time, where it is not kept"""
    offload: Literal["auto", "on", "off"] = "auto"
    """keep layer inputs in the host's memory until the backward pass needs them (CUDA)"""


@dataclass(frozen=True)
class LoraSettings(Section):
    """LoRA adapter (arXiv 2106.09685)."""

    lora_r: Count = 8
    """rank"""
    lora_alpha: Positive = 16.0
    """scale; the adapter is multiplied by alpha / r"""
    lora_dropout: Fraction = 0.0
    """dropout before the adapter, in SFT; RL has none: what is trained must be what was sampled from"""
    lora_targets: tuple[Projection, ...] = get_args(Projection)
    """projections that get an adapter"""
    rslora: bool = False
    """scale by alpha / sqrt(r) instead (arXiv 2312.03732)"""


@dataclass(frozen=True)
class OptimizerSettings(Section):
    """Optimizer."""

    learning_rate: Positive = 2e-4
    """peak learning rate of AdamW on the adapter"""
    min_learning_rate: Fraction = 0.1
    """end of the cosine, as a fraction of the peak; 1: constant after the warm-up"""
    warmup: Fraction = 0.03
    """fraction of the steps in which the rate rises linearly"""
    weight_decay: NonNegative = 0.0
    """decoupled weight decay"""
    max_grad_norm: Positive = 1.0
    """gradients are clipped to this norm"""


@dataclass(frozen=True)
class DataSettings(Section):
    """Data."""

    data: str | None = None
    """trajectory file, question file of any supported format, or a hub string name,subset,split"""
    limit: Count | None = None
    """only the first N questions or rows"""
    skip_bad_rows: bool = False
    """count malformed rows and go on, instead of stopping at the first"""


@dataclass(frozen=True)
class CollectSettings(Section):
    """Collecting."""

    source: Literal["gold", "teacher"] = "gold"
    """gold: from the data set's decompositions or supporting facts; teacher: sampled from --judge-model, wrong or
    malformed ones rejected, going on where an earlier run into the same --output left off"""
    max_hops: Count = 5
    """most queries of a trajectory; questions with more gold hops are left out, a teacher must answer then"""
    hurried_share: Fraction = 0.0
    """share of gold trajectories that answer one hop too early, as a hasty teacher's would: for experiments"""
    attempts: Count = 4
    """tries of the teacher at a question: the first at temperature 0, the others at 0.9"""
    min_f1: Fraction = 0.8
    """a teacher's answer is right when it is an exact match or has this F1"""


@dataclass(frozen=True)
class RetrievalSettings(Section):
    """Retrieval."""

    retriever: Literal["semantic", "golden", "none"] = "semantic"
    """semantic: nearest passages by embedding; golden: the question's own gold paragraphs; none"""
    corpus: str | None = None
    """passages (id, title, text) as JSONL, indexed on the fly; by default the paragraphs that come with --data"""
    index: str | None = None
    """index folder built by `python -m r3lite.index`"""
    encoder: str = "intfloat/e5-base-v2"
    """BERT encoder: folder or hub id; or hashing (TF-IDF on hashed words, no download)"""
    encoder_style: Literal["auto", "e5", "plain"] = "auto"
    """e5: query/passage prefixes; plain: none; auto: e5 where the encoder's name says so"""
    top_k: Count = 5
    """passages per query"""


@dataclass(frozen=True)
class IndexSettings(Section):
    """Index."""

    corpus: str | None = None
    """passages (id, title, text) as JSONL"""
    encoder: str = "intfloat/e5-base-v2"
    """BERT encoder: folder or hub id; or hashing (TF-IDF on hashed words, no download)"""
    encoder_style: Literal["auto", "e5", "plain"] = "auto"
    """e5: query/passage prefixes; plain: none; auto: e5 where the encoder's name says so"""
    batch_size: Count = 64
    """passages encoded together"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where passages are encoded; auto: cuda where there is one, else mps, else cpu"""
    skip_bad_rows: bool = False
    """count malformed passages and go on, instead of stopping at the first"""


@dataclass(frozen=True)
class ProtocolSettings(Section):
    """Step format and prompts."""

    format: Literal["r3"] = "r3"
    """r3: numbered steps of analysis and query or answer (arXiv 2505.23794)"""
    init_prompt: str | None = None
    """file that opens an episode, with {question} [prompts/init_prompt.txt as shipped]"""
    step_prompt: str | None = None
    """file that gives the documents of a query, with {documents} [prompts/step_prompt.txt as shipped]"""
    system_prompt: str | None = None
    """system message; default: the one of the model's chat markup"""


@dataclass(frozen=True)
class LengthSettings(Section):
    """Limits of an episode."""

    max_hops: Count = 5
    """most retrievals in an episode; then an answer is forced"""
    max_new_tokens: Count = 256
    """most tokens of one turn of the model"""
    max_length: Count = 4096
    """most tokens of a whole episode"""
    max_document_tokens: Count = 160
    """most tokens of one document; longer ones are cut"""


@dataclass(frozen=True)
class SamplingSettings(Section):
    """Sampling."""

    temperature: NonNegative = 1.0
    """of the softmax; 0: greedy (not in RL)"""
    rollout_batch_size: Count | None = None
    """episodes decoded together; by default as many as the memory budget allows"""


@dataclass(frozen=True)
class TruncationSettings(Section):
    """Truncated sampling."""

    top_k_sampling: Whole = 0
    """sample from the k likeliest tokens only; 0: all"""
    top_p: Annotated[float, Bounds(above=0, high=1)] = 1.0
    """sample from the smallest set of tokens with this probability"""


@dataclass(frozen=True)
class RewardSettings(Section):
    """Rewards."""

    outcome_em: NonNegative = 1.0
    """paid at the end for an exact match"""
    outcome_f1: NonNegative = 0.0
    """paid at the end per unit of F1"""
    outcome_judge: NonNegative = 0.0
    """paid at the end when the judge calls the answer right"""
    process_recall: NonNegative = 0.3
    """paid at each query per share of the gold paragraphs found for the first time"""
    process_judge: NonNegative = 0.0
    """paid at each query per unit of the judge's relevance and coherence"""
    format_reward: NonNegative = 0.1
    """paid for well-formed steps: this times their share of the episode's steps"""
    gamma_correct: float = 0.6
    """process rewards of a trajectory with a right answer are multiplied by 1 + this (R3-RAG)"""
    gamma_incorrect: float = -0.2
    """the same for a wrong answer"""
    gamma_fail: float = -0.1
    """the same for an episode without an answer"""


@dataclass(frozen=True)
class JudgeSettings(Section):
    """Judge."""

    judge: Literal["none", "gemini"] = "none"
    """who judges answers and steps; the key is read from GOOGLE_API_KEY or GEMINI_API_KEY"""
    judge_model: str = "gemini-2.5-flash"
    """name of the judging model"""
    judge_base_url: str | None = None
    """address of a compatible server"""
    judge_rpm: Count = 60
    """most requests a minute"""
    judge_concurrency: Count = 4
    """most requests under way at once"""
    judge_timeout: Positive = 60.0
    """seconds before a request counts as failed"""
    judge_retries: Whole = 4
    """tries after the first, with backoff"""
    judge_thinking: bool = False
    """let the model think first; thinking can eat the output limit and cut the reply"""
    judge_max_calls: Count | None = None
    """most requests, tries that failed included, from one start of the run to its end"""
    judge_max_cost: Positive | None = None
    """most US dollars in the same time, by --judge-input-price and --judge-output-price"""
    judge_input_price: NonNegative = 0.30
    """US dollars per million input tokens"""
    judge_output_price: NonNegative = 2.50
    """US dollars per million output tokens"""
    judge_cache: str | None = None
    """folder of cached replies; default: judge-cache in the output folder, and for collect <output>.cache"""


@dataclass(frozen=True)
class SftSettings(Section):
    """Supervised fine-tuning."""

    batch_size: Count = 2
    """most rows of one backward pass, laid end to end"""
    gradient_accumulation: Count = 8
    """rows of one optimizer step, in units of --batch-size"""
    max_length: Count = 2048
    """most tokens of a row; longer ones get shorter documents, or are left out where that is not enough"""
    max_document_tokens: Count = 160
    """most tokens of one document; longer ones are cut"""
    validation_fraction: Fraction = 0.05
    """share of the questions held out for the validation loss"""
    validation_rows: Whole = 64
    """most rows held out; 0: none"""
    validate_every: Count = 50
    """steps between validation losses; there is one at the end, too"""


@dataclass(frozen=True)
class EvaluateSettings(Section):
    """Evaluation."""

    baseline: Literal["none", "no-retrieval", "single-retrieval"] = "none"
    """no-retrieval: the answer is forced at once; single-retrieval: after one retrieval with the question as query;
    none: the model decides"""


@dataclass(frozen=True)
class RLSettings(Section):
    """Reinforcement learning."""

    algorithm: Literal["ppo", "grpo"] = "ppo"
    """ppo: critic and GAE (arXiv 1707.06347); grpo: group-normalized rewards (arXiv 2402.03300)"""
    batch_size: Count = 8
    """questions of one round"""
    num_generations: Count = 8
    """episodes sampled per question"""
    kl_beta: NonNegative = 0.001
    """weight of the KL divergence from the reference adapter"""
    update_epochs: Count = 1
    """passes over the episodes of a round"""
    mini_batch_size: Count = 16
    """episodes of one optimizer step"""
    micro_batch_size: Count | None = None
    """most episodes of one pass; by default as many as --micro-batch-tokens holds"""
    clip_low: NonNegative = 0.2
    """the probability ratio is clipped below at 1 - this"""
    clip_high: NonNegative = 0.2
    """and above at 1 + this"""
    value_clip: NonNegative = 0.2
    """values move at most this far from the old ones without being clipped (ppo)"""
    value_coefficient: NonNegative = 0.1
    """weight of the value loss (ppo)"""
    value_learning_rate: Positive = 1e-3
    """learning rate of the value head (ppo)"""
    negative_advantage_scale: NonNegative = 1.0
    """negative advantages are multiplied by this; below 1 a small model drifts less into noise"""
    gamma: Fraction = 1.0
    """discount (ppo)"""
    gae_lambda: Fraction = 0.95
    """lambda of generalized advantage estimation (arXiv 1506.02438) (ppo)"""
    entropy_coefficient: NonNegative = 0.0
    """weight of an entropy bonus"""


@dataclass(frozen=True)
class PlanSettings(Section):
    """Plan."""

    algorithm: Literal["sft", "ppo", "grpo"] = "sft"
    """the run that is planned: sft takes the flags of sft, ppo and grpo those of ppo"""


@dataclass(frozen=True)
class QuickstartSettings(Section):
    """Quickstart."""

    algorithm: Literal["ppo", "grpo"] = "ppo"
    """reinforcement-learning algorithm of the second training stage"""
    quick: bool = False
    """a few steps and questions only: shows that everything runs, teaches next to nothing"""


@dataclass(frozen=True)
class SftConfig:
    """Teaches a model the step format, and to copy what it reads, from trajectories that `collect` wrote.

    --data also takes conversations ({"messages": [{"role", "content"}, ...]}). Loss falls on what the assistant wrote.
    """

    common: Common = Common()
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    data: DataSettings = DataSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    sft: SftSettings = SftSettings()
    schedule: Schedule = Schedule()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings = LoraSettings()


@dataclass(frozen=True)
class PpoConfig:
    """Trains a LoRA adapter by reinforcement learning: the model answers questions step by step with a retriever
    and is paid for right answers, for finding the gold paragraphs and for well-formed steps.

    Start from an SFT adapter (--adapter): a small model that does not know the step format is never paid.
    """

    common: Common = Common()
    schedule: Schedule = Schedule(max_steps=200)
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    data: DataSettings = DataSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings()
    reward: RewardSettings = RewardSettings()
    judge: JudgeSettings = JudgeSettings()
    rl: RLSettings = RLSettings()
    lora: LoraSettings = LoraSettings()
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5, min_learning_rate=1.0)
