"""LoRA (arXiv 2106.09685): several named low-rank adapters on one frozen base, saved in PEFT's format.

Owns the adapters' weights, which of them is switched on, and their files. With none switched on, a model's results are
those of the bare base, to the bit.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from r3lite.core.bars import BRIEF
from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_record, write_json
from r3lite.core.records import Record, shown
from r3lite.models.projections import PROJECTIONS, LoraConfig, LoraLinear, Nf4Linear, Stack, Switch
from r3lite.models.stacks import side_by_side, stacked, stacks
from r3lite.models.tensor_files import opened, read_tensors, write_tensors
from r3lite.models.weights import FINGERPRINT

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
REMEDY = "Pass a run folder or a plain LoRA adapter of PEFT in safetensors format."
WHOLE = "r3lite adapts a projection in every layer or in none. Pass such an adapter of this model."
# Keys of adapter_config.json that are used here, and those that do not change what the adapter computes, as its tensors
# say which layers it adapts. Any other key must be unset: it belongs to a feature that r3lite lacks and would silently
# leave out.
USED = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias", "init_lora_weights")
IGNORED = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "exclude_modules",
    "ensure_weight_tying", "eva_config",
)  # fmt: skip
# Initializations that change the base's weights too: such an adapter does not fit the published base.
BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


def switch_of(model: nn.Module) -> Switch:
    """The model's switch, made when it is first asked for."""
    if not hasattr(model, "lora"):
        model.lora = Switch()
    return model.lora


def set_adapter(model: nn.Module, name: str | None) -> None:
    """Switches an adapter on for good; None switches all off."""
    _check_known(model, name)
    switch_of(model).active = name


def use_adapter(model: nn.Module, name: str | None) -> contextlib.AbstractContextManager[None]:
    """Switches an adapter on (None: all off) within a `with` block. This takes no time: one attribute is set."""
    _check_known(model, name)
    return switch_of(model).to(name)


@contextlib.contextmanager
def cast_once(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within the `with` block what layers multiply by is looked up once, and the adapter that is on is cast once.

    For passes between two optimizer steps, in which no weight changes and no adapter comes or goes. Results are the
    same to the bit. Another adapter that is switched on meanwhile is cast in its first pass, layer by layer.
    """
    switch = switch_of(model)
    before, switch.kept = switch.kept, {}
    paths = [path for path, _ in _targets(model, PROJECTIONS)]
    try:
        _cast_together([Stack.of([model.get_submodule(path) for path in some]) for some in stacks(paths)], dtype)
        yield
    finally:
        switch.kept = before


def _cast_together(together: Sequence[Stack], dtype: torch.dtype) -> None:
    """Casts the adapters of all stacks in one operation; not those with dropout, whose layers are run one by one."""
    wide, narrow = [], []
    for stack in together:
        if not stack.on or stack.dropout or dtype == torch.float32:  # adapters are in fp32 anyway
            continue
        halves = []
        for weights in ([adapter.A for adapter in stack.on], [adapter.B for adapter in stack.on]):
            halves.append(stacked([weight.shape for weight in weights], dtype, weights[0].device))
            wide, narrow = wide + weights, narrow + halves[-1]
        stack.casts[dtype] = side_by_side(halves[0]), halves[1]
    if wide:
        torch._foreach_copy_(narrow, [weight.detach() for weight in wide])


def _check_known(model: nn.Module, name: str | None) -> None:
    known = switch_of(model).configs
    assert name is None or name in known, f"no adapter is named {name!r}; there are {sorted(known)}"


def add_adapter(
    model: nn.Module,
    name: str,
    r: int,
    alpha: float,
    dropout: float = 0.0,
    targets: Sequence[str] = PROJECTIONS,
    rslora: bool = False,
    seed: int = 0,
) -> None:
    """Adds a new trainable adapter, which changes nothing yet: A is Kaiming-uniform as in peft, B is zero.

    It is not switched on. The same seed gives the same weights on every device. Raises R3LiteError for a target that
    is not one of the seven projections.
    """
    _check_targets(targets, "lora_targets")
    config = LoraConfig(r, alpha, dropout, tuple(p for p in PROJECTIONS if p in targets), rslora)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, linear in _targets(model, config.targets):
        a = torch.empty(r, linear.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        tensors[_key(path, "A")], tensors[_key(path, "B")] = a, torch.zeros(linear.out_features, r)
    _attach(model, name, config, tensors, trainable=True)


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """An adapter's parameters under the names that PEFT gives them, in the order of the layers."""
    _check_known(model, name)
    parameters = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear) and name in module.lora_A:
            parameters[_key(path, "A")], parameters[_key(path, "B")] = module.lora_A[name], module.lora_B[name]
    return parameters


