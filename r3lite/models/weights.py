"""Model folders: found or downloaded, read into a CausalLM, fingerprinted; `saving` writes them.

Owns the names and spellings of published checkpoints. All it knows of adapters is that their tensors do not belong to
a checkpoint.
"""

import contextlib
import functools
import hashlib
import os
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.errors import R3LiteError
from r3lite.core.files import GGUF_POINTER, shipped
from r3lite.models import bitsandbytes_weights, gguf_folder, hub_folder, nf4
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.models.config_file import SIZES, quant_method, read_config
from r3lite.models.projections import Nf4Linear
from r3lite.models.stacks import StackMemory
from r3lite.models.streaming import EMBEDDING, HEAD, HostLayers, LayerStream
from r3lite.models.tensor_files import INDEX, SINGLE, SOURCE, indexed_files, opened

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Written by old exporters; computed here.
COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
SAMPLED_ROWS = 4  # of each tensor, for the fingerprint
OPENED_FOR = 8  # tensors that are read from a file while it is open
COMPARED_ROWS = 4096  # of head and embedding at a time
FINGERPRINT = "base_fingerprint"  # key in a file's metadata
MISMATCH = "Get config.json and the weights from the same model."


def resolve_folder(model: str) -> Path:
    """The folder of a model: of `tiny` (the shipped checkpoint), a folder, a GGUF file, or a hub id (downloaded)."""
    if model == "tiny":
        return shipped("checkpoints", "tiny")
    folder = Path(os.path.expanduser(model))  # which leaves ~name of nobody here as it is
    if folder.is_dir():
        trained = folder / "model"  # of sft --no-lora
        if trained.is_dir() and not (folder / "config.json").exists():
            raise R3LiteError(f"{folder} is a run folder", f"Pass --model {trained}.", code="run-not-model")
        return folder
    if folder.suffix == ".gguf":
        return gguf_folder.of(folder)
    if not HUB_ID.fullmatch(model):
        raise R3LiteError(
            f"no such model folder: {model}",
            "Pass a folder, a hub id such as Qwen/Qwen3-0.6B, or tiny.",
            code="model-absent",
        )
    return hub_folder.download(model)


def public_name(model: str) -> tuple[str, bool]:
    """What others may read of a --model, and whether it is a hub id; of a path here only the last part."""
    path = Path(os.path.expanduser(model))
    if HUB_ID.fullmatch(model) and path.suffix != ".gguf" and not path.is_dir():
        return model, True
    return path.resolve().name, False


def fingerprint(folder: str | Path) -> str | None:
    """A digest of a base: of its sizes and of the first rows of every tensor as fp32 numbers, read from its folder.

    It does not depend on the precision that a run loads the base in, and a copy of the same numbers in a wider type
    has the same. A merged or rounded copy is another base, and so is a folder of bitsandbytes, of which the stored
    numbers are read. A folder of `save_nf4` has that of its source, or None if it was written before fingerprints were.
    """
    folder = Path(folder)
    if quant_method(folder) == nf4.METHOD:
        with opened(folder / SINGLE) as file:
            return (file.metadata() or {}).get(FINGERPRINT)
    config, places, by_file = model_config(folder), tensor_places(folder), defaultdict(list)
    for name, path in places.items():
        if not _is_surplus(name, config.tie_word_embeddings):
            by_file[path].append(name)
    rows = {}
    for path, names in by_file.items():
        with opened(path) as file:
            for name in names:
                piece = file.get_slice(name)
                first = piece[:SAMPLED_ROWS] if piece.get_shape() else file.get_tensor(name)
                rows[name] = first.float().numpy().tobytes()
    digest = hashlib.sha256(repr([getattr(config, name) for name in (*SIZES, "rope_theta", "rms_norm_eps")]).encode())
    for name in sorted(rows):
        digest.update(name.encode() + rows[name])
    return digest.hexdigest()[:16]


