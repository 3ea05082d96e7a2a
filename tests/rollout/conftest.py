"""A toy model over the byte tokenizer, and an engine that says what a script says."""

from dataclasses import dataclass, field

import pytest
import torch

from r3lite.core.grant import Grant, Memory
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.protocols.layout import OPENINGS, Layout
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from tests.evaluating import token_of


@pytest.fixture
def model(tokenizer):
    """Two layers, random weights large enough that the logits differ; 13 rows of padding in the embedding."""
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(tokenizer.size + 13, 32, 64, 2, 4, 2, rope_theta=10_000.0)).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.2)
    return model


SAMPLER = Sampler()


@dataclass
class ScriptedEngine(Engine):
    """Says what the script says, and records the probability that the model gave it.

    `script` maps a question's id to its turns; a turn ends with the stop token unless it ends in `...`. A turn whose
    answer is forced is `forced` if that is given, else the turn after the one before it.
    """

    script: dict[str, list[str]] = field(default_factory=dict)
    forced: str | None = None

    def _sample(self, logits, batch):
        logprobs = torch.log_softmax(logits.float() / self.sampler.temperature, -1)
        tokens = []
        for sequence, depth in zip(batch.sequences, batch.depths, strict=True):
            is_forced = bool(sequence.forced_step and sequence.forced_step.faults)
            turns = self.script[sequence.question.id]
            turn = self.forced if is_forced and self.forced else turns[len(sequence.steps) + is_forced]
            tokens.append(token_of(self.layout.tokenizer, turn.removesuffix("..."), len(sequence.turn) + depth))
        return torch.tensor(tokens), logprobs[range(len(tokens)), tokens]


@pytest.fixture
def engine_of(model, tokenizer):
    """Makes engines of the toy model that speak R3."""
    return maker(Engine, model, tokenizer)


@pytest.fixture
def scripted(model, tokenizer):
    return scripting(model, tokenizer)


def maker(kind, model, tokenizer):
    """Makes engines of one kind and model; what is not an engine's own setting is one of its memory figures."""

    def make(protocol, lengths, sampler=SAMPLER, baseline="none", value_head=None, **memory):
        layout = Layout(tokenizer, protocol, lengths, OPENINGS[baseline])
        return kind(model, layout, sampler, Grant(Memory(**memory)), value_head)

    return make


def scripting(model, tokenizer):
    """Makes engines of a model that say what a script says."""
    make_engine = maker(ScriptedEngine, model, tokenizer)

    def make(script, forced=None, **settings):
        engine = make_engine(**settings)
        engine.script, engine.forced = script, forced
        return engine

    return make


@pytest.fixture
def scripted_with():
    return scripting
