"""The engine on the shipped checkpoint, fp32, with real retrieval over the sample world."""

import dataclasses

import pytest
import torch

from r3lite.assembly.answering import build_engine
from r3lite.core.files import shipped
from r3lite.core.invocation import resolve
from r3lite.datasets.qa import read_questions
from r3lite.evaluate import EvaluateConfig
from r3lite.models import lora
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rl.batch import Batch, Rollout, action_logprobs
from r3lite.rollout.sampling import Sampler


@pytest.fixture(scope="module")
def tiny():
    """An engine of the tiny base, a retriever over the sample world, and four questions."""
    arguments = ["--preset", "tiny", "--dtype", "fp32", "--corpus", str(shipped("data", "world", "corpus.jsonl"))]
    config = resolve("evaluate", EvaluateConfig(), arguments)
    questions = read_questions(shipped("data", "world", "test.jsonl"), 4)
    retrieve = build_retriever(Setup(config.retrieval, questions))
    return build_engine(config, len(questions)), retrieve, questions


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_tokens_do_not_depend_on_company(tiny, temperature):
    engine, retrieve, questions = tiny
    engine = dataclasses.replace(engine, sampler=Sampler(temperature))
    seeds = list("abcd")
    together = [s.tokens for s in engine.run(questions, seeds, retrieve)]
    backwards = [s.tokens for s in engine.run(questions[::-1], seeds[::-1], retrieve)]
    alone = [engine.run([q], [s], retrieve)[0].tokens for q, s in zip(questions, seeds)]
    assert together == backwards[::-1] == alone


def test_sampled_log_probs_equal_the_trainers(tiny):
    engine, retrieve, questions = tiny
    engine = dataclasses.replace(engine, sampler=Sampler(1.0))
    sequences = engine.run(questions, list("efgh"), retrieve)
    rollouts = [Rollout(s, [], 0) for s in sequences]
    batch = Batch.of(rollouts)
    with torch.no_grad():
        logprobs = action_logprobs(engine.model, batch, engine.layout.tokenizer.size, 1.0)
    assert (logprobs - batch.logprobs[batch.action_mask]).abs().max() <= 1e-4
    assert not lora.switch_of(engine.model).active