def model_config(folder: str | Path) -> ModelConfig:
    """The sizes of `config.json`; if embedding and head are tied there and the weights have another head, untied.

    transformers computes with that head, too. One that equals the embedding, as old exporters wrote, is not needed.
    """
    config, places = read_config(folder), tensor_places(Path(folder))
    if config.tie_word_embeddings and HEAD in places and EMBEDDING in places:
        return replace(config, tie_word_embeddings=_are_equal(places, EMBEDDING, HEAD))
    return config


def _are_equal(places: dict[str, Path], *names: str) -> bool:
    """Whether two tensors of a folder have the same shape and numbers."""
    with contextlib.ExitStack() as files:
        one, other = (files.enter_context(opened(places[name])).get_slice(name) for name in names)
        rows = one.get_shape()[0]
        return one.get_shape() == other.get_shape() and all(
            torch.equal(one[i : i + COMPARED_ROWS].float(), other[i : i + COMPARED_ROWS].float())
            for i in range(0, rows, COMPARED_ROWS)
        )


def load_model(
    folder: str | Path,
    dtype: torch.dtype,
    device: str | torch.device,
    quantize: bool = False,
    streamed: bool = False,
) -> CausalLM:
    """The model of a folder, frozen and in evaluation mode, in `dtype` on `device`.

    With `quantize` the linears of the layers are in NF4; those of a folder of `save_nf4` are so anyway, and of one of
    bitsandbytes those that it has in NF4. Tensors are read, and quantized, one by one into a model that has no memory
    of its own yet, so that beside the finished weights only one tensor is in memory at a time. With `streamed` the
    layers stay in the host's memory, and `model.stream.attach` must follow. Raises R3LiteError naming a tensor that is
    missing, unexpected or of the wrong shape or type.
    """
    folder = Path(folder)
    config, places = model_config(folder), tensor_places(folder)
    last = f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight"
    _refuse_names(folder, "missing", [name for name in [last] if name not in places])  # a thousand layers take a while
    with torch.device("meta"):
        model = CausalLM(config)
    dense, linears, method = model.state_dict(keep_vars=True), layer_linears(model), quant_method(folder)
    is_theirs = method == bitsandbytes_weights.METHOD
    theirs = bitsandbytes_weights.packed_layers(places) & linears.keys() if is_theirs else set()
    for path in theirs if is_theirs else linears if method or quantize else ():
        unfilled = nf4.unfilled(linears[path].weight, torch.float32 if path in theirs else torch.int8)
        model.set_submodule(path, Nf4Linear(unfilled, linears[path].bias, dtype))
    filled = model.state_dict(keep_vars=True)
    expected = filled if method == nf4.METHOD else dense  # of the folder
    found = [name for name in places if name.partition(".weight.")[0] not in theirs]
    unexpected = [n for n in found if n not in expected and not _is_surplus(n, config.tie_word_embeddings)]
    _refuse_names(folder, "missing", [name for name in expected if name not in found])
    _refuse_names(folder, "unexpected", unexpected)
    memory = (HostLayers if streamed else StackMemory)(filled, dtype, torch.device(device))
    by_file = defaultdict(list)
    for number, name in enumerate(expected):
        # A file is closed now and then: until then, what was read of a mapped one counts as the process's memory.
        part = 0 if places[name].name == GGUF_POINTER else number // OPENED_FOR
        by_file[places[name], part].append(name)
    bar = tqdm(total=len(expected), desc=f"loading {folder.name}", unit="tensor", **BRIEF)
    for (path, _), names in by_file.items():
        with opened(path) as file:
            for name in names:
                layer = name.removesuffix(".weight")
                if layer in theirs:
                    read = functools.partial(_read_beside, folder, places, path, file)
                    weight = bitsandbytes_weights.unpack(path, layer, tuple(expected[name].shape), read)
                else:
                    weight = file.get_tensor(name)
                    _check_tensor(path, name, weight, expected[name])
                    weight = weight if name in filled else nf4.quantize(weight.to(device))
                # Copied, because a view of the mapped file would change, or crash, with the file.
                parts = {name: weight} if name in filled else {f"{layer}.{k}": v for k, v in vars(weight).items()}
                while parts:
                    _fill(model, *parts.popitem(), memory)
                del weight
                bar.update()
    bar.close()
    if isinstance(memory, HostLayers):
        model.stream = LayerStream(memory)
    return model.eval()


