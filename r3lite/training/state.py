"""What a training run changes from step to step, and what its checkpoints therefore hold."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from r3lite.core.command import refuse_other_inputs
from r3lite.core.errors import R3LiteError
from r3lite.devices.precision import Precision
from r3lite.devices.random_state import random_state, set_random_state
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.training import optim
from r3lite.training.adamw8 import AdamW8
from r3lite.training.checkpoint import ADAPTER, GROUPS, Checkpoint

LATER = ("guard",)  # parts that checkpoints of earlier versions lack: they begin afresh


class Stateful(Protocol):
    """A part of a run that checkpoints keep: JSON values, and under `tensors` tensors by name."""

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict) -> None: ...


@dataclass
class TrainState:
    """Optimizer, precision and all else that an exact resume needs."""

    optimizer: torch.optim.AdamW | AdamW8  # the former made by optim.adamw
    precision: Precision
    max_grad_norm: float
    save_adapter: Callable[[Path], None]  # writes the adapter in PEFT's form, or the model, into a folder
    result: str = ADAPTER  # or MODEL: the name of that folder in a run
    data: str = ""  # fingerprint of the training data: a run can only be resumed on the same
    inputs: dict[str, str] = field(default_factory=dict)  # fingerprints of what else it reads, by what that is
    facts: dict = field(default_factory=dict)  # about the run, for summary.json
    parts: dict[str, Stateful] = field(default_factory=dict)  # further parts of checkpoints, by name
    num_tokens: int = 0  # processed so far, without padding
    seconds: float = 0.0  # spent in steps so far
    ranks: Ranks = ALONE

    def update(self) -> tuple[float, bool]:
        """One optimizer step on the gradients of all ranks, clipped together; see Precision.step."""
        if isinstance(self.optimizer, AdamW8):  # which has updated each weight during the backward pass
            return self.optimizer.finish(), False
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.precision.updating = True
        self.ranks.sum_gradients(parameters)
        return self.precision.step(self.optimizer, parameters, self.max_grad_norm)

    def weights_fingerprint(self) -> int:
        """A checksum of the trainable weights."""
        found = 0
        for parameter in optim.parameters(self.optimizer).values():
            found = zlib.crc32(parameter.detach().cpu().flatten().view(torch.uint8).numpy(), found)
        return found

    def snapshot(self) -> dict[str, Any]:
        """All that a step may change before its first weight update; for `rewind`."""
        kept = {name: part.state_dict() for name, part in self.parts.items()}
        return {"random": random_state(), "kept": kept, "num_tokens": self.num_tokens, "seconds": self.seconds}

    def rewind(self, snapshot: dict[str, Any]) -> None:
        """Undoes a step that has not changed a weight."""
        set_random_state(snapshot["random"])
        self._load_parts(snapshot["kept"])
        self.num_tokens, self.seconds = snapshot["num_tokens"], snapshot["seconds"]

    def checkpoint(self, step: int, run: dict) -> Checkpoint:
        """The checkpoint after step `step`; `run` identifies the run (command, settings, base)."""
        snapshot = self.snapshot()
        tensors = {
            "weights": optim.parameters(self.optimizer),
            "optimizer": optim.state_tensors(self.optimizer),
            "random": snapshot.pop("random"),
        }
        for name, state in snapshot["kept"].items():
            if "tensors" in state:
                tensors[name] = state.pop("tensors")
        described = {"step": step, **run, "precision": self.precision.state_dict()}
        described |= {"data": self.data, "inputs": self.inputs}
        return Checkpoint(step, tensors, described | snapshot)

    def restore(self, loaded: Checkpoint) -> None:
        """Loads a checkpoint; raises R3LiteError if it is of another model, other data or another precision."""
        remedy = "Restore it, or start a new run with another --output."
        refuse_other_inputs(loaded.state.get("inputs", {}), self.inputs, remedy)
        self.precision.load_state_dict(loaded.state["precision"])
        parameters, weights = optim.parameters(self.optimizer), loaded.tensors["weights"]
        ours, theirs = ({name: tuple(t.shape) for name, t in x.items()} for x in (parameters, weights))
        wrong = {name for name, _ in ours.items() ^ theirs.items()}
        if wrong:
            cause = f"the checkpoint and this run have different weights: {len(wrong)} differ, such as {min(wrong)}"
            raise R3LiteError(cause, "Resume with the first run's --model, --adapter and LoRA settings.")
        if loaded.state["data"] != self.data:
            remedy = "Resume with the first run's --data, tokenizer and prompts, or start a new run with --adapter."
            raise R3LiteError("the data have changed since the run started", remedy)
        in_files = {name: {"tensors": loaded.tensors[name]} for name in loaded.tensors if name not in GROUPS}
        self._load_parts({name: state | in_files.get(name, {}) for name, state in loaded.state["kept"].items()})
        self.go_back(loaded)
        set_random_state(loaded.tensors["random"])
        self.num_tokens, self.seconds = loaded.state["num_tokens"], loaded.state["seconds"]

    def go_back(self, loaded: Checkpoint) -> None:
        """Loads the weights and the optimizer's moments of a checkpoint of this run, and nothing else."""
        with torch.no_grad():
            for name, parameter in optim.parameters(self.optimizer).items():
                parameter.copy_(loaded.tensors["weights"][name])
        optim.load_state_tensors(self.optimizer, loaded.tensors["optimizer"])

    def _load_parts(self, kept: dict[str, dict]) -> None:
        for name, part in self.parts.items():
            if name in LATER and name not in kept:
                continue
            if name not in kept:
                raise R3LiteError(f"the checkpoint has no state of {name}", "Start a new run with --adapter.")
            part.load_state_dict(kept[name])

    def differences(self, kept: dict[str, dict]) -> list[str]:
        """The values of the parts that differ from a checkpoint's, such as `memory.loss_chunk 128 -> 64`."""
        return [
            f"{name}.{key} {kept[name][key]} -> {value}"
            for name, part in self.parts.items()
            for key, value in part.state_dict().items()
            if kept.get(name, {}).get(key, value) != value
        ]
