"""Model folders: found or downloaded, read into a Qwen2 (`config.json` and safetensors), written merged or in NF4.

Owns the names and spellings of published checkpoints. All it knows of adapters is that their tensors do not belong to
a checkpoint.
"""

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from r3lite.config import shipped
from r3lite.errors import R3LiteError
from r3lite.files import write_json
from r3lite.models import nf4
from r3lite.models.nf4 import Nf4Linear
from r3lite.models.qwen2 import Qwen2, Qwen2Config

HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")
VERBATIM = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Written by old exporters; computed here.
COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def resolve_folder(model: str) -> Path:
    """The folder of a model: `tiny` (the shipped checkpoint), a folder, or a hub id, downloaded unless it is cached."""
    if model == "tiny":
        return shipped("checkpoints", "tiny")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
        raise R3LiteError(
            f"there is no model folder {model}", "Name a folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or tiny."
        )
    import huggingface_hub
    from huggingface_hub.errors import HTTPError  # that of the HTTP library which it uses

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except (HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise R3LiteError(
            f"the model {model} is neither a folder nor cached, and could not be downloaded: {reason}",
            "Check the name and the connection, or put the model's config.json, tokenizer.json, tokenizer_config.json "
            "and *.safetensors into a folder and pass --model FOLDER. --model tiny needs no download.",
        ) from error


def read_config(folder: str | Path) -> Qwen2Config:
    """Sizes from a folder's `config.json`, as transformers 4 or 5 spells it; R3LiteError names what is unsupported."""
    path = Path(folder) / "config.json"
    raw = _read_json(path)
    # transformers 5 has `rope_parameters`; 4 has `rope_theta` and, if it is scaled, `rope_scaling`.
    rope = (raw.get("rope_parameters") or {}) | (raw.get("rope_scaling") or {})
    _check_supported(raw, rope, path)
    config = Qwen2Config(
        **{name: _size(raw, name, path) for name in SIZES},
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
        max_position_embeddings=int(raw.get("max_position_embeddings", 32_768)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )
    if config.hidden_size % config.num_attention_heads or config.num_attention_heads % config.num_key_value_heads:
        raise R3LiteError(
            f"{path}: hidden_size {config.hidden_size}, num_attention_heads {config.num_attention_heads} and "
            f"num_key_value_heads {config.num_key_value_heads} do not divide one another"
        )
    if raw.get("head_dim") not in (None, config.head_dim):
        raise R3LiteError(
            f"{path}: head_dim is {raw['head_dim']}, not hidden_size / num_attention_heads = {config.head_dim}",
            "Such models are not supported.",
        )
    return config


def _check_supported(raw: dict, rope: dict, path: Path) -> None:
    """Raises R3LiteError if a config asks for something that `Qwen2` does not compute."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    sliding = raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ())
    for wrong, what, remedy in (
        (
            raw.get("model_type") != "qwen2",
            f"model_type is {raw.get('model_type')!r}",
            "r3lite trains Qwen2 and Qwen2.5 models, whose model_type is qwen2.",
        ),
        (
            (raw.get("quantization_config") or nf4.LAYOUT) != nf4.LAYOUT,
            f"quantization_config is {raw.get('quantization_config')}",
            "Use the model's unquantized checkpoint; of quantized ones only those are read that r3lite writes.",
        ),
        (
            sliding,
            "sliding-window attention is switched on (use_sliding_window, layer_types)",
            "r3lite computes full attention only; switch it off if your rows are shorter than the window.",
        ),
        (
            raw.get("hidden_act", "silu") != "silu",
            f"hidden_act is {raw.get('hidden_act')!r}",
            "Only silu is supported.",
        ),
        (
            kind != "default",
            f"rope scaling of type {kind!r} is set (rope_scaling, rope_parameters)",
            "Remove it to train within the length that the model was made for.",
        ),
    ):
        if wrong:
            raise R3LiteError(f"{path}: {what}", remedy)


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise R3LiteError(f"{path} cannot be read: {error}", f"Copy {path.name} from the model's source.") from error
    if not isinstance(value, dict):
        raise R3LiteError(f"{path} is not a JSON object", f"Copy {path.name} from the model's source.")
    return value


def _size(raw: dict, name: str, path: Path) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise R3LiteError(
            f"{path}: {name} is {value!r}, not a positive whole number",
            "A model folder needs the config.json of its source.",
        )
    return value


def load_qwen2(folder: str | Path, dtype: torch.dtype, device: str | torch.device, quantize: bool = False) -> Qwen2:
    """The model of a folder, frozen and in evaluation mode, in `dtype` on `device`.

    With `quantize` the linears of the layers are in NF4; those of a folder of `save_nf4` are so anyway. Tensors are
    read, and quantized, one by one into a model that has no memory of its own yet, so that beside the finished weights
    only one tensor is in memory at a time. Raises R3LiteError naming a tensor that is missing, unexpected or of the
    wrong shape or type.
    """
    folder = Path(folder)
    with torch.device("meta"):
        model = Qwen2(read_config(folder))
    linears = _layer_linears(model)
    if is_nf4(folder):
        for path, linear in linears.items():
            _set(model, path, Nf4Linear(nf4.quantize(linear.weight), linear.bias, dtype))
        quantize = False
    expected = model.state_dict(keep_vars=True)
    places = _tensor_places(folder)
    _check_names(folder, expected.keys(), places.keys(), model.config.tie_word_embeddings)
    by_file = defaultdict(list)
    for name in expected:
        by_file[places[name]].append(name)
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                tensor = file.get_tensor(name)
                _check_tensor(path, name, tensor, expected[name])
                linear, _, kind = name.rpartition(".")
                # Copied, because a view of the mapped file would change, or crash, with the file.
                if quantize and linear in linears and kind == "weight":
                    bias = model.get_submodule(linear).bias
                    _set(model, linear, Nf4Linear(nf4.quantize(tensor.to(device)), bias, dtype))
                elif isinstance(expected[name], nn.Parameter):
                    _set(model, name, nn.Parameter(tensor.to(device, dtype, copy=True), requires_grad=False))
                else:
                    _set(model, name, tensor.to(device, copy=True))
                del tensor
    return model.eval()


def is_nf4(folder: str | Path) -> bool:
    """Whether a folder was written by `save_nf4`."""
    return bool(_read_json(Path(folder) / "config.json").get("quantization_config"))


def _layer_linears(model: nn.Module) -> dict[str, nn.Linear]:
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
    if tensor.shape != expected.shape:
        raise R3LiteError(
            f"{path}: {name} has the shape {list(tensor.shape)}, config.json asks for {list(expected.shape)}",
            "config.json and the weights are not of the same model.",
        )
    wide = tensor.is_floating_point() and tensor.element_size() >= 2
    if not (wide if isinstance(expected, nn.Parameter) else tensor.dtype == expected.dtype):
        raise R3LiteError(f"{path}: {name} is of type {tensor.dtype}", "Use the model's unquantized checkpoint.")


def _set(model: nn.Module, name: str, value: Tensor | nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, value)


def _open(path: Path):
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise R3LiteError(
            f"{path} cannot be read: {error}", "The download may be incomplete: fetch the file again."
        ) from error


def _tensor_places(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of a folder."""
    if (folder / SINGLE).is_file():
        shards = [folder / SINGLE]
    elif (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise R3LiteError(f"{folder / INDEX} has no weight_map", "Copy it from the model's source.")
        shards = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        cause = f"{folder} has neither {SINGLE} nor {INDEX}"
        cause += f", only pickled weights ({pickled[0]}), which can run code when they are read" if pickled else ""
        raise R3LiteError(cause, "Use a checkpoint in safetensors format.")
    places = {}
    for path in shards:
        with _open(path) as file:
            places |= dict.fromkeys(file.keys(), path)
    return places


def _check_names(folder: Path, expected, found, tied: bool) -> None:
    missing = [name for name in expected if name not in found]
    # A tied model's head is its embedding; some exporters write it nevertheless.
    unexpected = [
        n for n in found if n not in expected and not COMPUTED.fullmatch(n) and not (tied and n == "lm_head.weight")
    ]
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise R3LiteError(
                f"{folder}: {what} tensor {names[0]}{more}", "config.json and the weights are not of the same model."
            )


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The base weights, dense, under their published names and without adapters, also while adapters are attached."""
    tensors = _base_tensors(dict(model.named_parameters()))
    dense = {
        f"{path}.weight": nf4.dequantize(module.weight, module.dtype)
        for path, module in model.named_modules()
        if isinstance(module, Nf4Linear)
    }
    return tensors | _base_tensors(dense)


def _base_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that do not belong to an adapter, under the names that they have without adapters."""
    return {
        name.replace(".base.", "."): tensor.detach()
        for name, tensor in tensors.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def save_merged(model: Qwen2, source_folder: str | Path, out_folder: str | Path) -> None:
    """Writes the base weights as a checkpoint that transformers reads, with config and tokenizer files of the source.

    An adapter to be included is merged before (`lora.merge_adapter`); those still attached are left out. NF4 weights
    are written dense. The folder appears whole or not at all. Raises R3LiteError if it exists and is not empty.
    """
    _write_folder(Path(source_folder), Path(out_folder), lambda: checkpoint_tensors(model), {})


def save_nf4(model: Qwen2, source_folder: str | Path, out_folder: str | Path) -> None:
    """Writes a model loaded with `quantize` in the layout of `models.nf4`, so that it need not be quantized again.

    Adapters are left out. The folder has the same files as that of `save_merged`, and appears in the same way.
    """
    assert not _layer_linears(model), "a layer has dense linears"
    extra = {"quantization_config": nf4.LAYOUT}
    _write_folder(Path(source_folder), Path(out_folder), lambda: _base_tensors(model.state_dict()), extra)


def _write_folder(source: Path, out: Path, tensors: Callable[[], dict[str, Tensor]], extra: dict) -> None:
    """Writes a model folder: the source's files, and the tensors.

    In `config.json` the keys of `extra` take the place of the source's quantization.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise R3LiteError(f"{out} is there already", "Name a new folder for the checkpoint.")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        temporary.mkdir()
        for name in VERBATIM:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
        config = _read_json(source / "config.json")
        wanted = {key: value for key, value in config.items() if key != "quantization_config"} | extra
        if wanted != config:
            write_json(temporary / "config.json", wanted)
        write_tensors(temporary / SINGLE, tensors())
        if out.exists():
            out.rmdir()  # empty; Windows renames onto nothing
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_tensors(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file via a temporary one beside it, so that a crash leaves the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, temporary, metadata={"format": "pt"})
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # safetensors makes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
