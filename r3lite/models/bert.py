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
    first_position: int = 0  # RoBERTa and XLM-R count from pad_token_id + 1


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
        """Returns the embeddings [B, T, C] of token ids [B, T].

        `segments` [B, T] is 0 at the first text and 1 at the second; None: all 0.
        """
        if segments is None:
            segment_embeddings = self.token_type_embeddings.weight[0]
        else:
            segment_embeddings = self.token_type_embeddings(segments)
        end = self.first + input_ids.shape[1]
        positions = self.position_embeddings.weight[self.first : end]
        return self.LayerNorm(self.word_embeddings(input_ids) + (positions + segment_embeddings))


class Linear(nn.Linear):
    """A linear layer whose weight is frozen."""

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x.flatten(0, -2), self.weight, self.bias)
        return out.unflatten(0, x.shape[:-1])


class SelfAttention(nn.Module):
    """Attention of all tokens to all tokens that are not padding."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.query = Linear(config.hidden_size, config.hidden_size)
        self.key = Linear(config.hidden_size, config.hidden_size)
        self.value = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q = self._heads(self.query(x))
        k = self._heads(self.key(x))
        v = self._heads(self.value(x))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # [B, H, T, D]
        return out.transpose(1, 2).reshape(x.shape)

    def _heads(self, x: Tensor) -> Tensor:
        """Splits [B, T, C] into heads, [B, H, T, D]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Output(nn.Module):
    """Projection, residual connection and the norm after it."""

    def __init__(self, size: int, config: BertConfig):
        super().__init__()
        self.dense = Linear(size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class BertLayer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = nn.ModuleDict()
        self.attention["self"] = SelfAttention(config)
        self.attention["output"] = Output(config.hidden_size, config)
        self.intermediate = nn.ModuleDict()
        self.intermediate["dense"] = Linear(config.hidden_size, config.intermediate_size)
        self.output = Output(config.intermediate_size, config)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        attended = self.attention["self"](x, mask)
        x = self.attention["output"](attended, x)
        hidden = F.gelu(self.intermediate["dense"](x))
        return self.output(hidden, x)


class Bert(nn.Module):
    """The encoder, without the pooler and heads that it was pretrained with."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})

    def forward(
        self,
        input_ids: Tensor,
        real: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Returns the hidden states [B, T, C] of token ids [B, T], padded on the right.

        `real` [B, T] is False at padding; its rows have at least one True. Hidden states at padding have no meaning.
        """
        mask = None
        if real is not None and not bool(real.all()):
            mask = real[:, None, None, :].bool()  # [B, 1, 1, T]
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

    def forward(
        self,
        input_ids: Tensor,
        real: Tensor | None,
        segments: Tensor,
    ) -> Tensor:
        """Returns the logits [B] of pairs, from token ids, `real` and `segments` as in `Bert`, all [B, T]."""
        hidden = self.bert(input_ids, real, segments)
        pooled = torch.tanh(self.pooler["dense"](hidden[:, 0]))  # [B, C], of [CLS]
        return self.classifier(pooled)[:, 0]


def read_bert_config(folder: str | Path, types: tuple[str, ...] = MODEL_TYPES) -> BertConfig:
    """Reads the sizes from a folder's `config.json`; R3LiteError names what is unsupported."""
    record = read_record(Path(folder) / "config.json", "Copy config.json from the model's source.")
    model_type = record.text("model_type")
    activation = record.text("hidden_act", "gelu")
    positions = record.text("position_embedding_type", "absolute")
    for key, value, supported in (
        ("model_type", model_type, types),
        ("hidden_act", activation, ("gelu",)),
        ("position_embedding_type", positions, ("absolute",)),
    ):
        if value not in supported:
            raise R3LiteError(
                f"{record.source.where}: {key} is {value!r}; only {' and '.join(map(repr, supported))} is supported",
                "Use a BERT, such as intfloat/e5-base-v2, or a BERT cross-encoder for --rerank.",
                code="bert-unsupported",
            )
    first = 0
    if model_type != "bert":
        first = record.whole("pad_token_id", 1, high=1 << 20) + 1
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = {name: record.whole(name, low=1, high=SIZES[name]) for name in names}
    config = BertConfig(
        **sizes,
        # [CLS], a word and [SEP] are the shortest text.
        max_position_embeddings=record.whole("max_position_embeddings", 512, low=3 + first, high=1 << 20),
        type_vocab_size=record.whole("type_vocab_size", 2, low=1, high=1 << 20),
        layer_norm_eps=record.number("layer_norm_eps", 1e-12, low=0, high=1, above=True),
        first_position=first,
    )
    if config.hidden_size % config.num_attention_heads:
        raise record.error("hidden_size is not a multiple of num_attention_heads")
    return config


def load_bert(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Bert:
    """Loads the encoder of a model folder, frozen, in `dtype` on `device`; pooler and heads are left out.

    Raises R3LiteError naming a tensor that is missing, unexpected or of the wrong shape or type.
    """
    with torch.device("meta"):
        model = Bert(read_bert_config(folder))
    surplus = ("pooler.", "cls.", "lm_head.")
    return _filled(model, Path(folder), surplus=surplus, dtype=dtype, device=device)


def load_bert_scorer(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> BertScorer:
    """Loads the cross-encoder of a model folder, frozen, in `dtype` on `device`. Raises R3LiteError as `load_bert`."""
    with torch.device("meta"):
        model = BertScorer(read_bert_config(folder, MODEL_TYPES[:1]))  # the others have another head
    return _filled(model, Path(folder), surplus=("cls.",), dtype=dtype, device=device)


Model = TypeVar("Model", Bert, BertScorer)


def _filled(
    model: Model, folder: Path, surplus: tuple[str, ...], dtype: torch.dtype, device: str | torch.device
) -> Model:
    """Fills the model with the weights of its folder, without those whose plain names begin with one of `surplus`."""
    path = folder / "model.safetensors"
    if not path.exists():
        raise R3LiteError(
            f"{folder} has no model.safetensors",
            "Use a model whose weights are in safetensors format.",
            code="weights-absent",
        )
    parameter_names = {}  # the model's names by the plain names
    expected_shapes = {}
    for name, parameter in model.named_parameters():
        parameter_names[_plain(name)] = name
        expected_shapes[_plain(name)] = parameter.shape
    surplus = (*surplus, "embeddings.position_ids")  # which old exporters wrote
    tensors = {}
    for name, tensor in read_tensors(path).items():
        if not _plain(name).startswith(surplus):
            tensors[_plain(name)] = tensor
    faults = _faults(tensors, expected_shapes)
    if faults:
        further = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise R3LiteError(
            f"{path}: {faults[0]}{further}",
            "Get config.json and the weights from the same model.",
            code="bert-weights-differ",
        )
    state = {}
    for name, tensor in tensors.items():
        # Copied, because the tensors that were read are views of the mapped file.
        state[parameter_names[name]] = tensor.to(device, dtype, copy=True)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


def _faults(tensors: dict[str, Tensor], expected_shapes: dict[str, torch.Size]) -> list[str]:
    """Returns a line on each tensor that is missing, unexpected or, if none is, of the wrong shape or type."""
    missing = [f"{name} is missing" for name in expected_shapes if name not in tensors]
    unexpected = [f"{name} is unexpected" for name in tensors if name not in expected_shapes]
    if missing or unexpected:
        return missing + unexpected
    faults = []
    for name, expected in expected_shapes.items():
        shape = tensors[name].shape
        if shape != expected:
            faults.append(f"{name} has shape {list(shape)}, not {list(expected)}")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            faults.append(f"{name} is of type {tensor.dtype}")
    return faults


def _plain(name: str) -> str:
    """Returns a tensor's name without the prefix and the old spellings that some checkpoints have."""
    name = name.removeprefix("bert.").removeprefix("roberta.")
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
