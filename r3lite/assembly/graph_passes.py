"""The passes of SFT as CUDA graphs: sft --cuda-graphs."""

from collections.abc import Callable

from torch import Tensor

from r3lite.assembly.policy import Policy
from r3lite.datasets.trajectories import Row
from r3lite.models.logprobs import token_loss
from r3lite.models.lora import cast_once
from r3lite.models.masked_pack import MaskedPack, PassInputs
from r3lite.models.packing import states_at
from r3lite.training import optim
from r3lite.training.captured_passes import CapturedPasses


class GraphPasses:
    """Does what SFTTrainer.run_pass does, by CUDA graphs."""

    def __init__(self, policy: Policy, vocabulary: int, run_pass: Callable[[list[Row], int], Tensor]):
        """`run_pass` runs a pass without graphs; `vocabulary` is that of the trainer."""
        self.policy = policy
        self.vocabulary = vocabulary
        self.run_ordinary = run_pass
        parameters = optim.parameters(policy.optimizer).values()
        self.captured_passes = CapturedPasses(parameters, self.run_padded, policy.grant)

    def run_pass(self, rows: list[Row], loss_tokens: int) -> Tensor:
        """Adds the gradients of the summed loss of `rows` / `loss_tokens`, and returns this quotient, detached."""
        if not self.captured_passes.uses_graphs:
            return self.run_ordinary(rows, loss_tokens)
        inputs = PassInputs.of([row.tokens for row in rows], [row.action_mask for row in rows], 1 / loss_tokens)
        return self.captured_passes.add_gradients(inputs, lambda: self.run_ordinary(rows, loss_tokens))

    def run_padded(self, inputs: PassInputs) -> Tensor:
        """Does it by operators that a CUDA graph can repeat for other inputs of the same shape."""
        model = self.policy.model

        def weighted_cross_entropy(rows: slice, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, None]:
            return -(logprobs * inputs.weights[rows]).sum(), None

        # The adapter is cast within the graph: each replay reads the weights of its own step.
        with cast_once(model, self.policy.precision.dtype):
            with self.policy.precision.autocast():
                places, targets = inputs.targets
                hidden = states_at(model(inputs.pack[:1], MaskedPack(inputs)), places)  # [n, C]
                loss, _ = token_loss(
                    hidden,
                    head_weight=model.head_weight[: self.vocabulary],
                    targets=targets,
                    loss=weighted_cross_entropy,
                    chunk=self.policy.grant.memory.loss_chunk,
                )
            # Within cast_once, since layers that are run again read the casts of the graph.
            self.policy.precision.backward(loss)
        return loss.detach()
