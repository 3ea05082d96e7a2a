"""Writes model folders, merged or in NF4; `weights` reads them."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from r3lite.core.errors import R3LiteError
from r3lite.core.files import PART, move, read_record, write_json, write_text
from r3lite.models import nf4
from r3lite.models.causal_lm import CausalLM
from r3lite.models.config_file import config_record
from r3lite.models.projections import Nf4Linear
from r3lite.models.tensor_files import write_tensors
from r3lite.models.weights import (
    FINGERPRINT,
    INDEX,
    SINGLE,
    SOURCE,
    base_tensors,
    checkpoint_tensors,
    fingerprint,
    layer_linears,
)

CONFIG = "config.json"
VERBATIM = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def save_merged(
    model: CausalLM,
    source_folder: str | Path,
    out_folder: str | Path,
    max_shard: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Writes the base weights as a checkpoint that transformers reads, with config and tokenizer files of the source.

    An adapter that is to be included must be merged before (`lora.merge_adapter`); adapters that are still attached are
    left out. NF4 weights are written dense. `config.json` names the dtype that is written, under the source's key. With
    `max_shard` there are several files, of at most `max_shard` bytes unless one tensor is larger. `changes` has, by
    file name, the keys of a JSON file that differ from the source's, or the whole text of a text file. The folder
    appears whole or not at all. Raises R3LiteError if the folder exists and is not empty.
    """
    dtype_key = "dtype" if "dtype" in config_record(Path(source_folder)).values else "torch_dtype"
    dtype = str(model.head_weight.dtype).removeprefix("torch.")
    changes = dict(changes or {})
    changes[CONFIG] = changes.get(CONFIG, {}) | {dtype_key: dtype}

    def write(folder: Path) -> None:
        write_weights(folder, checkpoint_tensors(model), max_shard)

    _write_folder(
        model,
        source=Path(source_folder),
        out=Path(out_folder),
        write=write,
        changes=changes,
    )


def write_weights(
    folder: Path,
    tensors: dict[str, Tensor],
    max_shard: int | None,
) -> None:
    """Writes tensors as one file, or as several and an index, under the names that transformers gives them."""
    from huggingface_hub import split_torch_state_dict_into_shards

    shards = split_torch_state_dict_into_shards(
        tensors,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard or 1 << 62,
    )
    for file_name, names in shards.filename_to_tensors.items():
        write_tensors(folder / file_name, {name: tensors[name] for name in names})
    if shards.is_sharded:
        write_json(folder / INDEX, {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename})


def save_nf4(
    model: CausalLM,
    source_folder: str | Path,
    out_folder: str | Path,
) -> None:
    """Writes a model loaded with `quantize` in the layout of `models.nf4`, so that it need not be quantized again.

    Adapters are left out. The folder has the same files as that of `save_merged`, and appears in the same way.
    """
    assert not layer_linears(model), "a layer has dense linears"
    packed = [module for module in model.modules() if isinstance(module, Nf4Linear)]
    assert all(module.absmax.dtype == torch.int8 for module in packed), "a folder of bitsandbytes is kept as it is"
    base = fingerprint(source_folder)
    metadata = {FINGERPRINT: base} if base else {}

    def write(folder: Path) -> None:
        write_tensors(folder / SINGLE, base_tensors(model.state_dict()), metadata)

    _write_folder(
        model,
        source=Path(source_folder),
        out=Path(out_folder),
        write=write,
        changes={CONFIG: {"quantization_config": nf4.LAYOUT}},
    )


def _write_folder(
    model: CausalLM, source: Path, out: Path, write: Callable[[Path], None], changes: Mapping[str, Any]
) -> None:
    """Writes a model folder: the source's files with `changes` (see `save_merged`), and what `write` puts there.

    `config.json` loses the source's quantization, and names the head untied if the model has one of its own.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise R3LiteError(f"{out} already exists", "Pass a new folder for the checkpoint.", code="output-exists")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}{PART}")
    try:
        temporary.mkdir()
        for name in VERBATIM:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
        config = dict(config_record(source).values)
        config.pop("quantization_config", None)
        if not model.config.tie_word_embeddings:
            config["tie_word_embeddings"] = False
        for name, change in changes.items():
            if isinstance(change, str):
                write_text(temporary / name, change)
                continue
            values = {}
            if (source / name).is_file():
                values = read_record(source / name, SOURCE.format(name)).values
            changed_values = (config if name == CONFIG else values) | change
            if changed_values != values:  # otherwise the copy stays as it is, byte for byte
                write_json(temporary / name, changed_values)
        write(temporary)
        if out.exists():
            out.rmdir()  # it is empty; Windows does not rename onto an existing folder
        move(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
