"""The text part of a model that also sees images: Gemma 3 from 4B on (`gemma3`), Qwen3.5 (`qwen3_5`).

The rest of its folder is left out.

The config and the tensors are read as if the folder held the text model alone, as exported folders do. Only adapters
are written for the whole model, under the names that PEFT gives its layers.
"""

import re
from typing import Any

from safetensors import safe_open
from torch import Tensor

# By the model_type of the whole model: the model_type of its text part, and the text part's class in transformers.
TEXT_TYPES = {
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
}
# Keys of the whole model's config that also hold for its text part, unless the text part has the key itself; and TIED,
# which holds in any case, because the head belongs to the whole model.
SHARED_KEYS = ("quantization_config", "dtype", "torch_dtype")
TIED = "tie_word_embeddings"
# What names of tensors in a folder begin with, by transformers 4 or 5, and what they begin with in the text model.
TEXT_PREFIXES = (("language_model.model.", "model."), ("language_model.", ""), ("model.language_model.", "model."))
# The parts that are left out: in Qwen3.5 also layers that predict several tokens at once (`mtp`).
OTHER = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|visual|mtp)\.")
ADAPTER = "base_model.model.model."  # what the names of an adapter's tensors begin with
TEXT_ADAPTER = "base_model.model.model.language_model."
NO_ADAPTER = r".*(vision_tower|multi_modal_projector|visual).*"  # parts in which layers may be named like projections


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a `config.json`; of one of TEXT_TYPES those of its text part, as a config of its own."""
    if not is_whole(values):
        return values
    text_type, architecture = TEXT_TYPES[values["model_type"]]
    shared = {key: values[key] for key in SHARED_KEYS if values.get(key) is not None}
    changed = {"model_type": text_type, "architectures": [architecture]}
    if values.get(TIED) is not None:
        changed[TIED] = values[TIED]
    return shared | values["text_config"] | changed


def is_whole(values: dict[str, Any]) -> bool:
    """Returns whether the values of a `config.json` are those of a model whose text part is read."""
    model_type = values.get("model_type")
    return isinstance(model_type, str) and model_type in TEXT_TYPES and isinstance(values.get("text_config"), dict)


def text_name(name: str) -> str | None:
    """Returns the name in the text model of a tensor of a folder; None if it belongs to another part."""
    if OTHER.match(name):
        return None
    for stored, published in TEXT_PREFIXES:
        if name.startswith(stored):
            return published + name.removeprefix(stored)
    return name


class TextTensors:
    """An open file, of which the tensors of the text part are read under the names of the text model."""

    def __init__(self, file: safe_open):
        self.file = file
        self.stored = {}
        for name in file.keys():  # noqa: SIM118 (not a dictionary)
            published = text_name(name)
            if published is not None:
                self.stored[published] = name

    def keys(self) -> list[str]:
        return list(self.stored)

    def metadata(self) -> dict[str, str] | None:
        return self.file.metadata()

    def get_tensor(self, name: str) -> Tensor:
        return self.file.get_tensor(self.stored[name])

    def get_slice(self, name: str):
        return self.file.get_slice(self.stored[name])
