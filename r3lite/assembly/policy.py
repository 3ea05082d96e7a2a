"""Loads a policy, ready to run: the base model as its memory plan says, with adapters, optimizer and critic if needed.

All commands that run a policy, such as `sft`, `ppo`, `evaluate` and `ask`, load it here.
"""

import hashlib
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from r3lite.core.cache import CLEAR, size_of
from r3lite.core.config import flag, flat
from r3lite.core.errors import R3LiteError
from r3lite.core.files import naming_gguf, sole_writer, sweep
from r3lite.core.grant import Grant
from r3lite.core.inherited import ADAPTER, MODEL, adapter_folder, settings_of
from r3lite.datasets.sources import has_steps
from r3lite.devices.live_tensors import MIB
from r3lite.devices.precision import Precision, resolve_device, resolve_dtype
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.devices.speed import warn_of_slow_fp16
from r3lite.memory.layer_tensors import projection_names
from r3lite.memory.plan import Plan, announce, enforce
from r3lite.memory.shrinking import ShrinkingGrant, memory_plan_of
from r3lite.models import activation_checkpointing, compiled, lora, saving, weights
from r3lite.models.causal_lm import CausalLM, ModelConfig
from r3lite.models.config_file import is_nf4, read_config
from r3lite.models.full_tuning import FullTuning
from r3lite.models.projections import of_model
from r3lite.models.value_head import ValueHead
from r3lite.settings import LoraSettings, MemorySettings, ModelSettings, OptimizerSettings
from r3lite.settings.common import CommandConfig
from r3lite.training import optim
from r3lite.training.adamw8 import AdamW8
from r3lite.training.earlier_run import result_of_run, sft_length
from r3lite.training.state import Stateful, TrainState

# Names of the adapters.
POLICY = "policy"
REFERENCE = "reference"


@dataclass(frozen=True)
class Training:
    """The settings of training an adapter or all weights, and a value head if the algorithm has a critic."""

    lora: LoraSettings  # shape of the adapter, if --adapter names none to start from
    optimizer: OptimizerSettings
    seed: int
    # Names of the settings that the user has set. Settings of `lora` among them must be those of --adapter.
    set_by_user: Collection[str] = ()
    keep_reference: bool = False  # the adapter to start from is loaded a second time, frozen, as the reference
    critic_learning_rate: float | None = None  # None: no critic
    ranks: Ranks = ALONE  # the processes that train together


@dataclass(frozen=True)
class Policy:
    """A model with its adapter switched on, the memory figures of the run, and an optimizer if the model is trained."""

    model: CausalLM
    precision: Precision
    grant: Grant
    optimizer: torch.optim.AdamW | AdamW8 | None = None
    reference: str | None = None  # name of the adapter that the policy is compared with; None: the base without adapter
    critic: ValueHead | None = None
    fingerprint: str | None = None  # of the base, which is saved with the adapter
    ranks: Ranks = ALONE
    full_tuning: FullTuning | None = None  # None: an adapter is trained
    folder: Path | None = None  # of the base; None: not needed, as only an adapter is saved

    @property
    def plan(self) -> Plan:
        """The memory plan of a policy that is trained."""
        return memory_plan_of(self.grant)

    def train_state(
        self,
        settings: OptimizerSettings,
        base_model: str,
        data: str,
        inputs: dict[str, str],
        facts: dict,
        **parts: Stateful,
    ) -> TrainState:
        """Returns the state that the run's checkpoints hold, with `parts` in it.

        `data` is the fingerprint of the training data, `inputs` has those of everything else that is read
        (`assembly/inputs.py`).
        """
        assert self.optimizer is not None and isinstance(self.grant, ShrinkingGrant)
        if self.precision.device.type == "cuda":  # only on CUDA does peak_memory_mib measure what is planned
            facts = facts | {"planned_memory_mib": self.plan.allocated / MIB}

        def save_adapter(folder: Path) -> None:
            lora.save_adapter(self.model, POLICY, folder, base_model=base_model, fingerprint=self.fingerprint)

        save = save_adapter
        result = ADAPTER
        if self.full_tuning:
            save = partial(saving.save_merged, self.model, self.folder)
            result = MODEL
        return TrainState(
            optimizer=self.optimizer,
            precision=self.precision,
            max_grad_norm=settings.max_grad_norm,
            save_adapter=save,
            result=result,
            data=data,
            inputs=inputs,
            facts=facts,
            parts={"memory": self.grant, **parts},
            ranks=self.ranks,
        )


