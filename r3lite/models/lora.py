"""LoRA (arXiv 2106.09685): several named low-rank adapters on one frozen base, saved in PEFT's format.

Owns the adapters' weights, the switch that says which adapter is on, and the adapters' files. With no adapter on, a
model's results are those of the bare base, to the bit.
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
from r3lite.core.inherited import ADAPTER_CONFIG, adapter_folder
from r3lite.core.records import Record, shown
from r3lite.models.projections import ADAPTED, PROJECTIONS, LoraConfig, LoraLinear, Nf4Linear, Stack, Switch, of_model
from r3lite.models.stacks import side_by_side, stacked, stacks
from r3lite.models.tensor_files import opened, read_tensors, write_tensors
from r3lite.models.text_part import ADAPTER, NO_ADAPTER, TEXT_ADAPTER
from r3lite.models.weights import FINGERPRINT

WEIGHTS = "adapter_model.safetensors"
REMEDY = "Pass a run folder or a plain LoRA adapter of PEFT in safetensors format."
EVERY_LAYER = "r3lite adapts a projection in every layer or in none. Pass such an adapter of this model."
# Keys of adapter_config.json that are used here, and keys that are ignored because they do not change what the adapter
# computes: its tensors say which layers it adapts. Any other key must be unset: it belongs to a feature that r3lite
# lacks and would silently leave out.
USED_KEYS = (
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias", "init_lora_weights",
)  # fmt: skip
IGNORED_KEYS = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "exclude_modules",
    "ensure_weight_tying", "eva_config",
)  # fmt: skip
# Initializations that change the base's weights too: such an adapter does not fit the published base.
BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


def switch_of(model: nn.Module) -> Switch:
    """Returns the switch of a model's adapters; the first call makes it and stores it in `model.lora`."""
    if not hasattr(model, "lora"):
        model.lora = Switch()
    return model.lora


def set_adapter(model: nn.Module, name: str | None) -> None:
    """Switches an adapter on until another call; None switches all off."""
    _check_adapter_exists(model, name)
    switch_of(model).active = name


def use_adapter(model: nn.Module, name: str | None) -> contextlib.AbstractContextManager[None]:
    """Switches an adapter on (None: all off) within a `with` block. This takes no time: one attribute is set."""
    _check_adapter_exists(model, name)
    return switch_of(model).to(name)


@contextlib.contextmanager
def cast_once(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within a `with` block, keeps the stacks of the layers and the casts to `dtype` of the adapter that is on.

    Outside such a block every pass makes them anew. It is meant for passes between two optimizer steps: in the block no
    weight may change, and no adapter may be added or removed. Results are the same to the bit. If another adapter is
    switched on in the block, its first pass casts it layer by layer.
    """
    switch = switch_of(model)
    outer_stacks = switch.stacks
    switch.stacks = {}
    paths = [path for path, _ in _targets(model, ADAPTED)]
    try:
        model_stacks = []
        for stack_paths in stacks(paths):
            # `Stack.of` also keeps the stack in `switch.stacks`.
            model_stacks.append(Stack.of([model.get_submodule(path) for path in stack_paths]))
        _cast_together(model_stacks, dtype)
        yield
    finally:
        switch.stacks = outer_stacks


def _cast_together(model_stacks: Sequence[Stack], dtype: torch.dtype) -> None:
    """Casts the adapter in all stacks in one operation, unless it has dropout: then its layers are run one by one."""
    weights: list[Tensor] = []
    casts: list[Tensor] = []
    for stack in model_stacks:
        if not stack.on or stack.dropout or dtype == torch.float32:  # adapters are in fp32 anyway
            continue
        As = [adapter.A for adapter in stack.on]
        Bs = [adapter.B for adapter in stack.on]
        A_casts = stacked([A.shape for A in As], dtype, As[0].device)
        B_casts = stacked([B.shape for B in Bs], dtype, Bs[0].device)
        weights += As + Bs
        casts += A_casts + B_casts
        joined_A = side_by_side(A_casts)  # a view of A_casts, which get their values below
        stack.casts[dtype] = (joined_A, B_casts)
    if weights:
        torch._foreach_copy_(casts, [weight.detach() for weight in weights])


def _check_adapter_exists(model: nn.Module, name: str | None) -> None:
    configs = switch_of(model).configs
    assert name is None or name in configs, f"no adapter is named {name!r}; there are {sorted(configs)}"


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

    It is not switched on. The same seed gives the same weights on every device. A layer that joins several projections
    in one matrix is adapted if one of these is a target. Raises R3LiteError for a target that is not one of the seven
    projections.
    """
    _check_targets(targets, "lora_targets")
    config = LoraConfig(
        r=r,
        alpha=alpha,
        dropout=dropout,
        targets=of_model(targets, _projection_names(model)),
        rslora=rslora,
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, linear in _targets(model, config.targets):
        A = torch.empty(r, linear.in_features)
        nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)
        tensors[_key(path, "A")] = A
        tensors[_key(path, "B")] = torch.zeros(linear.out_features, r)
    _attach(model, name, config=config, tensors=tensors, trainable=True)


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Returns an adapter's parameters under the names that PEFT gives them, in the order of the layers."""
    _check_adapter_exists(model, name)
    parameters = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear) and name in module.lora_A:
            parameters[_key(path, "A")] = module.lora_A[name]
            parameters[_key(path, "B")] = module.lora_B[name]
    return parameters


