"""Every setting of every command, by section: one file per room, all of them importable from here.

Each command puts together the sections it needs. Bounds and traits stand at the setting (see core/config.py): whether a
resumed run may change it, whether it pays what only a judge can say, whether it must be given.
"""

from r3lite.settings.commands import (
    AskSettings,
    CardSettings,
    CheckFormatSettings,
    CollectSettings,
    DoctorSettings,
    EvaluateSettings,
    PlanSettings,
    PrepareSettings,
    QuickstartSettings,
    ReportSettings,
    RetrieveSettings,
)
from r3lite.settings.common import Common
from r3lite.settings.configs import (
    AnsweringConfig,
    AskConfig,
    CollectConfig,
    EvaluateConfig,
    PpoConfig,
    QuickstartConfig,
    SamplingConfig,
    ServeConfig,
    SftConfig,
    TunePromptConfig,
)
from r3lite.settings.data import DataSettings, NewQuestionSettings, QuestionSettings, TrajectorySettings
from r3lite.settings.export import ExportSettings
from r3lite.settings.guard import GuardSettings, ValidationSettings
from r3lite.settings.judge import JudgeSettings
from r3lite.settings.memory import MemorySettings
from r3lite.settings.model import LoraSettings, ModelSettings, Projection
from r3lite.settings.procedures import ProcedureFileSettings, ProcedureSettings
from r3lite.settings.protocol import ProtocolSettings
from r3lite.settings.retrieval import DocumentSettings, IndexSettings, RetrievalSettings
from r3lite.settings.rewards import RewardSettings
from r3lite.settings.rl import RLSettings
from r3lite.settings.rollout import LengthSettings, SamplingSettings, TruncationSettings
from r3lite.settings.serve import LimitSettings, ModeSettings, ServerSettings
from r3lite.settings.sft import SftSettings
from r3lite.settings.sources import SourceSettings
from r3lite.settings.teacher import TeacherCacheSettings
from r3lite.settings.training import OptimizerSettings, Schedule, TrackSettings
from r3lite.settings.tuning import TuningSettings
