"""A policy ready to run: the frozen base as its memory plan says, with adapters, optimizer and critic as asked for.

`sft`, `ppo`, `evaluate` and `ask` all set theirs up here.
"""

import hashlib
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from r3lite.core.config import flag, flat
from r3lite.core.errors import R3LiteError
from r3lite.core.files import sole_writer, sweep
from r3lite.core.grant import Grant
from r3lite.datasets.sources import has_steps
from r3lite.devices.live_tensors import MIB
from r3lite.devices.precision import Precision, resolve_device, resolve_dtype
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.devices.speed import warn_of_slow_fp16
from r3lite.memory.plan import Plan, announce, enforce
from r3lite.memory.shrinking import ShrinkingGrant
from r3lite.models import activation_checkpointing, compiled, lora, saving, weights
from r3lite.models.causal_lm import CausalLM
from r3lite.models.config_file import is_nf4, read_config
from r3lite.models.full_tuning import FullTuning
from r3lite.models.value_head import ValueHead
from r3lite.settings import LoraSettings, MemorySettings, ModelSettings, OptimizerSettings
from r3lite.settings.common import CommandConfig
from r3lite.training import optim
from r3lite.training.adamw8 import AdamW8
from r3lite.training.checkpoint import ADAPTER, MODEL
from r3lite.training.earlier_run import result_of_run, settings_of
from r3lite.training.state import Stateful, TrainState

POLICY, REFERENCE = "policy", "reference"  # names of the adapters


@dataclass(frozen=True)
class Training:
    """What a run trains: an adapter or all weights, and for algorithms with a critic a value head."""

    fresh: LoraSettings  # shape of the adapter, if --adapter names none to start from
    optimizer: OptimizerSettings
    seed: int
    set_by_user: Collection[str] = ()  # names of settings; those of `fresh` must be the adapter's, too
    keep_reference: bool = False  # the adapter to start from is loaded a second time, frozen
    critic_learning_rate: float | None = None  # None: no critic
    ranks: Ranks = ALONE  # which train it together


@dataclass(frozen=True)
class Policy:
    """A model with its adapter switched on, the memory granted to the run and, if it is trained, what that takes."""

    model: CausalLM
    precision: Precision
    grant: Grant
    optimizer: torch.optim.AdamW | AdamW8 | None = None
    reference: str | None = None  # adapter that the policy is compared with; None: the bare base
    critic: ValueHead | None = None
    fingerprint: str | None = None  # of the base, to be saved with the adapter
    ranks: Ranks = ALONE
    full: FullTuning | None = None  # of all weights
    folder: Path | None = None  # of the base

    def train_state(
        self, settings: OptimizerSettings, base_model: str, data: str, inputs: dict[str, str], facts: dict,
        **parts: Stateful,
    ) -> TrainState:  # fmt: skip
        """What the run's checkpoints hold: `parts` too; `data` is the fingerprint of what is trained on, `inputs` has
        those of what else is read (`assembly/inputs.py`)."""
        assert self.optimizer is not None and isinstance(self.grant, ShrinkingGrant)
        if self.precision.device.type == "cuda":  # where it is what peak_memory_mib measures
            facts = facts | {"planned_memory_mib": self.grant.plan.allocated / MIB}

        def save_adapter(folder: Path) -> None:
            lora.save_adapter(self.model, POLICY, folder, base_model, self.fingerprint)

        return TrainState(
            optimizer=self.optimizer,
            precision=self.precision,
            max_grad_norm=settings.max_grad_norm,
            save_adapter=partial(saving.save_merged, self.model, self.folder) if self.full else save_adapter,
            result=MODEL if self.full else ADAPTER,
            data=data,
            inputs=inputs,
            facts=facts,
            parts={"memory": self.grant, **parts},
            ranks=self.ranks,
        )