def remove_adapter(model: nn.Module, name: str) -> None:
    """Removes an adapter; a layer that has no other adapter becomes the bare base layer again."""
    _check_adapter_exists(model, name)
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

    A base in NF4 becomes dense: a merged weight has more than the 16 values that a block in NF4 can have.
    """
    _check_adapter_exists(model, name)
    scale = switch_of(model).configs[name].scale
    adapted_layers = []
    for module in model.modules():
        if isinstance(module, LoraLinear) and name in module.lora_A:
            adapted_layers.append(module)
    for module in tqdm(adapted_layers, desc="merging", unit="", **BRIEF):
        if isinstance(module.base, Nf4Linear):
            module.base = module.base.dense()
        weight = module.base.weight
        A = module.lora_A[name]
        B = module.lora_B[name]
        weight.copy_(weight.float() + scale * (B @ A))
    remove_adapter(model, name)


def save_adapter(
    model: nn.Module,
    name: str,
    folder: str | Path,
    base_model: str,
    fingerprint: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes an adapter in PEFT's format, in `dtype` or else fp32. `base_model` is the folder or hub id of its base.

    The `fingerprint` of the base, if there is one, goes into the metadata of the weights, which PEFT ignores.
    """
    config = switch_of(model).configs[name]
    folder = Path(folder)
    metadata = {FINGERPRINT: fingerprint} if fingerprint else {}
    tensors = {}
    for key, parameter in adapter_parameters(model, name).items():
        if model.config.is_text_part:
            key = key.replace(ADAPTER, TEXT_ADAPTER, 1)
        tensors[key] = parameter.to(dtype or parameter.dtype)
    write_tensors(folder / WEIGHTS, tensors, metadata)
    record = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.r,
        "target_modules": sorted(config.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.rslora,
    }
    if model.config.is_text_part:
        record["exclude_modules"] = NO_ADAPTER
    write_json(folder / ADAPTER_CONFIG, record)


def load_adapter(
    model: nn.Module,
    name: str,
    folder: str | Path,
    trainable: bool,
) -> None:
    """Adds the adapter in a folder in PEFT's format, or in the `adapter/` of a run folder; does not switch it on.

    Raises R3LiteError, naming the key or the tensor, if the adapter uses a feature that r3lite lacks or does not fit
    the model.
    """
    folder = adapter_folder(folder)
    record = read_record(folder / ADAPTER_CONFIG, REMEDY)
    _check_supported(record)
    tensors = {}
    for key, tensor in read_tensors(folder / WEIGHTS, REMEDY).items():
        tensors[key.replace(TEXT_ADAPTER, ADAPTER, 1)] = tensor
    config = _parse_config(record, tensors)
    _check_layers(record, model, tensors)
    shapes = _shapes(model, config)
    missing = shapes.keys() - tensors
    unexpected = tensors.keys() - shapes
    if missing or unexpected:
        remedy = f"It adapts {', '.join(config.targets) or 'no projection'}. {EVERY_LAYER}"
        if missing:
            raise R3LiteError(f"{folder / WEIGHTS} lacks the tensor {min(missing)}", remedy, code="adapter-keys")
        raise R3LiteError(
            f"{folder / WEIGHTS} has the unexpected tensor {min(unexpected)}", remedy, code="adapter-keys"
        )
    for key, shape in shapes.items():
        tensor = tensors[key]
        if tuple(tensor.shape) != shape:
            raise R3LiteError(
                f"{folder / WEIGHTS}: {key} has shape {list(tensor.shape)}, not {list(shape)}",
                "Pass an adapter of this model, with its own adapter_config.json.",
                code="adapter-shape",
            )
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise R3LiteError(
                f"{folder / WEIGHTS}: {key} has values that are not finite floats", REMEDY, code="adapter-not-finite"
            )
    _attach(model, name, config=config, tensors=tensors, trainable=trainable)


