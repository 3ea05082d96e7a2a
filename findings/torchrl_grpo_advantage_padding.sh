#!/usr/bin/env bash
# torchrl 0.14.1, Python 3.11: GRPO pads advantages on the right and all else on the left, so short answers get none
#
# Valid input: four answers to one question, of 2, 4, 7 and 10 tokens; the short ones are right. Every token has a
# reward, which is the form that torchrl's KLComputation returns when it puts a KL penalty into the reward.
# The answers go through a replay buffer with MCAdvantage, and then into GRPOLoss, both with their defaults.
#
# Expected: each token has the advantage that was stored for it. So it is with one answer in the batch, or with one
# reward for an answer. With a ratio of 1 the loss of a token is the negative advantage, so that it can be read off.
#
# Seen: tokens and log-probabilities are padded on the left, the advantages on the right, with zeros. The advantages of
# an answer that is n tokens shorter than the longest are n places too early: its first tokens get those of later
# tokens, and its last n get 0. Here both of the right answers get nothing at all, and of a wrong one 3 of 7 tokens.
# CISPOLoss and DAPO inherit it. There is no warning.
#
# Why it matters: what is learned from an answer depends on the other answers in its batch, and short ones are not
# learned from. Below, training makes the right answers hardly more likely. Shapes and values of the loss look usual.
#
# Output (length of an answer, its own advantage, and those that its tokens get; the same for advantages that are the
# numbers of the tokens; log-probability of the right answers before and after training):
#   answer   own  got by its tokens
#        2  1.26   0.00  0.00
#        4  1.26   0.00  0.00  0.00  0.00
#        7 -0.78  -0.78 -0.78 -0.78 -0.78  0.00  0.00  0.00
#       10 -0.78  -0.78 -0.78 -0.78 -0.78 -0.78 -0.78 -0.78 -0.78 -0.78 -0.78
#   numbered
#        2            0     0
#        4            0     0     0     0
#        7            4     5     6     7     0     0     0
#       10            1     2     3     4     5     6     7     8     9    10
#   log-probability of the tokens of the right answers: -4.69 before training
#     a reward for each token   -4.59 trained as a batch,  -3.95 an answer at a time
#     one reward for an answer  -3.96 trained as a batch,  -3.96 an answer at a time
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet torchrl==0.14.1 tensordict==0.14.3 transformers==5.24.0 torch==2.13.0 \
    numpy==2.4.6 || exit 2
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore:size_average - <<'PY'
import copy
import warnings

import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models, pre_tokenizers
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import Masks, Tokens
from torchrl.objectives.llm import CISPOLoss, DAPO, GRPOLoss, MCAdvantage
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 100
PROMPT = 6
ANSWERS = ((2, 1.0), (4, 1.0), (7, 0.0), (10, 0.0))  # Length and reward: the short ones are right.
STEPS = 50
torch.set_num_threads(1)
torch.manual_seed(0)
words = {name: i for i, name in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, WORDS))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
)
first_model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )
).eval()


def wrapper(model):
    return TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, return_log_probs=True, pad_output=False
    )


def group(one_reward):
    """The answers to one question with the advantages of MCAdvantage; a reward for each token, or one for all."""
    torch.manual_seed(1)
    prompt = torch.randint(3, WORDS, (PROMPT,))
    buffer = ReplayBuffer(storage=LazyStackStorage(len(ANSWERS)))
    buffer.append_transform(MCAdvantage(grpo_size=len(ANSWERS)))
    for length, reward in ANSWERS:
        answer = torch.randint(3, WORDS, (length,))
        rewards = torch.full((1 if one_reward else PROMPT + length, 1), reward)
        row = TensorDict(
            {
                "query": "question",
                "tokens": Tokens(prompt=prompt, response=answer, full=torch.cat([prompt, answer]), padded=False),
                "masks": Masks(
                    all_attention_mask=torch.ones(PROMPT + length, dtype=torch.bool),
                    all_assistant_mask=None,
                    padded=False,
                ),
                "next": TensorDict({"reward": rewards, "done": torch.ones(1, dtype=torch.bool)}),
            }
        )
        buffer.extend(lazy_stack([row]))
    data = buffer[:]
    with torch.no_grad():
        data.set("log_probs", wrapper(first_model)(data.copy()).get("log_probs"))
    return data