def load_policy(
    folder: Path, settings: ModelSettings, memory: MemorySettings, plan: Plan, training: Training | None = None
) -> Policy:
    """The model of a folder with the adapter of --adapter, or else, if it is to be trained, with a fresh one.

    Of the plans of several ranks, all follow that of the smallest budget.
    Raises R3LiteError if base, tokenizer, lengths and adapter do not fit one another.
    """
    check_lengths(folder, plan.workload.vocabulary, plan.workload.row_tokens)
    fully = training is not None and training.fresh.no_lora
    fingerprint = weights.fingerprint(folder) if settings.adapter or (training and not fully) else None
    if settings.adapter:
        check_base(settings, fingerprint)
        if training:
            _check_shape(settings.adapter, training)
    device = resolve_device(settings.device)
    precision = Precision(resolve_dtype(settings.dtype, device), device)
    ranks = training.ranks if training else ALONE
    plan = min(ranks.gather(plan), key=lambda plan: plan.budget)
    if ranks.first:
        announce(plan)
    enforce(plan, device)
    warn_of_slow_fp16(precision)
    cache = memory.nf4_cache if ranks.first else None
    model = load_frozen(folder, precision, plan.memory.nf4, cache, plan.memory.stream_layers)
    if settings.adapter:
        lora.load_adapter(model, POLICY, settings.adapter, trainable=training is not None)
    elif training and not fully:
        s = training.fresh
        lora.add_adapter(
            model, POLICY, s.lora_r, s.lora_alpha, s.lora_dropout, s.lora_targets, s.rslora, seed=training.seed
        )
    if settings.adapter or (training and not fully):
        lora.set_adapter(model, POLICY)
    if settings.compile:
        _compile(model, device, plan.memory.nf4)
    if training is None:
        grant = Grant(plan.memory)
        activation_checkpointing.enable(model, grant)
        return Policy(model, precision, grant)
    if fully:
        return _train_all(model, precision, plan, training, folder)
    reference, critic = None, None
    if training.keep_reference and settings.adapter:
        lora.load_adapter(model, REFERENCE, settings.adapter, trainable=False)
        reference = REFERENCE
    groups = _adapter_groups(lora.adapter_parameters(model, POLICY), training.optimizer)
    if training.critic_learning_rate is not None:
        critic = ValueHead(model.config.hidden_size).to(device)
        named = {f"value_head.{name}": p for name, p in critic.named_parameters()}
        groups.append(optim.ParameterGroup(named, training.critic_learning_rate, is_policy=False))
    optimizer = optim.adamw(groups, training.optimizer.weight_decay)
    grant = ShrinkingGrant(plan, optimizer, ranks)
    activation_checkpointing.enable(model, grant)
    return Policy(model, precision, grant, optimizer, reference, critic, fingerprint, ranks)


def _train_all(model: CausalLM, precision: Precision, plan: Plan, training: Training, folder: Path) -> Policy:
    """Full fine-tuning: each layer's weights are changed within the backward pass."""
    if training.ranks.size > 1:
        cause = f"--no-lora trains in one process, but torchrun started {training.ranks.size}"
        raise R3LiteError(cause, "Start it without torchrun, or remove --no-lora.")
    if precision.scaler is not None:
        raise R3LiteError("--no-lora does not work in fp16", "Pass --dtype bf16 or fp32, or remove --no-lora.")
    s = training.optimizer
    named = dict(model.named_parameters())
    optimizer = AdamW8(named, s.learning_rate, s.weight_decay, s.max_grad_norm, training.seed)

    def apply(parameter: nn.Parameter, grad: Tensor) -> None:
        precision.changed_weights = True
        optimizer.update(parameter, grad)

    grant = ShrinkingGrant(plan, optimizer)
    activation_checkpointing.enable(model, grant)
    return Policy(model, precision, grant, optimizer, full=FullTuning(model, apply), folder=folder)


def _adapter_groups(parameters: dict[str, nn.Parameter], settings: OptimizerSettings) -> list[optim.ParameterGroup]:
    """An adapter's parameters by their learning rates: one for all, or with LoRA+ (arXiv 2402.12354) B's own."""
    rate, ratio = settings.learning_rate, settings.lora_plus_ratio
    if ratio == 1:
        return [optim.ParameterGroup(parameters, rate)]
    second = {name: p for name, p in parameters.items() if ".lora_B." in name}
    first = {name: p for name, p in parameters.items() if name not in second}
    return [optim.ParameterGroup(first, rate), optim.ParameterGroup(second, ratio * rate)]


def check_lengths(folder: Path, ids: int, longest: int) -> None:
    """Refuses token ids without a row in the embedding, and rows that are longer than the model was made for."""
    config = read_config(folder)
    if ids > config.vocab_size:
        most = f"vocab_size in config.json is {config.vocab_size}"
        cause = f"the tokenizer in {folder} has token ids up to {ids - 1}, but {most}"
        raise R3LiteError(cause, "Copy tokenizer.json and config.json from the same model.")
    if longest > (most := config.max_position_embeddings):
        cause = f"rows have up to {longest} tokens, but max_position_embeddings in {folder / 'config.json'} is {most}"
        raise R3LiteError(cause, f"Pass --max-length {most} or less.")


def check_base(settings: ModelSettings, fingerprint: str | None) -> None:
    """Refuses the adapter of another base. One whose base is not recorded is taken: only its shapes tell then."""
    name, trained_on = lora.read_base(settings.adapter)
    if (place := lora.adapter_folder(settings.adapter)).parent.parent == Path(settings.adapter):
        print(f"{settings.adapter} is not complete; using its latest checkpoint, {place}", file=sys.stderr)
    if fingerprint and trained_on and trained_on != fingerprint:
        cause = f"the adapter {settings.adapter} was trained on another base: {name} with the fingerprint {trained_on}"
        remedy = "Pass the --model that it was trained on, or another adapter."
        raise R3LiteError(f"{cause}; --model {settings.model} has {fingerprint}", remedy)


