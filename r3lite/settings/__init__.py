"""The settings of every command. The sections are in files by subject; all of them can be imported from here.

Bounds and traits are in a setting's annotation (see core/config.py). They say, for example, whether a resumed run may
change the setting, and whether it must be given. Each class below has the settings of a command whose work is done in
other folders, and its docstring is the command's `--help`. The settings of the other commands are in the commands' own
files.
"""

import math
from typing import ClassVar

from r3lite.core.needs import NeedsOthers, names_of
from r3lite.settings.commands import (
    AnswerSettings,
    AskSettings,
    CardSettings,
    CheckFormatSettings,
    CollectSettings,
    DoctorSettings,
    EvaluateSettings,
    ExportSettings,
    PlanSettings,
    PrepareSettings,
    ProcedureFileSettings,
    QuickstartSettings,
    ReportSettings,
    RetrieveSettings,
    SftSettings,
    TeacherCacheSettings,
    TuningSettings,
)
from r3lite.settings.common import CommandConfig, Common, rounded_up
from r3lite.settings.conditions import loads_model
from r3lite.settings.data import (
    CollectDataSettings,
    DataSettings,
    NewQuestionSettings,
    OptionalRlQuestionSettings,
    QuestionSettings,
    RlQuestionSettings,
    SourceSettings,
    TrajectorySettings,
)
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
    """Holds the settings of all commands that load a model and sample episodes, by default greedily."""

    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    lengths: LengthSettings = LengthSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    truncation: TruncationSettings = TruncationSettings()


class SftConfig(CommandConfig):
    """Fine-tunes a model on trajectories written by `collect`, to teach it the step format.

    --data can also be conversations (docs/conversations.md): messages, ShareGPT, Alpaca, prompt and completion, Glaive,
    R1. Only the assistant's tokens are trained on.
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

    def steps_and_row_limit(self, rows: int) -> tuple[int, int | None]:
        """Returns the optimizer steps of the run, and the number of rows after which it ends; `rows` are its data.

        The number of rows after which it ends is None if --max-steps decides the end.
        """
        if self.schedule.max_steps is not None:
            return self.schedule.max_steps, None
        total_rows = rounded_up(self.schedule.epochs * rows)
        return math.ceil(total_rows / self.rows_per_step), total_rows

    def steps(self, rows: int | None) -> int | None:
        """Returns the optimizer steps of the run; None if --max-steps is not set and the number of rows is unknown."""
        if rows is None:
            return self.schedule.max_steps
        steps, _ = self.steps_and_row_limit(rows)
        return steps


class PpoConfig(CommandConfig):
    """Trains a LoRA adapter by reinforcement learning: the model answers questions step by step with a retriever, and
    is rewarded for correct answers, retrieved gold paragraphs and well-formed steps.

    Start from an SFT adapter (--adapter): a small model that does not know the step format gets no reward.
    """

    schedule: Schedule = Schedule(max_steps=200)
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    data: RlQuestionSettings = RlQuestionSettings()
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
        """Returns the rounds of the run; None if --max-steps is not set and the number of questions is unknown."""
        if self.schedule.max_steps or questions is None:
            return self.schedule.max_steps
        return rounded_up(self.schedule.epochs * questions / self.rl.batch_size)


class RolloutWorkerConfig(CommandConfig):
    """Samples episodes for `python -m r3lite.ppo --rollout-server http://HOST:8100`, which runs on another machine.

    Pass the model, format, lengths, temperature and retrieval settings of that run, by flags or with the same --config;
    the run sends the adapter over HTTP and stops with an error if a setting differs.
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
    """Writes trajectories for SFT, one JSON object per line: question, steps with documents, answer.

    --source gold makes them from questions with decompositions or supporting facts (MuSiQue, HotpotQA,
    2WikiMultiHopQA), without a model. --source documents makes the questions, too, from an index or a corpus. --source
    teacher samples them from --judge-model, of Gemini or, with --judge openai, of another server; the API key is read
    from the environment. --source self samples them from --model with --adapter. --baseline rag instead writes
    conversations that teach plain RAG; --teacher-logprobs the token distributions of --model for existing trajectories.
    """

    needs: ClassVar = (
        NeedsOthers(
            names_of(RetrievalSettings) + " max_hops exclude",
            "a run without --teacher-logprobs",
            lambda s: not s.teacher_logprobs,
        ),
        # --model, --dtype and --device are left out: they may be set for all commands alike.
        NeedsOthers(
            names_of(
                ModelSettings,
                MemorySettings,
                SamplingSettings,
                TruncationSettings,
                but="model dtype device thinking",
            )
            + " end_at_idle_query",
            "--source self or --teacher-logprobs",
            loads_model,
        ),
        # --baseline uses these without sampling: it cuts documents with the model's tokenizer, as episodes do.
        NeedsOthers(
            "thinking max_new_tokens max_length",
            "--source self, --teacher-logprobs or --baseline",
            lambda s: loads_model(s) or s.baseline != "none",
        ),
        NeedsOthers("judge", "--source teacher", lambda s: s.source == "teacher"),
    )

    data: CollectDataSettings = CollectDataSettings()
    collect: CollectSettings = CollectSettings()
    judge: JudgeSettings = JudgeSettings()
    cache: TeacherCacheSettings = TeacherCacheSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=0.7)  # that of RFT (arXiv 2308.01825)


