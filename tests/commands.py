"""The settings of every command, and of one that has nearly all sections."""

import r3lite.settings as settings
from r3lite.ask import AskConfig
from r3lite.check_format import CheckFormatConfig
from r3lite.collect import CollectConfig
from r3lite.doctor import DoctorConfig
from r3lite.evaluate import EvaluateConfig
from r3lite.index import IndexConfig
from r3lite.plan import PlanRlConfig, PlanSftConfig
from r3lite.prepare import PrepareConfig
from r3lite.procedures import ProceduresConfig
from r3lite.quickstart import QuickstartConfig
from r3lite.retrieve import RetrieveConfig
from r3lite.serve import ServeConfig
from r3lite.tune_prompt import TunePromptConfig


class Everything(settings.CommandConfig):
    """All sections, as one command."""

    schedule: settings.Schedule = settings.Schedule()
    tracking: settings.TrackSettings = settings.TrackSettings()
    model: settings.ModelSettings = settings.ModelSettings()
    lora: settings.LoraSettings = settings.LoraSettings()
    optimizer: settings.OptimizerSettings = settings.OptimizerSettings(learning_rate=3e-4)
    data: settings.DataSettings = settings.DataSettings()
    truncation: settings.TruncationSettings = settings.TruncationSettings()
    judge: settings.JudgeSettings = settings.JudgeSettings()


# Flags without which an algorithm does not run.
NEEDED = {"dgpo": ["--teacher", "tiny"]}
# Settings of each command, with the table of a TOML file that they are read from.
CONFIGS = {
    "sft": (settings.SftConfig(), "sft"),
    "ppo": (settings.PpoConfig(), "ppo"),
    "evaluate": (EvaluateConfig(), "evaluate"),
    "ask": (AskConfig(), "ask"),
    "serve": (ServeConfig(), "serve"),
    "collect": (CollectConfig(), "collect"),
    "index": (IndexConfig(), "index"),
    "retrieve": (RetrieveConfig(), "retrieve"),
    "doctor": (DoctorConfig(), "doctor"),
    "tune_prompt": (TunePromptConfig(), "tune_prompt"),
    "check_format": (CheckFormatConfig(), "check_format"),
    "prepare": (PrepareConfig(), "prepare"),
    "procedures": (ProceduresConfig(), "procedures"),
    "rollout_worker": (settings.RolloutWorkerConfig(), "ppo"),
    "quickstart": (QuickstartConfig(), "quickstart"),
    "plan": (PlanSftConfig(), "sft"),
    "plan of RL": (PlanRlConfig(), "ppo"),
}


def argument(words: list[str], flag: str) -> str:
    """The value of a flag on a command line."""
    return words[words.index(flag) + 1]