def _shapes(model: nn.Module, config: LoraConfig) -> dict[str, tuple[int, int]]:
    """Returns the shapes that the tensors of an adapter of the model must have, by PEFT's names."""
    shapes = {}
    for path, linear in _targets(model, config.targets):
        shapes[_key(path, "A")] = (config.r, linear.in_features)
        shapes[_key(path, "B")] = (linear.out_features, config.r)
    return shapes


@torch.no_grad()
def add_mean(
    model: nn.Module,
    name: str,
    members: Sequence[str],
) -> None:
    """Adds a frozen adapter that is the mean of several, the `members`: it adds to a layer the mean of what they add.

    The mean of s_i B_i A_i over n adapters is s B A with A = [A_1; A_2; ...] and B = [B_1 s_1, B_2 s_2, ...] / (n s),
    so its rank is the sum of their ranks. In a layer that a member does not adapt, the member's part is zero. The mean
    has no dropout, and is not switched on.
    """
    configs = [switch_of(model).configs[member] for member in members]
    parameters = [adapter_parameters(model, member) for member in members]
    rank = sum(config.r for config in configs)
    all_targets = {target for config in configs for target in config.targets}
    targets = tuple(target for target in ADAPTED if target in all_targets)
    # Any s does, since B is divided by it: here the first member's.
    mean = LoraConfig(r=rank, alpha=configs[0].scale * rank, targets=targets)
    tensors = {}
    for path, linear in _targets(model, targets):
        A_key = _key(path, "A")
        B_key = _key(path, "B")
        A = torch.zeros(rank, linear.in_features)
        B = torch.zeros(linear.out_features, rank)
        first_rank = 0
        for config, weights in zip(configs, parameters, strict=True):
            ranks = slice(first_rank, first_rank + config.r)
            if A_key in weights:
                A[ranks] = weights[A_key]
                B[:, ranks] = weights[B_key] * (config.scale / (len(members) * mean.scale))
            first_rank += config.r
        tensors[A_key] = A
        tensors[B_key] = B
    _attach(model, name, config=mean, tensors=tensors, trainable=False)


def read_adapter_config(folder: str | Path) -> LoraConfig | None:
    """Returns the config of the adapter in a folder, or in the `adapter/` of a run folder; None if there is none."""
    folder = adapter_folder(folder)
    if not (folder / ADAPTER_CONFIG).exists():
        return None
    record = read_record(folder / ADAPTER_CONFIG, REMEDY)
    _check_supported(record)
    with opened(folder / WEIGHTS, REMEDY) as file:
        return _parse_config(record, file.keys())


def read_base(folder: str | Path) -> tuple[str, str | None]:
    """Returns the name and the fingerprint (None: not recorded) of the base that an adapter was trained on."""
    candidates = (Path(folder), Path(folder, "model"))
    models = [candidate for candidate in candidates if (candidate / "config.json").is_file()]
    if models and not (adapter_folder(folder) / ADAPTER_CONFIG).is_file():
        raise R3LiteError(
            f"{folder} has a model, not an adapter", f"Pass --model {models[0]}.", code="model-not-adapter"
        )
    folder = adapter_folder(folder)
    record = read_record(folder / ADAPTER_CONFIG, REMEDY)
    name = record.text("base_model_name_or_path", "", blank=True)
    with opened(folder / WEIGHTS, REMEDY) as file:
        metadata = file.metadata() or {}
    return name, metadata.get(FINGERPRINT)


def _check_supported(record: Record) -> None:
    """Raises R3LiteError, naming the key, if an `adapter_config.json` has something that is not supported."""
    record.choice("peft_type", ("LORA",))
    record.choice("bias", ("none",), "none")
    init = record.values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING):
        raise record.error(f"init_lora_weights is {init!r}, which also changes the base")
    for key, value in record.values.items():
        if value and key not in USED_KEYS and key not in IGNORED_KEYS:
            raise record.error(f"{key} is {shown(value)}, which r3lite does not support")
    _named_targets(record)


def _named_targets(record: Record) -> tuple[str, ...]:
    """Returns the names in `target_modules`; () if it is a text, which PEFT takes as a pattern of paths.

    Raises R3LiteError for an empty list: PEFT accepts such an adapter in silence, and its logits are wrong.
    """
    if isinstance(record.values.get("target_modules"), str):
        return ()
    names = record.texts("target_modules")
    if not names:
        raise record.error("target_modules is empty")
    return names


