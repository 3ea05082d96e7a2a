"""A small model with a policy and a reference adapter, a batch that it sampled, and learners that note gradients."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from r3lite.core.grant import Grant, Memory
from r3lite.core.token_record import TokenRecord
from r3lite.devices.precision import Precision
from r3lite.models import lora
from r3lite.models.logprobs import TopTokens
from r3lite.models.value_head import ValueHead
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout, action_logprobs, action_states
from r3lite.rl.learner import Learner
from r3lite.settings import LengthSettings, RLSettings
from r3lite.settings.rl import PAPERS

VOCABULARY = 290
# Two rollouts for each of two questions, with retrieved tokens (the gaps) and of different lengths.
ACTIONS = ["..aa..aaa", "..aa.a", "..a....aaaa", "..aaaaaa"]
PAID = [1.0, 0.2, 0.5, 0.0]


def paper(name: str, **settings) -> RLSettings:
    """The settings of an algorithm as its paper has them, but for those given."""
    teacher = {"teacher": "tiny"} if ALGORITHMS[name].has_teacher and "teacher_logprobs" not in settings else {}
    return RLSettings(**({"algorithm": name} | PAPERS.get(name, {}) | teacher | settings))


@pytest.fixture
def model(small_model):
    model = small_model().train()
    for name, seed in (("policy", 1), ("reference", 2)):
        lora.add_adapter(model, name, r=4, alpha=8, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        for key, p in lora.adapter_parameters(model, name).items():
            if "lora_B" in key:  # else the adapters would change nothing
                p.data.normal_(0, 0.05, generator=generator)
    for p in lora.adapter_parameters(model, "reference").values():
        p.requires_grad_(False)
    lora.set_adapter(model, "policy")
    return model


@pytest.fixture
def sampled(model):
    """Makes a batch, two rollouts a question: random tokens with the log-probs that the model gives them, as an
    on-policy sampler would record. `paid` is paid at the end of each, 0.1 at the end of each turn."""

    def make(actions: list[str], paid: list[float], per_turn: float = 0.1) -> Batch:
        generator = torch.Generator().manual_seed(0)
        rollouts = []
        for i, (pattern, amount) in enumerate(zip(actions, paid, strict=True)):
            mask = [c == "a" for c in pattern]
            tokens = torch.randint(0, VOCABULARY, (len(mask),), generator=generator).tolist()
            ends = [t for t in range(len(mask)) if mask[t] and mask[t + 1 : t + 2] != [True]]
            rewards = [(end, per_turn) for end in ends] + [(ends[-1], amount)]
            rollouts.append(
                Rollout(
                    TokenRecord(tokens=tokens, action_mask=mask, logprobs=[0.0] * sum(mask), values=[0.3] * sum(mask)),
                    rewards,
                    i // 2,
                )
            )
        batch = Batch.of(rollouts)
        with torch.no_grad():
            return replace(batch, logprobs=batch.spread(action_logprobs(model, batch, VOCABULARY, 1.0)))

    return make


@pytest.fixture
def batch(sampled):
    return sampled(ACTIONS, PAID)


def moved(batch: Batch, size: float = 0.4) -> Batch:
    """The batch as if another policy had sampled it, with ratios on both sides of 1."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(batch.logprobs.shape, generator=generator) * size * batch.action_mask
    return replace(batch, logprobs=batch.logprobs + noise)


def taught(batch: Batch, rows, k: int = 5) -> Batch:
    """The batch with random distributions of a teacher, of which k tokens are known, at the action tokens of rows."""
    generator = torch.Generator().manual_seed(9)
    teacher = []
    for i, actions in enumerate(batch.action_mask.sum(-1).tolist()):
        logits = torch.randn(actions, VOCABULARY, generator=generator) * 2
        top = logits.log_softmax(-1).topk(k)
        teacher.append(TopTokens(top.indices.int(), top.values) if i in rows else None)
    failed = torch.tensor([row is not None for row in teacher])
    return replace(batch, failed=failed, teacher=teacher)


@pytest.fixture
def logprobs(model, batch):
    """The policy's log-probabilities [N] of the batch's action tokens, with gradients."""
    hidden, tokens = action_states(model, batch)
    return model.logits(hidden)[:, :VOCABULARY].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


@pytest.fixture
def reference(model, batch):
    """Those of the reference, without."""
    with torch.no_grad(), lora.use_adapter(model, "reference"):
        return action_logprobs(model, batch, VOCABULARY, 1.0)


@pytest.fixture
def setup(model):
    """Makes a learner of an algorithm (a name or a class), and the list of gradients that its steps would have used."""

    def make(algorithm="ppo", **settings):
        lengths = settings.pop("lengths", LengthSettings())
        settings = {"kl_beta": 0.05, "mini_batch_size": 4, "micro_batch_size": 4} | settings
        settings = paper(algorithm, **settings) if isinstance(algorithm, str) else RLSettings(**settings)
        cls = ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm
        algorithm = cls(settings, lengths)
        parameters = list(lora.adapter_parameters(model, "policy").values())
        head = ValueHead(64) if algorithm.has_critic else None
        if head is not None:
            torch.manual_seed(3)
            head.weight.data.normal_(0, 0.1)
            parameters += head.parameters()
        steps = []

        def optimizer_step():
            steps.append(torch.cat([p.grad.flatten() for p in parameters]))
            for p in parameters:
                p.grad = None
            return float(steps[-1].norm()), False

        learner = Learner(
            model=model,
            vocabulary=VOCABULARY,
            temperature=1.0,
            settings=settings,
            algorithm=algorithm,
            reference="reference",
            precision=Precision(torch.float32, torch.device("cpu")),
            optimizer_step=optimizer_step,
            grant=Grant(Memory()),
            value_head=head,
        )
        return SimpleNamespace(learner=learner, algorithm=algorithm, steps=steps)

    return make


@pytest.fixture
def gradients(setup):
    """The gradients of a round's optimizer steps, and its metrics."""

    def learn(batch, algorithm="ppo", **settings):
        harness = setup(algorithm, **settings)
        measured = harness.learner.learn(batch, "seed")
        return harness.steps, measured

    return learn


@pytest.fixture
def gradient_of(model):
    """The gradient of a scalar with respect to the policy's adapter, by autograd alone."""
    parameters = list(lora.adapter_parameters(model, "policy").values())
    return lambda loss: torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
