"""The settings of every command. The sections are in files by subject; all of them can be imported from here.

Bounds and traits stand at the setting (see core/config.py): whether a resumed run may change it, whether it
must be given. The classes below are the settings of the commands whose work is done in
other rooms; the other commands put their sections together in their own file. The docstring of each is its `--help`.
"""

import math

from r3lite.settings.commands import (  # isort: skip
    AskSettings, CardSettings, CheckFormatSettings, CollectSettings, DoctorSettings, EvaluateSettings, ExportSettings,
    PlanSettings, PrepareSettings, ProcedureFileSettings, QuickstartSettings, ReportSettings, RetrieveSettings,
    SftSettings, TeacherCacheSettings, TuningSettings,
)  # fmt: skip
from r3lite.settings.common import CommandConfig, Common
from r3lite.settings.data import DataSettings, NewQuestionSettings, QuestionSettings, SourceSettings, TrajectorySettings
from r3lite.settings.judge import JudgeSettings
from r3lite.settings.model import LoraSettings, MemorySettings, ModelSettings
from r3lite.settings.protocol import ProtocolSettings
from r3lite.settings.retrieval import DocumentSettings, IndexSettings, ProcedureSettings, RetrievalSettings
from r3lite.settings.rewards import RewardSettings
from r3lite.settings.rl import RLSettings
from r3lite.settings.rollout import LengthSettings, RemoteSettings, SamplingSettings, TruncationSettings
from r3lite.settings.serve import LimitSettings, ListenSettings, ModeSettings, ServerSettings
from r3lite.settings.training import GuardSettings, OptimizerSettings, Schedule, TrackSettings, ValidationSettings


class SamplingConfig(CommandConfig):
    """What the settings of all commands have in common that load a model and sample episodes, greedily by default."""

    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    truncation: TruncationSettings = TruncationSettings()


class SftConfig(CommandConfig):
    """Fine-tunes a model on trajectories that `collect` wrote: the step format, and quoting documents.

    --data also takes conversations (docs/conversations.md): messages, ShareGPT, Alpaca, prompt and completion, Glaive,
    R1. The loss is on what the assistant wrote.
    """

    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    data: TrajectorySettings = TrajectorySettings()
    mixture: SourceSettings = SourceSettings()
    protocol: ProtocolSettings = ProtocolSettings(worked_example=False)
    sft: SftSettings = SftSettings()
    schedule: Schedule = Schedule()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings = LoraSettings()
    tracking: TrackSettings = TrackSettings()

    @property
    def rows_per_step(self) -> int:
        return self.sft.batch_size * self.sft.gradient_accumulation

    def length(self, rows: int) -> tuple[int, int | None]:
        """Optimizer steps of the run, and the number of rows after which it ends (None: --max-steps decides)."""
        if self.schedule.max_steps is not None:
            return self.schedule.max_steps, None
        last = math.ceil(self.schedule.epochs * rows)
        return math.ceil(last / self.rows_per_step), last


class PpoConfig(CommandConfig):
    """Trains a LoRA adapter by reinforcement learning: the model answers questions step by step with a retriever
    and is rewarded for right answers, for finding the gold paragraphs and for well-formed steps.

    Start from an SFT adapter (--adapter): a small model that does not know the step format never gets a reward.
    """

    schedule: Schedule = Schedule(max_steps=200)
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    data: NewQuestionSettings = NewQuestionSettings()
    mixture: SourceSettings = SourceSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings()
    reward: RewardSettings = RewardSettings()
    judge: JudgeSettings = JudgeSettings()
    rl: RLSettings = RLSettings()
    remote: RemoteSettings = RemoteSettings()
    validation: ValidationSettings = ValidationSettings()
    guard: GuardSettings = GuardSettings()
    lora: LoraSettings = LoraSettings()
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5, min_learning_rate=1.0)
    tracking: TrackSettings = TrackSettings()

    @property
    def episodes_of_round(self) -> int:
        return self.rl.batch_size * self.rl.num_generations

    def rounds(self, questions: int | None) -> int | None:
        """Rounds of the run over this number of questions; None if it decides and is not known."""
        if self.schedule.max_steps or questions is None:
            return self.schedule.max_steps
        return math.ceil(self.schedule.epochs * questions / self.rl.batch_size)


