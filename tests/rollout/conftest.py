"""A toy model whose tokens are bytes, so that a test can write what the model says, and an engine that says it."""

import json

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from r3lite.models.qwen2 import Qwen2, Qwen2Config
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rollout.engine import Engine


@pytest.fixture(scope="session")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return Tokenizer(json.dumps(json.loads(backend.to_str())), None, "<|endoftext|>")


@pytest.fixture
def model(tokenizer):
    """Two layers, random weights large enough that the logits differ; 13 rows of padding in the embedding."""
    torch.manual_seed(0)
    model = Qwen2(Qwen2Config(tokenizer.size + 13, 32, 64, 2, 4, 2, rope_theta=10_000.0)).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.2)
    return model


class ScriptedEngine(Engine):
    """Says what the script says, and records the probability that the model gave it.

    `script` maps a question's id to its turns; a turn ends with the stop token unless it ends in `...`.
    """

    script: dict[str, list[str]]

    def _sample(self, logits, rows):
        logprobs = torch.log_softmax(logits.float() / self.sampler.temperature, -1)
        tokens = []
        for sequence in rows:
            turn = self.script[sequence.question.id][len(sequence.steps)]
            ids = self.tokenizer.encode(turn.removesuffix("..."))
            ids += [] if turn.endswith("...") else [self.tokenizer.stop_id]
            tokens.append(ids[len(sequence.turn)])
        return tokens, [logprobs[i, token].item() for i, token in enumerate(tokens)]


@pytest.fixture
def scripted(model, tokenizer):
    return scripting(model, tokenizer)


def scripting(model, tokenizer):
    """Makes engines of a model that say what a script says."""

    def make(script, **settings):
        engine = ScriptedEngine(model, tokenizer, **settings)
        engine.script = script
        return engine

    return make


@pytest.fixture
def scripted_with():
    return scripting
