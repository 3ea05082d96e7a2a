"""Model folders: found or downloaded, read into a CausalLM, fingerprinted; `saving` writes them.

Owns the names and spellings of published checkpoints. All it knows of adapters is that their tensors do not belong to
a checkpoint.
"""

import contextlib
import functools
import hashlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.errors import R3LiteError
from r3lite.core.files import GGUF_POINTER, shipped, similar_path
from r3lite.models import bitsandbytes_weights, gguf_folder, hub_folder, nf4
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.models.config_file import SIZES, quant_method, read_config
from r3lite.models.gguf_files import GgufTensors
from r3lite.models.projections import Nf4Linear
from r3lite.models.stacks import StackMemory
from r3lite.models.streaming import EMBEDDING, HEAD, HostLayers, LayerStream
from r3lite.models.tensor_files import INDEX, SINGLE, SOURCE, indexed_files
from r3lite.models.tensor_files import opened as opened_whole
from r3lite.models.text_part import TextTensors, text_name

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Written by old exporters; computed here.
COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
SAMPLED_ROWS = 4  # of each tensor, for the fingerprint
OPENED_FOR = 8  # tensors that are read from a file while it is open
COMPARED_ROWS = 4096  # of head and embedding at a time
FINGERPRINT = "base_fingerprint"  # key in a file's metadata
MISMATCH = "Get config.json and the weights from the same model."


@contextlib.contextmanager
def opened(path: Path) -> Iterator[safe_open | GgufTensors | TextTensors]:
    """Opens a file of weights; of a model that also sees images, its text part."""
    with opened_whole(path) as file:
        has_other_names = any(text_name(name) != name for name in file.keys())  # noqa: SIM118 (not a dictionary)
        yield TextTensors(file) if has_other_names else file


def resolve_folder(model: str) -> Path:
    """Returns the folder of a model that is `tiny` (shipped), a folder, a GGUF file, or a hub id (downloaded)."""
    if model == "tiny":
        return shipped("checkpoints", "tiny")
    folder = Path(os.path.expanduser(model))  # ~name stays as it is if no user has that name
    if folder.is_dir():
        trained = folder / "model"  # written by sft --no-lora
        if trained.is_dir() and not (folder / "config.json").exists():
            raise R3LiteError(f"{folder} is a run folder", f"Pass --model {trained}.", code="run-not-model")
        return folder
    if folder.suffix == ".gguf":
        return gguf_folder.of(folder)
    if not HUB_ID.fullmatch(model):
        raise R3LiteError(
            f"no such model folder: {model}{similar_path(model)}",
            "Pass a folder, a hub id such as Qwen/Qwen3-0.6B, or tiny.",
            code="model-absent",
        )
    return hub_folder.download(model)


def public_name(model: str) -> tuple[str, bool]:
    """Returns the name under which a --model may be published, and whether it is a hub id.

    The name of a path is its last part.
    """
    path = Path(os.path.expanduser(model))
    if HUB_ID.fullmatch(model) and path.suffix != ".gguf" and not path.is_dir():
        return model, True
    return path.resolve().name, False


def fingerprint(folder: str | Path) -> str | None:
    """Returns a digest of a folder's base: of its sizes and of the first rows of every tensor as fp32 numbers.

    The digest does not depend on the precision that a run loads the base in, and a copy of the same numbers in a wider
    type has the same digest. A merged or rounded copy is another base, and so is a folder of bitsandbytes, because its
    stored numbers are read. A folder of `save_nf4` has the digest of its source, or None if it has none recorded.
    """
    folder = Path(folder)
    if quant_method(folder) == nf4.METHOD:
        with opened(folder / SINGLE) as file:
            return (file.metadata() or {}).get(FINGERPRINT)
    config = model_config(folder)
    names_by_file = defaultdict(list)
    for name, path in tensor_places(folder).items():
        if not _is_surplus(name, config.tie_word_embeddings):
            names_by_file[path].append(name)
    rows = {}
    for path, names in names_by_file.items():
        with opened(path) as file:
            for name in names:
                tensor_slice = file.get_slice(name)
                if tensor_slice.get_shape():
                    first_rows = tensor_slice[:SAMPLED_ROWS]
                else:
                    first_rows = file.get_tensor(name)
                rows[name] = first_rows.float().numpy().tobytes()
    sizes = [getattr(config, name) for name in (*SIZES, "rope_theta", "rms_norm_eps")]
    digest = hashlib.sha256(repr(sizes).encode())
    for name in sorted(rows):
        digest.update(name.encode() + rows[name])
    return digest.hexdigest()[:16]