class RolloutWorkerConfig(CommandConfig):
    """Samples episodes for `python -m r3lite.ppo --rollout-server http://HOST:8100`, which runs on another machine.

    Give it the model, format, lengths, temperature and retrieval of that run, by the same flags or the same --config;
    the adapter comes over HTTP. What the two must have in common and do not is refused by its name, as is an adapter of
    another base.
    """

    listen: ListenSettings = ListenSettings(port=8100)
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    data: DataSettings = DataSettings()
    mixture: SourceSettings = SourceSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    protocol: ProtocolSettings = ProtocolSettings(worked_example=False)
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings()


class CollectConfig(SamplingConfig):
    """Writes trajectories to fine-tune on, one JSON object a line: question, steps with documents, answer.

    --source gold needs questions with decompositions or supporting facts (MuSiQue, HotpotQA, 2WikiMultiHopQA) and no
    teacher. --source teacher samples them from --judge-model, of Gemini or with --judge openai of another server, whose
    key is read from the environment. --source self samples them from --model with --adapter, which needs no key.
    --teacher-logprobs writes what --model would have said along trajectories that are there already.
    """

    data: NewQuestionSettings = NewQuestionSettings()
    collect: CollectSettings = CollectSettings()
    judge: JudgeSettings = JudgeSettings()
    cache: TeacherCacheSettings = TeacherCacheSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=0.7)  # that of RFT (arXiv 2308.01825)


class EvaluateConfig(SamplingConfig):
    """Answers questions step by step with a retriever, greedily by default, and scores the answers.

    Writes scores.json (exact match, F1, format adherence, retrieval recall, combined score, mean searches and more,
    each with a 95 % bootstrap interval, also by number of hops and type of question) and predictions.jsonl (every
    answer with its steps, documents and scores) to --output. The search that a --baseline makes for the model counts as
    a well-formed step. --compare A B only compares two evaluations. docs/evaluation.md has the formulas.
    """

    evaluate: EvaluateSettings = EvaluateSettings()
    data: DataSettings = DataSettings()
    procedures: ProcedureSettings = ProcedureSettings()
    judge: JudgeSettings = JudgeSettings()


class AskConfig(SamplingConfig):
    """Asks a trained model: python -m r3lite.ask "Who directed ...?" --adapter runs/ppo --index my-index

    Shows its reasoning while it is sampled, the documents that each query brings, and the answer. Ctrl-C at the prompt
    ends; in the middle of an answer it stops that answer. Format, prompts, index and encoder are not taken from the
    adapter's run: pass the ones that it was trained with.
    """

    ask: AskSettings = AskSettings()
    procedures: ProcedureSettings = ProcedureSettings()


class ServeConfig(SamplingConfig):
    """Serves a web page and an HTTP API: python -m r3lite.serve --adapters sft=runs/sft,rl=runs/ppo --index my-index

    The page is at http://127.0.0.1:8000. POST /generate takes {"query": ..., "mode": chat, reasoning, search or auto};
    /v1/chat/completions is OpenAI's. Format, prompts, index and encoder are not taken from the adapters' runs: pass
    those that they were trained with. Ctrl-C or SIGTERM ends, after the answers under way.
    """

    server: ServerSettings = ServerSettings()
    modes: ModeSettings = ModeSettings()
    limits: LimitSettings = LimitSettings()
    procedures: ProcedureSettings = ProcedureSettings()


class TunePromptConfig(SamplingConfig):
    """Improves a prompt: has a critic say what in it makes the model fail, and write better ones, round after round.

    The critic is named by --judge (gemini, openai or local) and limited by --judge-max-calls and --judge-max-cost. Each
    prompt is scored on --eval-data. Writes best_prompt.txt, history.json (every prompt, the critique that it was made
    of, its score with an interval, and what each round gained) and candidates/ (each prompt as a file, with its
    predictions) to --output. The same command again goes on where a run was stopped. docs/tune_prompt.md has more.
    """

    tuning: TuningSettings = TuningSettings()
    judge: JudgeSettings = JudgeSettings()
    data: QuestionSettings = QuestionSettings()


class QuickstartConfig(CommandConfig):
    """Teaches the tiny shipped model to answer multi-hop questions about an invented world.

    Runs collect -> index -> SFT -> RL on two CPU cores, evaluates after each stage on questions about entities that
    training never saw, and prints a table. No download, no key. An algorithm with a teacher has one trained first.
    """

    common: Common = Common(preset="tiny")
    quickstart: QuickstartSettings = QuickstartSettings()


# Of the commands that answer questions.
AnsweringConfig = AskConfig | EvaluateConfig | ServeConfig