def remove_adapter(model: nn.Module, name: str) -> None:
    """Removes an adapter; a layer that has none left becomes the bare base layer again."""
    _check_known(model, name)
    switch = switch_of(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, LoraLinear) and name in module.lora_A:
            del module.lora_A[name], module.lora_B[name]
            if not len(module.lora_A):
                model.set_submodule(path, module.base)
    del switch.configs[name]
    if switch.active == name:
        switch.active = None


@torch.no_grad()
def merge_adapter(model: nn.Module, name: str) -> None:
    """Adds scale * B A, computed in fp32, to the base weights, and removes the adapter.

    A base in NF4 becomes a dense one, because a merged weight does not have only 16 values a block.
    """
    _check_known(model, name)
    scale = switch_of(model).configs[name].scale
    adapted = [m for m in model.modules() if isinstance(m, LoraLinear) and name in m.lora_A]
    for module in tqdm(adapted, desc="merging", unit="", **BRIEF):
        if isinstance(module.base, Nf4Linear):
            module.base = module.base.dense()
        weight = module.base.weight
        weight.copy_(weight.float() + scale * (module.lora_B[name] @ module.lora_A[name]))
    remove_adapter(model, name)


def save_adapter(
    model: nn.Module,
    name: str,
    folder: str | Path,
    base_model: str,
    fingerprint: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes an adapter in PEFT's format, in `dtype` or as it is. `base_model` is the folder or hub id it belongs to.

    The base's fingerprint, if it has one, goes into the metadata of the weights, which PEFT ignores.
    """
    config, folder = switch_of(model).configs[name], Path(folder)
    metadata = {FINGERPRINT: fingerprint} if fingerprint else {}
    tensors = {key: tensor.to(dtype or tensor.dtype) for key, tensor in adapter_parameters(model, name).items()}
    write_tensors(folder / WEIGHTS, tensors, metadata)
    unused = {"bias": "none", "fan_in_fan_out": False, "modules_to_save": None, "use_dora": False}
    shape = {"r": config.r, "lora_alpha": config.alpha, "lora_dropout": config.dropout, "use_rslora": config.rslora}
    shape |= {"target_modules": sorted(config.targets), "base_model_name_or_path": base_model}
    kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True}
    write_json(folder / CONFIG, dict(sorted((unused | shape | kind).items())))


def load_adapter(model: nn.Module, name: str, folder: str | Path, trainable: bool) -> None:
    """Reads an adapter in PEFT's format from a folder, or from the `adapter/` of a run folder; does not switch it on.

    Raises R3LiteError, naming the key or the tensor, if it uses a feature that r3lite lacks or does not fit the model.
    """
    folder = adapter_folder(folder)
    record = read_record(folder / CONFIG, REMEDY)
    _check_supported(record)
    tensors = read_tensors(folder / WEIGHTS, REMEDY)
    config = _parse_config(record, tensors)
    _check_named(record, model, tensors)
    shapes, r = {}, config.r
    for path, linear in _targets(model, config.targets):
        shapes[_key(path, "A")], shapes[_key(path, "B")] = (r, linear.in_features), (linear.out_features, r)
    missing = shapes.keys() - tensors
    if keys := missing or tensors.keys() - shapes:
        what = "lacks the tensor" if missing else "has the unexpected tensor"
        remedy = f"It adapts {', '.join(config.targets) or 'no projection'}. {WHOLE}"
        raise R3LiteError(f"{folder / WEIGHTS} {what} {min(keys)}", remedy, code="adapter-keys")
    for key, shape in shapes.items():
        if tuple(tensors[key].shape) != shape:
            raise R3LiteError(
                f"{folder / WEIGHTS}: {key} has shape {list(tensors[key].shape)}, not {list(shape)}",
                "Pass an adapter of this model, with its own adapter_config.json.",
                code="adapter-shape",
            )
        if not tensors[key].is_floating_point() or not tensors[key].float().isfinite().all():
            raise R3LiteError(
                f"{folder / WEIGHTS}: {key} has values that are not finite floats", REMEDY, code="adapter-not-finite"
            )
    _attach(model, name, config, tensors, trainable)


@torch.no_grad()
def add_mean(model: nn.Module, name: str, others: Sequence[str]) -> None:
    """Adds the mean of other adapters as one, frozen: what it adds to a layer is the mean of what they add.

    The mean of s_i B_i A_i over n adapters is s B A with A = [A_1; A_2; ...] and B = [B_1 s_1, B_2 s_2, ...] / (n s),
    so ranks add up. Where some of them have no target, their part is zero. Its dropout is 0. It is not switched on.
    """
    configs = [switch_of(model).configs[other] for other in others]
    parameters = [adapter_parameters(model, other) for other in others]
    rank = sum(config.r for config in configs)
    targets = tuple(p for p in PROJECTIONS if any(p in config.targets for config in configs))
    mean = LoraConfig(rank, configs[0].scale * rank, targets=targets)
    tensors = {}
    for path, linear in _targets(model, targets):
        A = torch.zeros(rank, linear.in_features)
        B = torch.zeros(linear.out_features, rank)
        first = 0
        for config, parts in zip(configs, parameters, strict=True):
            rows = slice(first, first + config.r)
            if _key(path, "A") in parts:
                A[rows] = parts[_key(path, "A")]
                B[:, rows] = parts[_key(path, "B")] * (config.scale / (len(others) * mean.scale))
            first += config.r
        tensors[_key(path, "A")] = A
        tensors[_key(path, "B")] = B
    _attach(model, name, mean, tensors, trainable=False)


def read_adapter_config(folder: str | Path) -> LoraConfig | None:
    """Shape and scale of the adapter in a folder, or in the `adapter/` of a run folder; None if it has no adapter."""
    folder = adapter_folder(folder)
    if not (folder / CONFIG).exists():
        return None
    record = read_record(folder / CONFIG, REMEDY)
    _check_supported(record)
    with opened(folder / WEIGHTS, REMEDY) as file:
        return _parse_config(record, file.keys())


def read_base(folder: str | Path) -> tuple[str, str | None]:
    """Name and fingerprint of the base that an adapter was trained on; None if none is recorded."""
    models = [place for place in (Path(folder), Path(folder, "model")) if (place / "config.json").is_file()]
    if models and not (adapter_folder(folder) / CONFIG).is_file():
        raise R3LiteError(
            f"{folder} has a model, not an adapter", f"Pass --model {models[0]}.", code="model-not-adapter"
        )
    folder = adapter_folder(folder)
    name = read_record(folder / CONFIG, REMEDY).text("base_model_name_or_path", "", blank=True)
    with opened(folder / WEIGHTS, REMEDY) as file:
        return name, (file.metadata() or {}).get(FINGERPRINT)


def adapter_folder(folder: str | Path) -> Path:
    """Where the files of an adapter are: in the folder, or in the `adapter/` of a run folder or, if the run was
    interrupted, of its newest checkpoint."""
    folder = Path(folder)
    checkpoints = sorted(folder.glob("checkpoint-*/adapter"), key=lambda p: (len(p.parent.name), p.parent.name))
    places = (folder, folder / "adapter", *reversed(checkpoints))
    return next((place for place in places if (place / CONFIG).is_file()), folder)


def _check_supported(record: Record) -> None:
    """Raises R3LiteError naming what an `adapter_config.json` has that is not supported."""
    record.choice("peft_type", ("LORA",))
    record.choice("bias", ("none",), "none")
    init = record.values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING):
        raise record.error(f"init_lora_weights is {init!r}, which also changes the base")
    for key, value in record.values.items():
        if key not in USED and key not in IGNORED and value:
            raise record.error(f"{key} is {shown(value)}, which r3lite does not support")
    _named_targets(record)


def _named_targets(record: Record) -> tuple[str, ...]:
    """The names in `target_modules`: none if it is one text, a pattern that PEFT compares with paths of layers.

    PEFT takes an adapter that has none in silence, and its logits are wrong.
    """
    if isinstance(record.values.get("target_modules"), str):
        return ()
    names = record.texts("target_modules")
    if not names:
        raise record.error("target_modules is empty")
    return names


def _parse_config(record: Record, tensors: Iterable[str]) -> LoraConfig:
    """Shape and scale from an `adapter_config.json`, and the projections from the names of the adapter's tensors.

    PEFT has many ways to name layers: names, whole paths, a pattern, numbers of layers, names of others.
    """
    dropout = record.number("lora_dropout", 0.0, low=0)
    if dropout >= 1:
        raise record.wrong("lora_dropout", "less than 1")
    adapted = {_path_of(key).rpartition(".")[2] for key in tensors}
    return LoraConfig(
        r=record.whole("r", low=1, high=1 << 20),
        alpha=record.number("lora_alpha", low=0, high=1e6, above=True),
        dropout=dropout,
        targets=tuple(p for p in PROJECTIONS if p in adapted),
        rslora=record.flag("use_rslora", False),
    )


def _check_named(record: Record, model: nn.Module, tensors: Iterable[str]) -> None:
    """Raises R3LiteError if `target_modules` names a layer of the model that no tensor adapts, as of a cut file."""
    if record.values.get("exclude_modules") or record.values.get("layers_to_transform"):
        return  # which may leave it out
    adapted = {_path_of(key) for key in tensors}
    paths = [path for path, _ in model.named_modules()]
    for name in _named_targets(record):
        if _names(name, paths) and not _names(name, adapted):
            raise record.error(f"target_modules has {name}, but {WEIGHTS} has no tensor of it")


def _names(name: str, paths: Iterable[str]) -> bool:
    """Whether an entry of `target_modules` means one of the layers at `paths`, as PEFT compares them."""
    return any(path == name or path.endswith(f".{name}") for path in paths)


def _check_targets(targets: Sequence[str], where: str) -> None:
    unknown = [t for t in targets if t not in PROJECTIONS]
    if unknown or not targets:
        raise R3LiteError(
            f"{where} has {unknown[0] if unknown else 'nothing'}",
            f"Use {', '.join(PROJECTIONS)}.",
            code="adapter-config",
        )


def _targets(model: nn.Module, targets: Sequence[str]) -> list[tuple[str, nn.Linear | Nf4Linear]]:
    """Path and base layer of every projection named in `targets`."""
    found = []
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in targets:
            found.append((path, module.base if isinstance(module, LoraLinear) else module))
    return found


def _key(path: str, side: str) -> str:
    return f"base_model.model.{path}.lora_{side}.weight"


def _path_of(key: str) -> str:
    """The path of the layer that a tensor of PEFT adapts."""
    return key.removeprefix("base_model.model.").partition(".lora_")[0]


def _attach(model: nn.Module, name: str, config: LoraConfig, tensors: dict[str, Tensor], trainable: bool) -> None:
    switch = switch_of(model)
    assert name not in switch.configs, f"an adapter named {name!r} already exists"
    bases = dict(_targets(model, config.targets))
    for paths in stacks(bases):
        As = [tensors[_key(path, "A")] for path in paths]
        together = stacked([A.shape for A in As], torch.float32, bases[paths[0]].weight.device)
        for path, A, place in zip(paths, As, together, strict=True):
            base, module = bases[path], model.get_submodule(path)
            if not isinstance(module, LoraLinear):
                module = LoraLinear(base, switch)
                module.train(base.training)
                model.set_submodule(path, module)
            module.lora_A[name] = nn.Parameter(place.copy_(A), requires_grad=trainable)
            B = tensors[_key(path, "B")].to(base.weight.device, torch.float32, copy=True)
            module.lora_B[name] = nn.Parameter(B, requires_grad=trainable)
    switch.configs[name] = config
