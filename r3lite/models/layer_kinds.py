"""What a `config.json` says of the layers one by one: which have a window, and which have rotary positions.

Each function takes the record of a `config.json` and the config that is common to all families, and returns that config
with the kinds of its layers. Defaults are those of transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from r3lite.core.errors import R3LiteError
from r3lite.core.records import Record, shown
from r3lite.models.causal_lm import LayerKind, ModelConfig

SLIDING = "sliding_attention"
FULL = "full_attention"
MISTRAL_WINDOW = 4096  # if config.json has no `sliding_window`
QWEN_FULL_LAYERS = 28
NO_ROPE_INTERVAL = 4
LARGEST = 1 << 30


def unsupported(
    record: Record,
    fault: str,
    remedy: str,
) -> R3LiteError:
    """Returns the exception for a `config.json` that asks for what the network does not compute."""
    return R3LiteError(f"{record.source.where}: {fault}", remedy, code="model-config-unsupported")


def mistral(record: Record, config: ModelConfig) -> ModelConfig:
    """All layers have a window, or none has."""
    window = _window(record, MISTRAL_WINDOW)
    if window is not None and "layer_types" in record:
        raise unsupported(record, "layer_types is set beside sliding_window", "Remove one of them.")
    return with_windows(config, [window is not None] * config.num_hidden_layers, window)


def qwen(record: Record, config: ModelConfig) -> ModelConfig:
    """With `use_sliding_window`, the layers after the first `max_window_layers` have a window."""
    window = None
    if record.flag("use_sliding_window", False):
        window = _window(record, MISTRAL_WINDOW)
    full_layers = record.whole("max_window_layers", QWEN_FULL_LAYERS)
    sliding = sliding_layers(record, config, lambda layer: window is not None and layer >= full_layers)
    _check_window(record, sliding, window)
    return with_windows(config, sliding, window)


def smollm3(record: Record, config: ModelConfig) -> ModelConfig:
    """Every fourth layer has no positions; in `no_rope_layers` 0 stands for these, 1 for layers with positions.

    With `use_sliding_window`, the layers without positions have a window.
    """
    layers = config.num_hidden_layers
    interval = record.whole("no_rope_layer_interval", NO_ROPE_INTERVAL, low=1)
    marks = record.items("no_rope_layers", None)
    if marks is None:
        marks = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(marks) < layers or any(mark not in (0, 1) for mark in marks):
        raise record.wrong("no_rope_layers", f"0 or 1 for each of {layers} layers")
    window = _window(record) if record.flag("use_sliding_window", False) else None
    sliding = sliding_layers(record, config, lambda layer: window is not None and not marks[layer])
    _check_window(record, sliding, window)
    kinds = []
    for layer, (mark, slides) in enumerate(zip(marks, sliding)):
        rope = config.kind(layer).rope if mark else None
        kinds.append(LayerKind(rope, window if slides else None))
    return replace(config, layer_kinds=tuple(kinds))


def sliding_layers(
    record: Record,
    config: ModelConfig,
    rule: Callable[[int], bool],
) -> list[bool]:
    """Returns which layers have a window: those of `layer_types`, or if there is none those for which `rule` holds."""
    layers = config.num_hidden_layers
    types = record.texts("layer_types", ())
    if not types:
        return [rule(layer) for layer in range(layers)]
    unknown = next((name for name in types if name not in (SLIDING, FULL)), None)
    if unknown is not None:
        raise unsupported(record, f"layer_types has {shown(unknown)}", f"Supported are {SLIDING} and {FULL}.")
    if len(types) != layers:
        raise record.error(f"layer_types has {len(types)} layers, but num_hidden_layers is {layers}")
    return [name == SLIDING for name in types]


def with_windows(
    config: ModelConfig,
    sliding: Sequence[bool],
    window: int | None,
) -> ModelConfig:
    """Returns the config with a window in some layers."""
    if not any(sliding):
        return config
    kinds = []
    for layer, slides in enumerate(sliding):
        kinds.append(LayerKind(config.kind(layer).rope, window if slides else None))
    return replace(config, layer_kinds=tuple(kinds))


def _window(record: Record, default: int | None = None) -> int | None:
    """Returns the window of a `config.json`, or the default if it has no such key; null means that there is none."""
    if "sliding_window" not in record.values:
        return default
    return record.whole("sliding_window", None, low=1, high=LARGEST)


def _check_window(
    record: Record,
    sliding: Sequence[bool],
    window: int | None,
) -> None:
    if any(sliding) and window is None:
        raise record.error(f"layer_types has {SLIDING}, but use_sliding_window and sliding_window set no window")