def load_policy(
    folder: Path,
    settings: ModelSettings,
    memory: MemorySettings,
    plan: Plan,
    training: Training | None = None,
) -> Policy:
    """Returns the policy of a model folder with the adapter of --adapter, or with a new one if one is to be trained.

    `training` is None if the model is only run. Several ranks all follow the plan of the rank with the smallest budget.
    Raises R3LiteError if base, tokenizer, lengths and adapter do not fit one another.
    """
    check_lengths(folder, plan.workload.vocabulary, plan.workload.row_tokens)
    trains_all = training is not None and training.lora.no_lora
    trains_adapter = training is not None and not trains_all
    fingerprint = None
    if settings.adapter or trains_adapter:
        fingerprint = weights.fingerprint(folder)
    if settings.adapter:
        check_base(settings, fingerprint)
        if training:
            _check_shape(settings.adapter, training, plan.workload.model)
    device = resolve_device(settings.device)
    precision = Precision(resolve_dtype(settings.dtype, device), device)
    ranks = training.ranks if training else ALONE
    plan = min(ranks.gather(plan), key=lambda plan: plan.budget)
    if ranks.first:
        announce(plan)
    enforce(plan, device)
    warn_of_slow_fp16(precision)
    nf4_cache = None
    if ranks.first:  # other ranks neither read nor write the cache
        nf4_cache = memory.nf4_cache
    model = load_frozen(
        folder,
        precision,
        nf4=plan.memory.nf4,
        cache=nf4_cache,
        streamed=plan.memory.stream_layers,
    )
    if settings.adapter:
        lora.load_adapter(model, POLICY, settings.adapter, trainable=training is not None)
    elif trains_adapter:
        _add_new_adapter(model, training)
    if settings.adapter or trains_adapter:
        lora.set_adapter(model, POLICY)
    if settings.compile:
        _compile(model, device, plan.memory.nf4)
    if training is None:
        grant = Grant(plan.memory)
        activation_checkpointing.enable(model, grant)
        return Policy(model, precision, grant)
    if trains_all:
        return _train_all(model, precision, plan=plan, training=training, folder=folder)
    policy = _train_adapter(model, precision, plan=plan, training=training, start=settings.adapter)
    return replace(policy, fingerprint=fingerprint)


def _add_new_adapter(model: CausalLM, training: Training) -> None:
    """Adds a new adapter to train, for a run without an adapter to start from."""
    shape = training.lora
    lora.add_adapter(
        model,
        POLICY,
        r=shape.lora_r,
        alpha=shape.lora_alpha,
        dropout=shape.lora_dropout,
        targets=shape.lora_targets,
        rslora=shape.rslora,
        seed=training.seed,
    )


def _train_adapter(
    model: CausalLM,
    precision: Precision,
    plan: Plan,
    training: Training,
    start: str | None,
) -> Policy:
    """Returns a policy whose adapter is trained. `start` is the adapter that the run starts from; None: a new one.

    With `keep_reference`, `start` is loaded a second time as the reference. Without `start` the reference is the base.
    """
    reference = None
    if training.keep_reference and start:
        lora.load_adapter(model, REFERENCE, start, trainable=False)
        reference = REFERENCE
    groups = _adapter_groups(lora.adapter_parameters(model, POLICY), training.optimizer)
    critic = None
    if training.critic_learning_rate is not None:
        critic = ValueHead(model.config.hidden_size).to(precision.device)
        parameters = {f"value_head.{name}": parameter for name, parameter in critic.named_parameters()}
        groups.append(optim.ParameterGroup(parameters, training.critic_learning_rate, is_policy=False))
    optimizer = optim.adamw(groups, training.optimizer.weight_decay)
    grant = ShrinkingGrant(plan, optimizer, training.ranks)
    activation_checkpointing.enable(model, grant)
    return Policy(
        model,
        precision,
        grant,
        optimizer=optimizer,
        reference=reference,
        critic=critic,
        ranks=training.ranks,
    )


