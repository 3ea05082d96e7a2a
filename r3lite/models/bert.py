"""BERT (arXiv 1810.04805) as an encoder of text and as a scorer of pairs of texts, in plain PyTorch, and how both are
loaded from a model folder.

Owns the networks and the spellings of their published checkpoints; knows nothing of tokens, pooling or prefixes.
Parameter names are those of the published checkpoints. Shape legend: models/causal_lm.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_record
from r3lite.models.config_file import SIZES
from r3lite.models.embedding import embedding
from r3lite.models.linear import linear
from r3lite.models.tensor_files import read_tensors

# By the `model_type` of config.json. The others are BERT with other tokens and positions (RoBERTa, arXiv 1907.11692;
# XLM-R, arXiv 1911.02116).
MODEL_TYPES = ("bert", "roberta", "xlm-roberta")


@dataclass(frozen=True)
class BertConfig:
    """Sizes of one model, under the names that `config.json` uses."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    first_position: int = 0  # RoBERTa and XLM-R count from the place after padding's


class Embeddings(nn.Module):
    """The sum of word, position and segment embeddings, normalized."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.word_embeddings = embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.first = config.first_position

    def forward(self, input_ids: Tensor, segments: Tensor | None) -> Tensor:
        """[B, T] -> [B, T, C]. `segments` [B, T] is 0 at the first text and 1 at the second; None: all 0."""
        of_segment = self.token_type_embeddings.weight[0] if segments is None else self.token_type_embeddings(segments)
        places = self.position_embeddings.weight[self.first : self.first + input_ids.shape[1]] + of_segment
        return self.LayerNorm(self.word_embeddings(input_ids) + places)


class Linear(nn.Linear):
    """A linear layer whose weight is frozen."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


class SelfAttention(nn.Module):
    """Attention of all tokens to all real ones."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.query, self.key, self.value = (Linear(config.hidden_size, config.hidden_size) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        B, T, C = x.shape
        q, k, v = (p(x).view(B, T, self.heads, -1).transpose(1, 2) for p in (self.query, self.key, self.value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # [B, H, T, D]
        return out.transpose(1, 2).reshape(B, T, C)


class Output(nn.Module):
    """Projection, residual connection and the norm after it."""

    def __init__(self, size: int, config: BertConfig):
        super().__init__()
        self.dense = Linear(size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class Layer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(config), "output": Output(config.hidden_size, config)})
        self.intermediate = nn.ModuleDict({"dense": Linear(config.hidden_size, config.intermediate_size)})
        self.output = Output(config.intermediate_size, config)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, mask), x)
        return self.output(F.gelu(self.intermediate["dense"](x)), x)


class Bert(nn.Module):
    """The encoder, without the pooler and heads that it was pretrained with."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))})

    def forward(self, input_ids: Tensor, real: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, C] of token ids [B, T], padded on the right; `real` [B, T] is False at padding.

        Rows of `real` have at least one True. Hidden states at padding have no meaning.
        """
        mask = None if real is None or bool(real.all()) else real[:, None, None, :].bool()  # [B, 1, 1, T]
        x = self.embeddings(input_ids, segments)
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
        return x


class BertScorer(nn.Module):
    """BERT with one logit on its pooler: a cross-encoder, which reads two texts at once and scores the pair."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.bert = Bert(config)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.hidden_size)})
        self.classifier = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Tensor, real: Tensor | None, segments: Tensor) -> Tensor:
        """Logits [B] of pairs, from token ids, `real` and `segments` as above, all [B, T]."""
        first = self.bert(input_ids, real, segments)[:, 0]  # [B, C], of [CLS]
        return self.classifier(torch.tanh(self.pooler["dense"](first)))[:, 0]