def _fill(model: nn.Module, name: str, value: Tensor, memory: StackMemory) -> None:
    """Gives the model a tensor that is in its place in memory."""
    tensor = memory[name].copy_(value)
    if isinstance(memory.tensors[name], nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=False)
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, tensor)


def _read_beside(folder: Path, places: dict[str, Path], path: Path, file: safe_open, name: str) -> Tensor:
    """A tensor of a folder, of the open file at `path` or of another that it is in."""
    _refuse_names(folder, "missing", [name] if name not in places else [])
    if places[name] == path:
        return file.get_tensor(name)
    with opened(places[name]) as other:
        return other.get_tensor(name)


def layer_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The dense linears of the layers, by path; the head is not one of them and stays dense like the embedding."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.startswith("model.layers.")
    }


def _check_tensor(path: Path, name: str, tensor: Tensor, expected: Tensor) -> None:
    """Raises R3LiteError if a tensor has the wrong shape or type.

    A parameter may be of any float type of 16 bits or more, a buffer only of the expected type.
    """
    # Folders written when the mean of a weight's absmax was one number are read as well.
    if tensor.shape != expected.shape and not (tensor.dim() == 0 and name.endswith(".absmax_mean")):
        raise R3LiteError(
            f"{path}: {name} has shape {list(tensor.shape)}, but config.json needs {list(expected.shape)}",
            MISMATCH,
            code="weight-shape",
        )
    wide = tensor.is_floating_point() and tensor.element_size() >= 2
    if not (wide if isinstance(expected, nn.Parameter) else tensor.dtype == expected.dtype):
        raise R3LiteError(
            f"{path}: {name} is of type {tensor.dtype}", "Use the model's unquantized checkpoint.", code="weight-type"
        )


def tensor_places(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of a folder."""
    places = {}
    for path in _shards(folder):
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                if name in places:
                    raise R3LiteError(
                        f"{path}: {name} is also in {places[name].name}",
                        SOURCE.format("the shards"),
                        code="weight-twice",
                    )
                places[name] = path
    return places


def _shards(folder: Path) -> list[Path]:
    """The files that a folder's weights are in."""
    if (folder / GGUF_POINTER).exists():
        return [folder / GGUF_POINTER]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        cause = f"{folder} has neither {SINGLE} nor {INDEX}"
        cause += f", only pickled weights ({pickled[0]}), which can run code when loaded" if pickled else ""
        raise R3LiteError(cause, "Use a checkpoint in safetensors format.", code="weights-absent")
    return [folder / name for name in indexed_files(folder)]


def _is_surplus(name: str, tied: bool) -> bool:
    """Whether a tensor is not needed: some exporters write computed ones, and a head that is the embedding."""
    return bool(COMPUTED.fullmatch(name)) or (tied and name == HEAD)


def _refuse_names(folder: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise R3LiteError(f"{folder}: {what} tensor {names[0]}{more}", MISMATCH, code="weight-names")


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The base weights, dense, under their published names and without adapters, also while adapters are attached."""
    tensors = base_tensors(dict(model.named_parameters()))
    dense = {
        f"{path}.weight": nf4.dequantize([module.weight], module.dtype)
        for path, module in model.named_modules()
        if isinstance(module, Nf4Linear)
    }
    return tensors | base_tensors(dense)


def base_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that do not belong to an adapter, under the names that they have without adapters."""
    return {
        name.replace(".base.", "."): tensor.detach()
        for name, tensor in tensors.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }
