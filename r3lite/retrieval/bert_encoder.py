"""BERT as an encoder of queries and passages. Vectors are float32 [N, dimension] of length 1."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from r3lite.core.episode import Document
from r3lite.core.errors import R3LiteError
from r3lite.devices.precision import DTYPES
from r3lite.models.bert import load_bert
from r3lite.retrieval.bert_folder import Batch, batches, text_tokenizer
from r3lite.retrieval.conventions import passage_text, read_conventions, settings_of


class BertEncoder:
    """A BERT sentence encoder: the last hidden states of a text, pooled as its folder says and scaled to length 1."""

    def __init__(self, name: str, style: str, device: str = "cpu", batch_size: int = 32, dtype: str = "fp32"):
        found = read_conventions(name)
        if found.other:
            remedy = "Use another, such as intfloat/e5-base-v2 or sentence-transformers/all-MiniLM-L6-v2."
            raise R3LiteError(f"{found.folder} is not an encoder that r3lite computes itself: {found.other}", remedy)
        self.model = load_bert(found.folder, DTYPES[dtype], device)
        self.device, self.batch_size, self.pooling, self.lower = device, batch_size, found.pooling, found.lower
        style, self.prefixes = found.styled(style, name)
        config = self.model.config
        self.dimension = config.hidden_size
        length = min(found.max_length, config.max_position_embeddings - config.first_position)
        self.tokenizer = text_tokenizer(found.folder / "tokenizer.json", length, config.vocab_size)
        self.settings = settings_of(name, style, self.prefixes, length, self.dimension, dtype)
        if found.pooling != "mean":  # which indexes of before have not
            self.settings["pooling"] = found.pooling

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return self._encode([self.prefixes[0] + q for q in queries], lambda n: None)

    def encode_passages(self, documents: list[Document], advance: Callable[[int], object]) -> np.ndarray:
        return self._encode([self.prefixes[1] + passage_text(d) for d in documents], advance)

    def encode_tokens(self, texts: list[str]) -> list[np.ndarray]:
        """The last hidden states [T, C] of each text's tokens, [CLS] and [SEP] among them; texts get no prefix."""
        found: list[np.ndarray] = [np.empty(0)] * len(texts)
        for batch, hidden in self._hidden(texts):
            for row, states, length in zip(batch.rows, hidden.cpu().numpy(), batch.real.sum(1).tolist()):
                found[row] = states[:length]
        return found

    def _encode(self, texts: list[str], advance: Callable[[int], object]) -> np.ndarray:
        """Vectors [N, C] of N texts."""
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for batch, hidden in self._hidden(texts):
            pooled = pool(hidden, batch.real, self.pooling)
            out[batch.rows] = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
            advance(len(batch.rows))
        return out

    @torch.inference_mode()
    def _hidden(self, texts: list[str]) -> Iterator[tuple[Batch, Tensor]]:
        """Batches of texts with their last hidden states [B, T, C]."""
        encodings = self.tokenizer.encode_batch([t.lower() for t in texts] if self.lower else texts)
        for batch in batches(encodings, self.batch_size, self.device):
            yield batch, self.model(batch.tokens, batch.real).float()


def pool(hidden: Tensor, real: Tensor, how: str) -> Tensor:
    """One state [B, C] of the hidden states [B, T, C] of texts that are padded on the right; `real` [B, T] is False at
    padding. `how` is mean, cls (the first token) or last."""
    if how == "cls":
        return hidden[:, 0]
    if how == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), real.sum(1) - 1]
    return (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