def read_bert_config(folder: str | Path, types: tuple[str, ...] = MODEL_TYPES) -> BertConfig:
    """Sizes from a folder's `config.json`; R3LiteError names what is unsupported."""
    record = read_record(Path(folder) / "config.json", "Copy config.json from the model's source.")
    kind = record.text("model_type")
    given = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
    found = {"model_type": (kind, types)} | {key: (record.text(key, only), (only,)) for key, only in given.items()}
    for key, (value, supported) in found.items():
        if value not in supported:
            raise R3LiteError(
                f"{record.source.where}: {key} is {value!r}; only {' and '.join(map(repr, supported))} is supported",
                "Use a BERT, such as intfloat/e5-base-v2, or a BERT cross-encoder for --rerank.",
                code="bert-unsupported",
            )
    first = 0 if kind == "bert" else record.whole("pad_token_id", 1, high=1 << 20) + 1
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = BertConfig(
        **{name: record.whole(name, low=1, high=SIZES[name]) for name in sizes},
        # [CLS], a word and [SEP] are the shortest text.
        max_position_embeddings=record.whole("max_position_embeddings", 512, low=3 + first, high=1 << 20),
        type_vocab_size=record.whole("type_vocab_size", 2, low=1, high=1 << 20),
        layer_norm_eps=record.number("layer_norm_eps", 1e-12, low=0, high=1, above=True),
        first_position=first,
    )
    if config.hidden_size % config.num_attention_heads:
        raise record.error("hidden_size is not a multiple of num_attention_heads")
    return config


def load_bert(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Bert:
    """The encoder of a model folder, frozen, in `dtype` on `device`; pooler and heads are left out.

    Raises R3LiteError naming a tensor that is missing, unexpected or of the wrong shape or type.
    """
    with torch.device("meta"):
        model = Bert(read_bert_config(folder))
    return _filled(model, Path(folder), ("pooler.", "cls.", "lm_head."), dtype, device)


def load_bert_scorer(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> BertScorer:
    """The cross-encoder of a model folder, frozen, in `dtype` on `device`. Raises R3LiteError as `load_bert` does."""
    with torch.device("meta"):
        model = BertScorer(read_bert_config(folder, MODEL_TYPES[:1]))  # the others have another head
    return _filled(model, Path(folder), ("cls.",), dtype, device)


Model = TypeVar("Model", Bert, BertScorer)


def _filled(
    model: Model, folder: Path, ignored: tuple[str, ...], dtype: torch.dtype, device: str | torch.device
) -> Model:
    """The model with the weights of its folder; those whose plain names begin with one of `ignored` are left out."""
    path = folder / "model.safetensors"
    own = {_plain(name): name for name, _ in model.named_parameters()}  # plain name -> ours
    expected = {_plain(name): p.shape for name, p in model.named_parameters()}
    if not path.exists():
        raise R3LiteError(
            f"{folder} has no model.safetensors",
            "Use a model whose weights are in safetensors format.",
            code="weights-absent",
        )
    ignored = (*ignored, "embeddings.position_ids")  # which old exporters wrote
    stored = {_plain(name): tensor for name, tensor in read_tensors(path).items()}
    found = {name: tensor for name, tensor in stored.items() if not name.startswith(ignored)}
    wrong = [f"{n} is missing" for n in expected if n not in found]
    wrong += [f"{n} is unexpected" for n in found if n not in expected]
    if not wrong:
        shapes = {n: (list(found[n].shape), list(shape)) for n, shape in expected.items()}
        wrong = [f"{n} has shape {has}, not {needs}" for n, (has, needs) in shapes.items() if has != needs]
        wrong += [f"{n} is of type {t.dtype}" for n, t in found.items() if not t.is_floating_point()]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise R3LiteError(
            f"{path}: {wrong[0]}{more}",
            "Get config.json and the weights from the same model.",
            code="bert-weights-differ",
        )
    # Copied, because the tensors that were read are views of the mapped file.
    model.load_state_dict({own[n]: t.to(device, dtype, copy=True) for n, t in found.items()}, assign=True)
    return model.eval().requires_grad_(False)


def _plain(name: str) -> str:
    """A tensor's name without the prefix and the old spellings that some checkpoints have."""
    name = name.removeprefix("bert.").removeprefix("roberta.")
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
