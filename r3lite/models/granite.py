"""What Granite 3 (`granite`) and Granite 4 without experts and Mamba layers (`granitemoehybrid`) have of their own.

They are Llamas with four multipliers; in `granitemoehybrid` gate and up projections are one matrix.
"""

from dataclasses import replace

from torch import Tensor, nn

from r3lite.core.records import Record, shown
from r3lite.models.causal_lm import MLP, Layer, LayerKind, ModelConfig
from r3lite.models.functions import swiglu
from r3lite.models.layer_kinds import FULL, unsupported
from r3lite.models.projections import project

EXPERTS = 8  # if config.json does not say
SHARED_SIZE = 1024
LARGEST = 1e6
DENSE = "r3lite trains Granite 4 without experts and Mamba layers, such as granite-4.0-micro, -1b and -350m."


def granite(record: Record, config: ModelConfig) -> ModelConfig:
    """Returns the config with the multipliers of a `config.json`.

    A layer adds m f(norm(x)) to x, with the residual multiplier m. With y = x / m that is adding f(norm(y)) to y, if
    the norm's eps is divided by m^2. So m goes into the embedding's multiplier and eps, and layers stay as they are.
    """

    def multiplier(name: str) -> float:
        return record.number(name, 1.0, low=0, high=LARGEST, above=True)

    residual = multiplier("residual_multiplier")
    return replace(
        config,
        embedding_multiplier=multiplier("embedding_multiplier") / residual,
        rms_norm_eps=config.rms_norm_eps / residual**2,
        attention_scale=multiplier("attention_multiplier"),
        logits_scaling=multiplier("logits_scaling"),
    )


def granite_hybrid(record: Record, config: ModelConfig) -> ModelConfig:
    """Returns the config of a dense Granite 4, with rotary positions only if `position_embedding_type` is rope."""
    layer_types = record.texts(record.first("layer_types", "layers_block_type"), ("mamba",))
    other = next((name for name in layer_types if name not in ("attention", FULL)), None)
    if other is not None:
        raise unsupported(record, f"layer_types has {shown(other)}", DENSE)
    experts = record.whole("num_local_experts", EXPERTS)
    if experts:
        raise unsupported(record, f"num_local_experts is {experts}", DENSE)
    kinds = config.layer_kinds
    if record.text("position_embedding_type", None) != "rope":
        kinds = (LayerKind(rope=None),) * config.num_hidden_layers
    config = replace(
        config,
        intermediate_size=record.whole("shared_intermediate_size", SHARED_SIZE, low=1, high=1 << 20),
        layer_kinds=kinds,
        layer=GraniteHybridLayer,
    )
    return granite(record, config)


class SharedMLP(MLP):
    """The feed-forward network whose gate and up projections are one matrix."""

    def __init__(self, config: ModelConfig):
        nn.Module.__init__(self)
        self.input_linear = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.output_linear = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def _project(self, x: Tensor, residual: Tensor | None) -> Tensor:
        hidden = swiglu(project((self.input_linear,), x))
        return project((self.output_linear,), hidden, residual)


class GraniteHybridLayer(Layer):
    """A layer whose feed-forward network is called `shared_mlp`: in other sizes of the family it is beside experts."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        del self.mlp
        self.shared_mlp = SharedMLP(config)

    def second_half(self, x: Tensor, tile: int | None = None) -> Tensor:
        return self.shared_mlp(self.post_attention_layernorm(x), residual=x, tile=tile)
