"""What a training run changes from step to step, and what its checkpoints therefore hold."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from r3lite.core.earlier_output import refuse_other_inputs
from r3lite.core.errors import R3LiteError
from r3lite.core.inherited import ADAPTER
from r3lite.devices.precision import Precision
from r3lite.devices.random_state import random_state, set_random_state
from r3lite.devices.ranks import ALONE, Ranks
from r3lite.training import optim
from r3lite.training.adamw8 import AdamW8
from r3lite.training.checkpoint import GROUPS, Checkpoint

OPTIONAL = ("guard",)  # parts that checkpoints of earlier versions lack: they begin afresh
OF_WEIGHTS = ("kl_budget",)  # parts that know how the weights came about, and therefore go back with them


class Stateful(Protocol):
    """A part of a run that checkpoints keep: JSON values, and under `tensors` tensors by name."""

    def state_dict(self) -> dict:
        """Returns the state for a checkpoint."""

    def load_state_dict(self, state: dict) -> None:
        """Restores the state that `state_dict` returned; raises R3LiteError if `state` is no such state."""


@dataclass
class TrainState:
    """Optimizer, precision and all else that an exact resume needs."""

    optimizer: torch.optim.AdamW | AdamW8  # the former made by optim.adamw
    precision: Precision
    max_grad_norm: float
    save_adapter: Callable[[Path], None]  # writes the adapter in PEFT's form, or the model, into a folder
    result: str = ADAPTER  # or MODEL: the name of the folder that `save_adapter` fills
    data: str = ""  # fingerprint of the training data: a run can only be resumed on the same
    inputs: dict[str, str] = field(default_factory=dict)  # fingerprints of the other inputs, by what each is
    facts: dict = field(default_factory=dict)  # about the run, for summary.json
    parts: dict[str, Stateful] = field(default_factory=dict)  # further parts of checkpoints, by name
    num_tokens: int = 0  # processed so far, without padding
    seconds: float = 0.0  # spent in steps so far
    ranks: Ranks = ALONE

    def update(self) -> tuple[float, bool]:
        """Takes one optimizer step on the gradients of all ranks, clipped together.

        Returns the norm before clipping, and whether the step was skipped; see Precision.step.
        """
        if isinstance(self.optimizer, AdamW8):  # which has updated each weight during the backward pass
            return self.optimizer.end_step(), False
        parameters = list(optim.parameters(self.optimizer).values())
        self.precision.updating = True
        self.ranks.sum_gradients(parameters)
        return self.precision.step(self.optimizer, parameters, self.max_grad_norm)

    def weights_fingerprint(self) -> int:
        """Returns a checksum of the trainable weights."""
        checksum = 0
        for parameter in optim.parameters(self.optimizer).values():
            weights = parameter.detach().cpu().flatten().view(torch.uint8).numpy()
            checksum = zlib.crc32(weights, checksum)
        return checksum

    def snapshot(self) -> dict[str, Any]:
        """Returns all that a step may change before its first weight update; for `rewind`."""
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {
            "random": random_state(),
            "kept": parts,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
        }

    def rewind(self, snapshot: dict[str, Any]) -> None:
        """Undoes a step that has not changed a weight."""
        set_random_state(snapshot["random"])
        self._load_parts(snapshot["kept"])
        self.num_tokens = snapshot["num_tokens"]
        self.seconds = snapshot["seconds"]

    def checkpoint(self, step: int, run: dict) -> Checkpoint:
        """Returns the checkpoint after step `step`; `run` identifies the run (command, settings, base)."""
        snapshot = self.snapshot()
        tensors = {
            "weights": optim.parameters(self.optimizer),
            "optimizer": optim.state_tensors(self.optimizer),
            "random": snapshot.pop("random"),
        }
        for name, part in snapshot["kept"].items():
            if "tensors" in part:
                tensors[name] = part.pop("tensors")
        state = {
            "step": step,
            **run,
            "precision": self.precision.state_dict(),
            "data": self.data,
            "inputs": self.inputs,
            **snapshot,
        }
        return Checkpoint(step, tensors, state)

    def restore(self, loaded: Checkpoint) -> None:
        """Loads a checkpoint; raises R3LiteError if it is of another model, other data or another precision."""
        state = loaded.state
        remedy = "Restore it, or start a new run with another --output."
        refuse_other_inputs(state.get("inputs", {}), self.inputs, remedy)
        self.precision.load_state_dict(state["precision"])
        self._check_weights(loaded.tensors["weights"])
        if state["data"] != self.data:
            remedy = "Resume with the first run's --data, tokenizer and prompts, or start a new run with --adapter."
            raise R3LiteError("the data have changed since the run started", remedy, code="data-changed")
        parts = {}
        for name, part in state["kept"].items():
            parts[name] = dict(part)
            if name in loaded.tensors and name not in GROUPS:
                parts[name]["tensors"] = loaded.tensors[name]
        self._load_parts(parts)
        self._load_weights(loaded)
        set_random_state(loaded.tensors["random"])
        self.num_tokens = state["num_tokens"]
        self.seconds = state["seconds"]

    def _check_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Raises R3LiteError unless a checkpoint's weights have the names and shapes of this run's."""
        parameters = optim.parameters(self.optimizer)
        run_shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        checkpoint_shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        different = {name for name, _ in run_shapes.items() ^ checkpoint_shapes.items()}
        if different:
            count = len(different)
            cause = f"the checkpoint and this run have different weights: {count} differ, such as {min(different)}"
            raise R3LiteError(
                cause,
                "Resume with the first run's --model, --adapter and LoRA settings.",
                code="checkpoint-weights-differ",
            )

    def go_back(self, loaded: Checkpoint) -> None:
        """Loads the weights and the optimizer's moments of an earlier checkpoint of this run.

        Of the parts, only those in OF_WEIGHTS learn of it: their `go_back` gets the state that they had then.
        """
        self._load_weights(loaded)
        for name in OF_WEIGHTS:
            if name in self.parts:
                self.parts[name].go_back(loaded.state["kept"][name])

    def _load_weights(self, loaded: Checkpoint) -> None:
        """Loads the weights and the optimizer's moments of a checkpoint."""
        with torch.no_grad():
            for name, parameter in optim.parameters(self.optimizer).items():
                parameter.copy_(loaded.tensors["weights"][name])
        optim.load_state_tensors(self.optimizer, loaded.tensors["optimizer"])

    def _load_parts(self, states: dict[str, dict]) -> None:
        for name, part in self.parts.items():
            if name in OPTIONAL and name not in states:
                continue
            if name not in states:
                raise R3LiteError(
                    f"the checkpoint has no state of {name}",
                    "Start a new run with --adapter.",
                    code="checkpoint-state-absent",
                )
            part.load_state_dict(states[name])

    def differences(self, states: dict[str, dict]) -> list[str]:
        """Returns the values of the parts that differ from a checkpoint's, such as `memory.loss_chunk 128 -> 64`.

        `states` are those of the checkpoint's parts, by name.
        """
        changes = []
        for name, part in self.parts.items():
            saved = states.get(name, {})
            for key, value in part.state_dict().items():
                if key in saved and saved[key] != value:
                    changes.append(f"{name}.{key} {saved[key]} -> {value}")
        return changes