def loss_of(model, data, loss_class=GRPOLoss, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = loss_class(wrapper(model), entropy_bonus=False, **options)(data).loss_objective
    assert not caught, [str(item.message) for item in caught]
    return loss


def by_token(model, data, loss_class=GRPOLoss):
    """The advantages that the tokens of the answers get: with a ratio of 1, the loss of a token is -advantage."""
    losses = loss_of(model, data, loss_class, aggregation="none").detach()[..., 0]
    return [-row[-length:] for row, (length, _) in zip(losses, ANSWERS)]


def log_probability(model, data):
    """The mean log-probability of a token of the right answers."""
    tokens = [row["tokens"].full for row, (_, reward) in zip(data.unbind(0), ANSWERS) if reward == 1]
    with torch.no_grad():
        spread = [torch.log_softmax(model(row.unsqueeze(0)).logits[0, PROMPT - 1 : -1], 1) for row in tokens]
    return torch.cat([part.gather(1, row[PROMPT:, None]) for part, row in zip(spread, tokens)]).mean().item()


def trained(data, row_by_row):
    """The same after training with the whole group, or with the same mean over tokens, but an answer at a time."""
    model = copy.deepcopy(first_model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if row_by_row:
            for row, (length, _) in enumerate(ANSWERS):
                part = length / sum(length for length, _ in ANSWERS)
                (part * loss_of(model, data[row : row + 1])).backward()
        else:
            loss_of(model, data).backward()
        optimizer.step()
    return log_probability(model, data)


each, one = group(one_reward=False), group(one_reward=True)
own = [row[-1].item() for row in each.get("advantage", as_list=True)]
got = by_token(first_model, each)
longest = PROMPT + max(length for length, _ in ANSWERS)
print("answer   own  got by its tokens")
for row, ((length, _), advantage, values) in enumerate(zip(ANSWERS, own, got)):
    print(f"{length:6} {advantage:5.2f} " + "".join(f"{value:6.2f}" for value in values.tolist()))
    reached = max(0, length - (longest - PROMPT - length))
    right = torch.full((length,), advantage)
    assert torch.allclose(values[:reached], right[:reached]) and (values[reached:] == 0).all(), length
    single = -loss_of(first_model, each[row : row + 1], aggregation="none")[0, -length:, 0]
    assert torch.allclose(single, right), length
for loss_class in (CISPOLoss, DAPO):
    for values, same in zip(got, by_token(first_model, each, loss_class)):
        assert torch.allclose(values, same), loss_class
for (length, _), advantage, values in zip(ANSWERS, one.get("advantage", as_list=True), by_token(first_model, one)):
    assert torch.allclose(values, advantage.expand(length, 1)[:, 0]), length

numbered = each.clone()
for row in numbered.unbind(0):
    row.set("advantage", torch.arange(1.0 - PROMPT, len(row["tokens"].full) - PROMPT + 1).unsqueeze(1))
print("numbered")
for (length, _), values in zip(ANSWERS, by_token(first_model, numbered)):
    print(f"{length:6}       " + "".join(f"{value:6.0f}" for value in values.tolist()))
    shift = longest - PROMPT - length
    expected = [number if number <= length else 0 for number in range(1 + shift, length + shift + 1)]
    assert values.tolist() == expected, length

before = log_probability(first_model, each)
print(f"log-probability of the tokens of the right answers: {before:.2f} before training")
for name, data in (("a reward for each token", each), ("one reward for an answer", one)):
    together, apart = trained(data, row_by_row=False), trained(data, row_by_row=True)
    print(f"  {name:24} {together:6.2f} trained as a batch, {apart:6.2f} an answer at a time")
    if data is one:
        assert abs(together - apart) < 0.01, (together, apart)
    else:
        assert apart > together + 0.5, (together, apart)
PY