def _train_all(
    model: CausalLM,
    precision: Precision,
    plan: Plan,
    training: Training,
    folder: Path,
) -> Policy:
    """Returns a policy that trains all weights. The weights of each layer are updated during the backward pass."""
    if training.ranks.size > 1:
        cause = f"--no-lora trains in one process, but torchrun started {training.ranks.size}"
        raise R3LiteError(cause, "Start it without torchrun, or remove --no-lora.", code="no-lora-processes")
    if precision.scaler is not None:
        raise R3LiteError(
            "--no-lora does not work in fp16", "Pass --dtype bf16 or fp32, or remove --no-lora.", code="no-lora-fp16"
        )
    settings = training.optimizer
    optimizer = AdamW8(
        dict(model.named_parameters()),
        rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_norm=settings.max_grad_norm,
        seed=training.seed,
    )

    def apply(parameter: nn.Parameter, grad: Tensor) -> None:
        precision.changed_weights = True
        optimizer.update(parameter, grad)

    grant = ShrinkingGrant(plan, optimizer)
    activation_checkpointing.enable(model, grant)
    return Policy(
        model,
        precision,
        grant,
        optimizer=optimizer,
        full_tuning=FullTuning(model, apply),
        folder=folder,
    )


def _adapter_groups(parameters: dict[str, nn.Parameter], settings: OptimizerSettings) -> list[optim.ParameterGroup]:
    """Returns an adapter's parameters in groups with one learning rate each.

    There is one group. With LoRA+ (arXiv 2402.12354) there are two: the rate of the matrices B is --lora-plus-ratio
    times that of the matrices A.
    """
    rate = settings.learning_rate
    ratio = settings.lora_plus_ratio
    if ratio == 1:
        return [optim.ParameterGroup(parameters, rate)]
    matrices_a: dict[str, nn.Parameter] = {}
    matrices_b: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        matrices = matrices_b if ".lora_B." in name else matrices_a
        matrices[name] = parameter
    return [optim.ParameterGroup(matrices_a, rate), optim.ParameterGroup(matrices_b, ratio * rate)]


def check_lengths(folder: Path, ids: int, longest: int) -> None:
    """Raises R3LiteError if the model of a folder has too few embeddings or too few positions.

    `ids` is the number of the tokenizer's ids, `longest` the length in tokens of the longest row or episode.
    """
    config = read_config(folder)
    max_length = config.max_position_embeddings
    with naming_gguf(folder):
        if ids > config.vocab_size:
            limit = f"vocab_size in config.json is {config.vocab_size}"
            cause = f"the tokenizer in {folder} has token ids up to {ids - 1}, but {limit}"
            raise R3LiteError(
                cause, "Copy tokenizer.json and config.json from the same model.", code="tokenizer-beyond-embedding"
            )
        if longest > max_length:
            limit = f"max_position_embeddings in {folder / 'config.json'} is {max_length}"
            cause = f"rows have up to {longest} tokens, but {limit}"
            raise R3LiteError(cause, f"Pass --max-length {max_length} or less.", code="rows-beyond-positions")


def check_base(settings: ModelSettings, fingerprint: str | None) -> None:
    """Raises R3LiteError if the adapter was trained on another base than that with `fingerprint`.

    An adapter without a recorded fingerprint is accepted: another base would only be noticed by its shapes. Prints a
    note if the run of the adapter is not complete, so that its latest checkpoint is used.
    """
    name, trained_on = lora.read_base(settings.adapter)
    folder = adapter_folder(settings.adapter)
    if folder.parent.parent == Path(settings.adapter):
        print(f"{settings.adapter} is not complete; using its latest checkpoint, {folder}", file=sys.stderr)
    if fingerprint and trained_on and trained_on != fingerprint:
        cause = f"the adapter {settings.adapter} was trained on another base: {name} with the fingerprint {trained_on}"
        remedy = "Pass the --model that it was trained on, or another adapter."
        raise R3LiteError(f"{cause}; --model {settings.model} has {fingerprint}", remedy, code="base-differs")