def warn_of_other_format(adapter: str | None, config: CommandConfig) -> None:
    """Warns if an adapter, or a model of `sft --no-lora`, was trained on other step formats, prompts or thoughts than
    the settings of a command have, as far as its run folder says."""
    now = {name: "none" if value is None else value for name, value in flat(config).items()}  # as in a file
    trained = result_of_run(now["model"], adapter)
    if trained is None or not (then := settings_of(trained)):
        return
    then = {name: then.get(name, value) for name, value in now.items()} | {"sources": then.get("sources")}
    names = [name for name in (*vars(config.protocol), "thinking") if name in now and name != "format"]
    for settings in (then, now) if "thinking" in now else ():  # auto is off where thoughts can be switched
        settings["thinking"] = settings["thinking"].replace("off", "auto")
    other = [f"{flag(name)} {then[name]} (here {now[name]})" for name in names if then[name] != now[name]]
    learned, asked = _formats(then), _formats(now)
    if asked - learned:
        known = f"--format {', '.join(sorted(learned))}" if learned else "chats without steps"
        other = [f"{known} (here {'--format ' * (not learned)}{', '.join(asked - learned)})", *other]
    if other:
        print(f"warning: {trained} was trained on {', '.join(other)}: results may be worse", file=sys.stderr)


def _formats(settings: Mapping[str, Any]) -> set[str]:
    """The step formats of a run: of its sources if it has some, of which those of chats have none."""
    entries = settings.get("sources")
    entries = entries if isinstance(entries, list | tuple) else [{}]
    return {entry.get("format", settings["format"]) for entry in entries if has_steps(entry)}


def _check_shape(adapter: str, training: Training) -> None:
    """Refuses settings of a fresh adapter that were asked for beside an adapter that has others."""
    found = lora.read_adapter_config(adapter)
    has = {"lora_r": found.r, "lora_alpha": found.alpha, "lora_dropout": found.dropout, "rslora": found.rslora}
    for name, value in {**has, "lora_targets": found.targets}.items():
        asked = getattr(training.fresh, name)
        same = set(asked) == set(value) if name == "lora_targets" else asked == value
        if name in training.set_by_user and not same:
            remedy = f"Remove {flag(name)}, or train a new adapter without --adapter."
            raise R3LiteError(f"{flag(name)} is {asked}, but the adapter {adapter} has {value}", remedy)


def _compile(model: CausalLM, device: torch.device, nf4: bool) -> None:
    """Compiles what models/compiled.py says and prints how long it took, or why nothing is compiled."""
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

    began = time.perf_counter()
    dense = None if nf4 and device.type == "cuda" else "it needs an NF4 base on a CUDA GPU"
    if reason := dense or compiled.missing_compiler(device):
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
        ) from error
    print(f"compiled in {time.perf_counter() - began:.0f} s", file=sys.stderr)


def load_frozen(folder: Path, precision: Precision, nf4: bool, cache: str | None, streamed: bool = False) -> CausalLM:
    """The model of a folder, dense or in NF4, with all its layers on the device or with two of them.

    Quantized weights are kept in the folder `cache` (--nf4-cache) for the next start with the same files.
    """
    model = _load(folder, precision, nf4, cache, streamed)
    if model.stream:
        model.stream.attach(model)
    return model


def _load(folder: Path, precision: Precision, nf4: bool, cache: str | None, streamed: bool) -> CausalLM:
    dtype, device = precision.dtype, precision.device
    if not nf4 or cache is None or is_nf4(folder):
        return weights.load_model(folder, dtype, device, nf4, streamed)
    kept = Path(cache).expanduser() / f"{folder.resolve().name}-nf4-{_state_of(folder, dtype)}"
    if kept.is_dir():
        return weights.load_model(kept, dtype, device, streamed=streamed)
    model = weights.load_model(folder, dtype, device, True, streamed)
    try:
        with sole_writer(kept, folder=False):
            sweep(kept)  # of a kill: as large as the weights
            saving.save_nf4(model, folder, kept)
        print(f"cached the quantized weights in {kept}", file=sys.stderr)
    except (OSError, R3LiteError) as error:  # a full disk costs the next start some seconds, not this run
        message = str(error).splitlines()[0]
        print(f"warning: cannot cache the quantized weights in {kept}: {message}", file=sys.stderr)
    return model


def _state_of(folder: Path, dtype: torch.dtype) -> str:
    """A digest of all that NF4 weights are made of: it differs if the folder has changed since they were cached."""
    weight_files = [path for path in sorted(folder.glob("*.safetensors*")) if path.is_file()]
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files]
    state = hashlib.sha256(repr((str(folder.resolve()), str(dtype), stats, weights.fingerprint(folder))).encode())
    for path in (folder / name for name in saving.VERBATIM):
        if path.is_file():
            state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()[:16]
