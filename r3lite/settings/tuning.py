"""Settings of the optimisation of a prompt."""

from dataclasses import dataclass
from typing import Annotated, Literal

from r3lite.core.config import Bounds, Count, Required, Section

Few = Annotated[int, Bounds(low=1, high=100)]


@dataclass(frozen=True)
class TuningSettings(Section):
    """Prompt optimisation."""

    improve: Literal["init_prompt", "step_prompt"] = "init_prompt"
    """the prompt that is improved, from the file that is named for it or, without one, the format's own"""
    eval_data: Annotated[
        str | None, Required("questions that the prompts are scored on, other than those of --data")
    ] = None
    """question file, or name,subset,split, on which every prompt is scored"""
    eval_questions: Count = 100
    """most questions of --eval-data that a prompt is scored on, drawn with --seed"""
    metric: Literal["f1", "em"] = "f1"
    """score by which prompts are chosen"""
    rounds: Few = 3
    """rounds of critiques, edits and scores"""
    beam: Few = 4
    """best prompts of all so far, which a round goes on from"""
    branch: Few = 4
    """new prompts that a round makes of each of them"""
    sampled_questions: Count = 32
    """most questions of --data that each prompt of the beam is tried on in a round, to be criticized for; drawn anew in
    each round"""
    shown_failures: Few = 4
    """episodes with a wrong answer, or without one, that one critique is about"""