def remedy_of_format(model: ModelSettings) -> str:
    """Returns what a user can do if a model hardly follows the step format, as a clause for the middle of a message."""
    trained = result_of_run(model.model, model.adapter)
    if trained is None:
        return "run SFT first, and pass its run as --adapter"
    length = sft_length(trained)
    if length is not None and length.is_short:
        return f"{trained} had only {length.steps} steps of SFT; train it for longer"
    return f"train {trained} for longer in SFT, or pass the --format and prompts that it was trained with"


def warn_of_short_sft(trained: str | None) -> None:
    """Warns if the SFT that made an adapter or a model was so short that it may hardly know the step format."""
    length = sft_length(trained) if trained is not None else None
    if length is not None and length.is_short:
        message = f"{trained} had only {length.steps} steps of SFT: it may hardly know the step format"
        print(f"warning: {message}", file=sys.stderr)


def warn_of_other_format(adapter: str | None, config: CommandConfig) -> None:
    """Warns if an adapter, or a model of `sft --no-lora`, was trained on other step formats, prompts or thoughts than
    the settings of a command have, as far as its run folder says.

    Raises R3LiteError if the user has set --format, and the command has a format that is not among those of the
    training. Training on chats alone, which has no format, only gives the warning.
    """
    settings = {}
    for name, value in flat(config).items():
        settings[name] = "none" if value is None else value  # as in the `config.toml` of a run
    trained = result_of_run(settings["model"], adapter)
    recorded = settings_of(trained) if trained is not None else {}
    if not recorded:
        return
    # A setting that is not recorded counts as equal.
    trained_settings = {name: recorded.get(name, value) for name, value in settings.items()}
    trained_settings["sources"] = recorded.get("sources")
    if "thinking" in settings:  # off and auto count as equal: auto means off if the model's thoughts can be switched
        settings["thinking"] = settings["thinking"].replace("off", "auto")
        trained_settings["thinking"] = trained_settings["thinking"].replace("off", "auto")
    differences = []
    learned_formats = _formats(trained_settings)
    new_formats = _formats(settings) - learned_formats
    if new_formats and learned_formats and "format" in config.set_by_user:
        learned = ", ".join(sorted(learned_formats))
        raise R3LiteError(
            f"{trained} was trained on --format {learned}, not {', '.join(sorted(new_formats))}",
            "Remove --format, or pass another adapter.",
            code="format-differs",
        )
    if new_formats:
        formats_here = ", ".join(sorted(new_formats))
        if learned_formats:
            differences.append(f"--format {', '.join(sorted(learned_formats))} (here {formats_here})")
        else:
            differences.append(f"chats without steps (here --format {formats_here})")
    for name in (*vars(config.protocol), "thinking"):
        if name == "format" or name not in settings:
            continue
        if trained_settings[name] != settings[name]:
            differences.append(f"{flag(name)} {trained_settings[name]} (here {settings[name]})")
    if differences:
        print(f"warning: {trained} was trained on {', '.join(differences)}: results may be worse", file=sys.stderr)


def _formats(settings: Mapping[str, Any]) -> set[str]:
    """Returns the step formats of a run. With [[sources]] they are those of its sources; chats have no step format."""
    entries = settings.get("sources")
    if not isinstance(entries, list | tuple):
        entries = [{}]
    return {entry.get("format", settings["format"]) for entry in entries if has_steps(entry)}