def _parse_config(record: Record, tensors: Iterable[str]) -> LoraConfig:
    """Reads rank and scale from an `adapter_config.json`, the projections from the names of the adapter's tensors.

    The projections are not read from the config, where PEFT has many ways to name layers: names, whole paths, a
    pattern, numbers of layers, or names of layers to leave out.
    """
    dropout = record.number("lora_dropout", 0.0, low=0)
    if dropout >= 1:
        raise record.wrong("lora_dropout", "less than 1")
    adapted = {_path_of(key).rpartition(".")[2] for key in tensors}
    return LoraConfig(
        r=record.whole("r", low=1, high=1 << 20),
        alpha=record.number("lora_alpha", low=0, high=1e6, above=True),
        dropout=dropout,
        targets=tuple(name for name in ADAPTED if name in adapted),
        rslora=record.flag("use_rslora", False),
    )


def _check_layers(
    record: Record,
    model: nn.Module,
    tensors: Iterable[str],
) -> None:
    """Raises R3LiteError if `target_modules` names layers of the model that no tensor adapts: the file may be cut."""
    if record.values.get("exclude_modules") or record.values.get("layers_to_transform"):
        return  # the adapter may leave out a layer that is named
    adapted = {_path_of(key) for key in tensors}
    paths = [path for path, _ in model.named_modules()]
    for name in _named_targets(record):
        if _is_named(name, paths) and not _is_named(name, adapted):
            raise record.error(f"target_modules has {name}, but {WEIGHTS} has no tensor of it")


def _is_named(name: str, paths: Iterable[str]) -> bool:
    """Returns True if `name`, an entry of `target_modules`, means one of the layers at `paths`, as PEFT compares."""
    return any(path == name or path.endswith(f".{name}") for path in paths)


def _check_targets(targets: Sequence[str], where: str) -> None:
    unknown = [target for target in targets if target not in PROJECTIONS]
    if unknown or not targets:
        wrong = unknown[0] if unknown else "nothing"
        raise R3LiteError(f"{where} has {wrong}", f"Use {', '.join(PROJECTIONS)}.", code="adapter-config")


def _targets(model: nn.Module, targets: Sequence[str]) -> list[tuple[str, nn.Linear | Nf4Linear]]:
    """Returns (path, base layer) of every projection named in `targets`."""
    layers = []
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in targets:
            base = module.base if isinstance(module, LoraLinear) else module
            layers.append((path, base))
    return layers


def _projection_names(model: nn.Module) -> set[str]:
    """Returns the names of the layers that may have an adapter."""
    return {path.rpartition(".")[2] for path, _ in _targets(model, ADAPTED)}


def _key(path: str, side: str) -> str:
    """Returns the name in PEFT of the tensor A or B (`side`) that adapts the layer at `path`."""
    return f"base_model.model.{path}.lora_{side}.weight"


def _path_of(key: str) -> str:
    """Returns the path of the layer that a tensor adapts, from the tensor's name in PEFT."""
    return key.removeprefix("base_model.model.").partition(".lora_")[0]


def _attach(
    model: nn.Module,
    name: str,
    config: LoraConfig,
    tensors: dict[str, Tensor],
    trainable: bool,
) -> None:
    """Puts an adapter with these tensors, named as in PEFT, on the layers that it adapts.

    The A of layers that read the same x lie one after another in memory, see models/stacks.py.
    """
    switch = switch_of(model)
    assert name not in switch.configs, f"an adapter named {name!r} already exists"
    bases = dict(_targets(model, config.targets))
    for paths in stacks(bases):
        As = [tensors[_key(path, "A")] for path in paths]
        adjacent_As = stacked([A.shape for A in As], torch.float32, bases[paths[0]].weight.device)
        for path, A, adjacent_A in zip(paths, As, adjacent_As, strict=True):
            base = bases[path]
            module = model.get_submodule(path)
            if not isinstance(module, LoraLinear):
                module = LoraLinear(base, switch)
                module.train(base.training)
                model.set_submodule(path, module)
            module.lora_A[name] = nn.Parameter(adjacent_A.copy_(A), requires_grad=trainable)
            B = tensors[_key(path, "B")].to(base.weight.device, torch.float32, copy=True)
            module.lora_B[name] = nn.Parameter(B, requires_grad=trainable)
    switch.configs[name] = config
