#!/usr/bin/env bash
# rerankers 0.10.0 with transformers 4.57.3, Python 3.11: layerwise rerankers are read at the padding
#
# Valid input: `LLMLayerWiseRanker` with a model that returns, as bge-reranker-v2-minicpm-layerwise does, a score at each
# token. The stand-in is a small Llama with random weights and a linear head, with its code in its folder.
#
# Expected: the score of a document is that at the last token of its prompt, and is the same whichever documents are
# ranked beside it.
#
# Seen: the tokenizer is set to pad on the right, and the score is taken at the last place of the batch. For all but the
# longest document that is a padding token, after as many others as the document is shorter. Because lengths are rounded
# up to a multiple of 8, the longest one, and a document alone, are also read there, unless they fill it.
#
# Why it matters: nothing is raised, and scores look plausible, because padding tokens see the prompt. But they are none
# that the model was trained for, and they depend on the length of the other documents.
#
# Output (scores; the last token of the prompt, then as `rank` returns it, alone and beside one other document):
#   short   at its end -0.084  alone  1.016  beside a longer one  0.515
#   long    at its end  0.093  alone -0.443  beside a shorter one -0.443
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet 'torch==2.13.0' numpy==2.4.6 transformers==4.57.3 rerankers==0.10.0 || exit 2
cd "$work"
mkdir model
cat > model/layerwise.py <<'PY'
import torch
from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel


class LayerwiseConfig(LlamaConfig):
    model_type = "layerwise"


class Layerwise(LlamaPreTrainedModel):
    """Returns a score at each token, for one layer."""

    config_class = LayerwiseConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.head = torch.nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **_):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        return ([self.head(hidden)[..., 0]],)
PY
HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - 2> "$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import sys

import torch
from rerankers.models.llm_layerwise_ranker import LLMLayerWiseRanker
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, "model")
from layerwise import Layerwise, LayerwiseConfig

words = ["<pad>", "<s>", "<unk>", *(f"w{i}" for i in range(50))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"bos_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>"}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained("model")
config = LayerwiseConfig(
    vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, pad_token_id=0, bos_token_id=1, initializer_range=0.3,
)
torch.manual_seed(0)
model = Layerwise(config).eval()
config.auto_map = {"AutoConfig": "layerwise.LayerwiseConfig", "AutoModelForCausalLM": "layerwise.Layerwise"}
model.save_pretrained("model")

ranker = LLMLayerWiseRanker("model", device="cpu", verbose=0, prompt="w1 w2")
documents = {"short": "w3 w4 w5", "long": " ".join(f"w{i}" for i in range(6, 20))}
both = {result.document.text: result.score for result in ranker.rank("w20", list(documents.values()))}
for name, other in (("short", "longer"), ("long", "shorter")):
    text = documents[name]
    prompt = ranker._get_inputs([("w20", text)], max_sequence_length=512)
    length = int(prompt["attention_mask"].sum())
    with torch.no_grad():
        right = model(prompt["input_ids"][:, :length])[0][0][0, -1].item()
    alone = ranker.score("w20", text)
    print(f"{name:6}  at its end {right:6.3f}  alone {alone:6.3f}  beside a {other} one {both[text]:6.3f}")
    assert abs(right - alone) > 0.01  # also alone it is padded, to a multiple of 8
    assert (abs(alone - both[text]) > 0.1) == (name == "short")
PY