def _check_shape(
    adapter: str,
    training: Training,
    model: ModelConfig,
) -> None:
    """Raises R3LiteError if the user has set the shape of a new adapter and it is not that of `adapter`."""
    config = lora.read_adapter_config(adapter)
    shape = {
        "lora_r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "rslora": config.rslora,
        "lora_targets": config.targets,
    }
    for name, value in shape.items():
        setting = getattr(training.lora, name)
        is_equal = setting == value
        if name == "lora_targets":  # the setting may have other names of the same layers
            is_equal = of_model(setting, projection_names(model)) == value
        if name in training.set_by_user and not is_equal:
            remedy = f"Remove {flag(name)}, or train a new adapter without --adapter."
            raise R3LiteError(
                f"{flag(name)} is {setting}, but the adapter {adapter} has {value}",
                remedy,
                code="adapter-setting-differs",
            )


def _compile(model: CausalLM, device: torch.device, nf4: bool) -> None:
    """Compiles the functions of models/compiled.py and prints how long it took, or why nothing is compiled."""
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

    start = time.perf_counter()
    if nf4 and device.type == "cuda":
        reason = compiled.missing_compiler(device)
    else:
        reason = "it needs an NF4 base on a CUDA GPU"
    if reason:
        print(f"warning: --compile has no effect: {reason}", file=sys.stderr)
        return
    print("compiling the dequantization of NF4 weights ...", file=sys.stderr)
    try:
        compiled.enable(model)
    except TorchDynamoException as error:
        raise R3LiteError(
            f"--compile failed: {str(error).strip().partition(chr(10))[0]}",
            "Remove --compile. If an earlier run was killed during compilation, delete PyTorch's kernel cache: "
            "TORCHINDUCTOR_CACHE_DIR, by default torchinductor_USER in the folder of temporary files.",
            code="compile-failed",
        ) from error
    print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)


def load_frozen(
    folder: Path,
    precision: Precision,
    nf4: bool,
    cache: str | None,
    streamed: bool = False,
) -> CausalLM:
    """Returns the frozen model of a folder, dense or in NF4. If it is `streamed`, only two layers are on the device.

    Quantized weights are kept in the folder `cache` (--nf4-cache) for the next start with the same files. None: they
    are not kept.
    """
    model = _load(folder, precision, nf4=nf4, cache=cache, streamed=streamed)
    if model.layer_stream:
        model.layer_stream.attach(model)
    return model


def _load(
    folder: Path,
    precision: Precision,
    nf4: bool,
    cache: str | None,
    streamed: bool,
) -> CausalLM:
    """Loads a model; takes NF4 weights from the cache if it has them, else writes them there."""
    dtype = precision.dtype
    device = precision.device
    if not nf4 or cache is None or is_nf4(folder):
        return weights.load_model(folder, dtype, device, quantize=nf4, streamed=streamed)
    cached = Path(cache).expanduser() / f"{folder.resolve().name}-nf4-{_digest(folder, dtype)}"
    if cached.is_dir():
        return weights.load_model(cached, dtype, device, streamed=streamed)
    model = weights.load_model(folder, dtype, device, quantize=True, streamed=streamed)
    try:
        with sole_writer(cached, folder=False):
            sweep(cached)  # removes files that a killed process left, which may be as large as the weights
            saving.save_nf4(model, folder, cached)
        size = f"{size_of(cached) / 1e6:,.0f} MB"
        print(f"cached the quantized weights in {cached}: {size}; to remove: {CLEAR}", file=sys.stderr)
    except (OSError, R3LiteError) as error:  # such as a full disk: only the next start takes longer
        message = str(error).splitlines()[0]
        print(f"warning: cannot cache the quantized weights in {cached}: {message}", file=sys.stderr)
    return model


def _digest(folder: Path, dtype: torch.dtype) -> str:
    """Returns a digest of everything that NF4 weights are made of. It changes if the files in the folder change."""
    stats = []
    for path in sorted(folder.glob("*.safetensors*")):
        if path.is_file():
            stats.append((path.name, path.stat().st_size, path.stat().st_mtime_ns))
    facts = (str(folder.resolve()), str(dtype), stats, weights.fingerprint(folder))
    digest = hashlib.sha256(repr(facts).encode())
    for name in saving.VERBATIM:
        path = folder / name
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