def model_config(folder: str | Path) -> ModelConfig:
    """Returns the config of a folder; it is untied if the folder has a head that differs from the embedding.

    This holds even if `config.json` says that they are tied: transformers computes with such a head, too. A head that
    equals the embedding, as old exporters wrote, is not needed.
    """
    config = read_config(folder)
    places = tensor_places(Path(folder))
    if config.tie_word_embeddings and HEAD in places and EMBEDDING in places:
        return replace(config, tie_word_embeddings=_head_is_embedding(places))
    return config


def _head_is_embedding(places: dict[str, Path]) -> bool:
    """Returns True if head and embedding of a folder have the same shape and numbers."""
    with opened(places[EMBEDDING]) as embedding_file, opened(places[HEAD]) as head_file:
        embedding = embedding_file.get_slice(EMBEDDING)
        head = head_file.get_slice(HEAD)
        if embedding.get_shape() != head.get_shape():
            return False
        for first in range(0, embedding.get_shape()[0], COMPARED_ROWS):
            rows = slice(first, first + COMPARED_ROWS)
            if not torch.equal(embedding[rows].float(), head[rows].float()):
                return False
        return True


def load_model(
    folder: str | Path,
    dtype: torch.dtype,
    device: str | torch.device,
    quantize: bool = False,
    streamed: bool = False,
) -> CausalLM:
    """Loads the model of a folder, frozen and in evaluation mode, in `dtype` on `device`.

    With `quantize` the linears of the layers are in NF4. In a folder of `save_nf4` they are in NF4 anyway; a folder of
    bitsandbytes keeps in NF4 those that it has in NF4, whatever `quantize` is. Tensors are read, and quantized, one by
    one into a model that has no memory of its own yet, so that beside the finished weights only one tensor is in memory
    at a time. With `streamed` the layers stay in the host's memory, and `model.layer_stream.attach` must follow. Raises
    R3LiteError naming a tensor that is missing, unexpected or of the wrong shape or type.
    """
    folder = Path(folder)
    config = model_config(folder)
    if config.is_text_part:
        print(f"{folder.name}: only the text part is loaded, without the model's vision", file=sys.stderr)
    places = tensor_places(folder)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    # Checked before the model is made: a thousand layers take a while to lay out.
    if not any(name.startswith(last) for name in places):
        _refuse_names(folder, "missing", [f"{last}*"])
    with torch.device("meta"):
        model = CausalLM(config)
    dense_tensors = model.state_dict(keep_vars=True)
    method = quant_method(folder)
    packed_layers = _packed_layers(model, places, method)
    if method == bitsandbytes_weights.METHOD:
        _make_nf4(model, packed_layers, dtype=dtype, absmax=torch.float32)
    elif method or quantize:
        _make_nf4(model, layer_linears(model), dtype=dtype, absmax=torch.int8)
    model_tensors = model.state_dict(keep_vars=True)
    expected = model_tensors if method == nf4.METHOD else dense_tensors  # of the folder
    names = [name for name in places if name.partition(".weight.")[0] not in packed_layers]
    unexpected = []
    for name in names:
        if name not in expected and not _is_surplus(name, config.tie_word_embeddings):
            unexpected.append(name)
    _refuse_names(folder, "missing", [name for name in expected if name not in names])
    _refuse_names(folder, "unexpected", unexpected)
    memory_class = HostLayers if streamed else StackMemory
    memory = memory_class(model_tensors, dtype, torch.device(device))
    bar = tqdm(total=len(expected), desc=f"loading {folder.name}", unit="tensor", **BRIEF)
    for path, batch in _file_batches(expected, places):
        with opened(path) as file:
            for name in batch:
                layer = name.removesuffix(".weight")
                if layer in packed_layers:
                    read = functools.partial(_read_beside, folder, places, path, file)
                    shape = tuple(expected[name].shape)
                    weight = bitsandbytes_weights.unpack(path, layer, shape=shape, read=read)
                else:
                    weight = file.get_tensor(name)
                    _check_tensor(path, name, tensor=weight, expected=expected[name])
                    if name not in model_tensors:
                        weight = nf4.quantize(weight.to(device))
                # Copied, because a view of the mapped file would change, or crash, with the file.
                if name in model_tensors:
                    parts = {name: weight}
                else:
                    parts = {f"{layer}.{key}": part for key, part in vars(weight).items()}
                for part_name, part in parts.items():
                    _fill(model, part_name, value=part, memory=memory)
                del weight, part, parts  # before the next tensor is read
                bar.update()
    bar.close()
    if isinstance(memory, HostLayers):
        model.layer_stream = LayerStream(memory)
    return model.eval()