class EvaluateConfig(SamplingConfig):
    """Answers questions step by step with a retriever, greedily by default, and scores the answers.

    Writes to --output: scores.json (exact match, F1, format adherence, retrieval recall, combined score, mean searches
    and more, each with a 95 % bootstrap interval, also by number of hops and type of question) and predictions.jsonl
    (every answer with its steps, documents and scores). --compare A B compares two evaluations instead. See
    docs/evaluation.md for the formulas.
    """

    needs: ClassVar = (
        NeedsOthers(
            names_of(
                DataSettings,
                RetrievalSettings,
                ProcedureSettings,
                ProtocolSettings,
                ModelSettings,
                MemorySettings,
                LengthSettings,
                SamplingSettings,
                TruncationSettings,
                JudgeSettings,
                but="model dtype device",
            )
            + " baseline bert_score",
            "a run without --compare",
            lambda s: not s.compare,
        ),
    )

    evaluate: EvaluateSettings = EvaluateSettings()
    data: DataSettings = DataSettings()
    procedures: ProcedureSettings = ProcedureSettings()
    judge: JudgeSettings = JudgeSettings()


class AskConfig(SamplingConfig):
    """Asks a trained model: python -m r3lite.ask "Who directed ...?" --adapter runs/ppo --index my-index

    Prints the reasoning as it is sampled, the documents found by each query, and the answer. Without --adapter the
    model answers by plain RAG (--steps). Ctrl-C stops an answer; at the prompt it exits. Model, format and prompts are
    those of the adapter's run, the encoder is the index's.
    """

    needs: ClassVar = (
        NeedsOthers("rollout_batch_size", "a command that samples several episodes at a time", lambda s: False),
    )

    ask: AskSettings = AskSettings()
    answers: AnswerSettings = AnswerSettings()
    procedures: ProcedureSettings = ProcedureSettings()


class ServeConfig(SamplingConfig):
    """Serves a web page and an HTTP API: python -m r3lite.serve --adapters sft=runs/sft,rl=runs/ppo --index my-index

    The page is at http://127.0.0.1:8000. POST /generate takes {"query": ..., "mode": chat, reasoning, search or auto};
    /v1/chat/completions is compatible with OpenAI's. Model, format and prompts are those of the adapters'
    runs, the encoder is the index's. Ctrl-C or SIGTERM stops the server after the running answers.
    """

    server: ServerSettings = ServerSettings()
    modes: ModeSettings = ModeSettings()
    answers: AnswerSettings = AnswerSettings()
    limits: LimitSettings = LimitSettings()
    procedures: ProcedureSettings = ProcedureSettings()


class TunePromptConfig(SamplingConfig):
    """Improves a prompt over several rounds: a critic model explains failed episodes and rewrites the prompt.

    Choose the critic with --judge (gemini, openai or local) and limit it with --judge-max-calls and --judge-max-cost.
    Failures are sampled on --data, and each prompt is scored on --eval-data. Writes to --output: best_prompt.txt,
    history.json (every prompt with its critique and its score with an interval, and the gain of each round) and
    candidates/ (each prompt as a file, with its predictions). The same command continues an interrupted run. See
    docs/tune_prompt.md.
    """

    tuning: TuningSettings = TuningSettings()
    judge: JudgeSettings = JudgeSettings()
    data: QuestionSettings = QuestionSettings()


class QuickstartConfig(CommandConfig):
    """Teaches a tiny model, which comes with r3lite, to answer multi-hop questions about an invented world.

    Runs collect, index, SFT and RL on two CPU cores, evaluates each stage on questions about entities that are not in
    the training data, and prints a table. Needs no download and no API key. If --algorithm needs a teacher, it is
    trained first.
    """

    common: Common = Common(preset="tiny")
    quickstart: QuickstartSettings = QuickstartSettings()


# The settings of the commands that answer questions.
AnsweringConfig = AskConfig | EvaluateConfig | ServeConfig
