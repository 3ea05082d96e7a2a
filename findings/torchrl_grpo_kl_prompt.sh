#!/usr/bin/env bash
# torchrl 0.14.1, Python 3.11: the KL penalty of GRPO is divided by all tokens, those of prompt and padding too
#
# Valid input: GRPOLoss with its default aggregation, "token_mean", its default mask, which are the tokens of the
# answers, and kl_to_ref_coeff=0.1. Two answers of 8 tokens each, with prompts of 8 to 248 tokens.
#
# Expected: objective and penalty are means over the same tokens, those of the answers. So it is in the formula of GRPO,
# and for the objective it is so here. A longer prompt does not change the coefficient, nor does padding.
#
# Seen: outside of the answers the penalty is set to 0, and then its mean is taken over all positions. With a prompt of
# 248 tokens it is 1/32 of the right one, in loss and gradient. One long prompt in the batch is enough, as the padding
# of the other row counts as well. `kl_to_inference_coeff`, CISPOLoss and DAPO take the same way. `clip_fraction`, for
# the log, is divided so too: below, every token of the answers was clipped. There is no warning.
#
# Why it matters: prompts with retrieved passages are long, and their answers are short. The model is then hardly held
# to the reference; how little depends on the longest prompt of the batch. The log shows a divergence that is too small
# by the same factor, so that nothing looks wrong.
#
# Output (KL penalty by torchrl, and the right one; the first divided by the second, and the same for their gradients;
# objective by torchrl, and the right one; part of clipped tokens by torchrl, and the right one):
#                         penalty   right   part  gradient   objective   right   clipped  right
#   prompts of   8,   8   0.0164  0.0328   0.50      0.50     -0.1878 -0.1878      0.50   1.00
#   prompts of  24,  24   0.0105  0.0421   0.25      0.25     -0.1878 -0.1878      0.25   1.00
#   prompts of  56,  56   0.0016  0.0130   0.12      0.12     -0.1878 -0.1878      0.12   1.00
#   prompts of 248, 248   0.0006  0.0198   0.03      0.03     -0.1878 -0.1878      0.03   1.00
#   prompts of   8, 248   0.0003  0.0106   0.03      0.03     -0.1878 -0.1878      0.03   1.00
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
from torchrl.envs.llm.transforms import RetrieveLogProb
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens
from torchrl.objectives.llm import CISPOLoss, DAPO, GRPOLoss
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 100
ANSWER = 8
COEFFICIENT = 0.1
torch.set_num_threads(1)
torch.manual_seed(0)
words = {name: i for i, name in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, WORDS))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
)
reference_model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512,
    )
).eval()
model = copy.deepcopy(reference_model)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


def wrapper(network):
    return TransformersWrapper(
        network, tokenizer=tokenizer, input_mode="tokens", generate=False, return_log_probs=True, pad_output=False
    )


policy = wrapper(model)
# Without an assistant mask: the inputs are tokens, and the loss has its own mask.
add_reference = RetrieveLogProb(
    wrapper(reference_model), log_probs_full_key=("ref_log_probs", "full"), assistant_only=False
)


def batch(lengths, advantages):
    rows = []
    for length, advantage in zip(lengths, advantages):
        prompt = torch.randint(3, WORDS, (length,))
        answer = torch.randint(3, WORDS, (ANSWER,))
        rows.append(
            TensorDict(
                {
                    "tokens": Tokens(
                        prompt=prompt, response=answer, full=torch.cat([prompt, answer]), padded=False
                    ),
                    "masks": Masks(
                        all_attention_mask=torch.ones(length + ANSWER, dtype=torch.bool),
                        all_assistant_mask=None,
                        padded=False,
                    ),
                    "advantage": torch.full((1, 1), advantage),  # One for the whole answer.
                },
                [],
            )
        )
    data = lazy_stack(rows)
    with torch.no_grad():
        data = add_reference(data)
        now = policy(data.copy()).get(("log_probs", "full"), as_list=True)
    for row, values in zip(rows, now):
        # The probabilities when the answers were sampled: lower, so that all ratios are above the bound of 1.2.
        row.set("log_probs", LogProbs(prompt=None, response=None, full=values - 0.5, padded=False))
    return data, rows


def by_hand(data, rows):
    """Penalty, objective and clipped part: means over the tokens of the answers."""
    penalties, objectives, clipped = [], [], []
    for row, reference in zip(rows, data.get(("ref_log_probs", "full"), as_list=True)):
        tokens = row["tokens"].full
        logits = model(tokens.unsqueeze(0)).logits[0, :-1]
        new = torch.log_softmax(logits, dim=1).gather(1, tokens[1:].unsqueeze(1)).squeeze(1)[-ANSWER:]
        difference = reference[-ANSWER:] - new
        penalties.append(difference.exp() - difference - 1)
        ratio = (new - row["log_probs"].full[-ANSWER:]).exp()
        advantage = row["advantage"][:, 0]
        objectives.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        clipped.append(((ratio < 0.8) | (ratio > 1.2)).float())
    return COEFFICIENT * torch.cat(penalties).mean(), torch.cat(objectives).mean(), torch.cat(clipped).mean()


def gradient(loss):
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


print("                      penalty   right   part  gradient   objective   right   clipped  right")
for lengths in ((8, 8), (24, 24), (56, 56), (248, 248), (8, 248)):
    data, rows = batch(lengths, (1.0, -0.5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_losses = []
        for loss_class in (GRPOLoss, DAPO, CISPOLoss):
            loss_function = loss_class(
                policy, kl_to_ref_coeff=COEFFICIENT, kl_to_inference_coeff=COEFFICIENT, entropy_bonus=False
            )
            loss_function.set_keys(ref_log_probs=("ref_log_probs", "full"))
            all_losses.append(loss_function(data))
    losses = all_losses[0]
    assert not caught, [str(item.message) for item in caught]
    penalty, objective, clipped = by_hand(data, rows)
    part = (losses.loss_kl_to_ref / penalty).item()
    own, right = gradient(losses.loss_kl_to_ref), gradient(penalty)
    of_gradient = (own.norm() / right.norm()).item()
    label = f"prompts of {lengths[0]:3}, {lengths[1]:3}"
    print(
        f"{label} {losses.loss_kl_to_ref.item():8.4f} {penalty.item():7.4f} {part:6.2f} {of_gradient:9.2f}"
        f" {losses.loss_objective.item():11.4f} {objective.item():7.4f} {losses.clip_fraction.item():9.2f}"
        f" {clipped.item():6.2f}"
    )
    answers = ANSWER / (max(lengths) + ANSWER)
    assert abs(part - answers) < 1e-3, label
    assert torch.allclose(own, answers * right, atol=1e-6), label
    # All answers were sampled with probabilities that were lower by exp(-0.5).
    of_sampling = COEFFICIENT * (torch.tensor(-0.5).exp() - 0.5)
    for other in all_losses:
        assert torch.equal(other.loss_kl_to_ref, losses.loss_kl_to_ref), label
        assert torch.allclose(other.loss_kl_to_inference, answers * of_sampling, atol=1e-6), label
    assert torch.allclose(losses.loss_objective, objective, atol=1e-5), label
    assert abs(losses.clip_fraction.item() - answers) < 1e-3 and clipped == 1, label
PY