def _packed_layers(
    model: nn.Module,
    places: dict[str, Path],
    method: str | None,
) -> set[str]:
    """Returns the paths of the model's layers that a folder of bitsandbytes has in NF4; no paths for other folders."""
    if method != bitsandbytes_weights.METHOD:
        return set()
    return bitsandbytes_weights.packed_layers(places) & layer_linears(model).keys()


def _make_nf4(
    model: nn.Module,
    paths: Iterable[str],
    dtype: torch.dtype,
    absmax: torch.dtype,
) -> None:
    """Puts layers in NF4, without values yet, in the place of dense ones."""
    linears = layer_linears(model)
    for path in paths:
        weight = nf4.unfilled(linears[path].weight, absmax)
        layer = Nf4Linear(weight, linears[path].bias, dtype)
        model.set_submodule(path, layer)


def _file_batches(names: Iterable[str], places: dict[str, Path]) -> list[tuple[Path, list[str]]]:
    """Returns which tensors are read while which file is open.

    A file is closed after at most OPENED_FOR tensors, because what was read of a mapped file counts as the process's
    memory until the file is closed. A GGUF file stays open.
    """
    batches = defaultdict(list)
    for number, name in enumerate(names):
        part = 0 if places[name].name == GGUF_POINTER else number // OPENED_FOR
        batches[places[name], part].append(name)
    return [(path, batch) for (path, _), batch in batches.items()]


def _fill(
    model: nn.Module,
    name: str,
    value: Tensor,
    memory: StackMemory,
) -> None:
    """Copies a value to its place in memory, and puts the tensor there into the model."""
    tensor = memory[name].copy_(value)
    if isinstance(memory.tensors[name], nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=False)
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, tensor)


def _read_beside(
    folder: Path,
    places: dict[str, Path],
    path: Path,
    file: safe_open,
    name: str,
) -> Tensor:
    """Returns a tensor of a folder, from the open file at `path` or from another file that it is in."""
    if name not in places:
        _refuse_names(folder, "missing", [name])
    if places[name] == path:
        return file.get_tensor(name)
    with opened(places[name]) as other_file:
        return other_file.get_tensor(name)


def layer_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the dense linears of the layers, by path; the head stays dense like the embedding, and is left out."""
    linears = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path.startswith("model.layers."):
            linears[path] = module
    return linears


def _check_tensor(
    path: Path,
    name: str,
    tensor: Tensor,
    expected: Tensor,
) -> None:
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
    if isinstance(expected, nn.Parameter):
        is_right_type = tensor.is_floating_point() and tensor.element_size() >= 2
    else:
        is_right_type = tensor.dtype == expected.dtype
    if not is_right_type:
        raise R3LiteError(
            f"{path}: {name} is of type {tensor.dtype}", "Use the model's unquantized checkpoint.", code="weight-type"
        )


def tensor_places(folder: Path) -> dict[str, Path]:
    """Returns the file that holds each tensor of a folder."""
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
    """Returns the files that a folder's weights are in."""
    if (folder / GGUF_POINTER).exists():
        return [folder / GGUF_POINTER]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        cause = f"{folder} has neither {SINGLE} nor {INDEX}"
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickled:
            cause += f", only pickled weights ({pickled[0]}), which can run code when loaded"
        raise R3LiteError(cause, "Use a checkpoint in safetensors format.", code="weights-absent")
    return [folder / name for name in indexed_files(folder)]


def _is_surplus(name: str, tied: bool) -> bool:
    """Returns True for a tensor that is not needed: some exporters write computed tensors, or a head that is tied."""
    return bool(COMPUTED.fullmatch(name)) or (tied and name == HEAD)


def _refuse_names(
    folder: Path,
    fault: str,
    names: list[str],
) -> None:
    """Raises R3LiteError, naming the first tensor, if there are any `names`. `fault` is "missing" or "unexpected"."""
    if names:
        further = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise R3LiteError(f"{folder}: {fault} tensor {names[0]}{further}", MISMATCH, code="weight-names")


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the base weights, dense, under their published names; adapters that are attached are left out."""
    tensors = base_tensors(dict(model.named_parameters()))
    dense = {}
    for path, module in model.named_modules():
        if isinstance(module, Nf4Linear):
            dense[f"{path}.weight"] = nf4.dequantize([module.weight], module.dtype)
    return tensors | base_tensors(dense)


def base_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that do not belong to an adapter, under the names that they have without adapters."""
    base = {}
    for name, tensor in tensors.items():
        if ".lora_A." not in name and ".lora_B." not in name:
            base[name.replace(".base.", ".")] = tensor.detach()
    return base
