"""Writes a trained model for other programs, with a card, and compares what was written with what it was made of."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from r3lite.assembly.policy import check_base, warn_of_other_format
from r3lite.core.files import PART, move, shipped, write_text
from r3lite.datasets.qa import read_questions
from r3lite.devices.precision import DTYPES
from r3lite.exporting import chats
from r3lite.exporting.card import Facts, card
from r3lite.exporting.files import ADAPTER, CARD, FILES, GGUF, MODELFILE
from r3lite.models import gguf_tokenizer, lora, saving, weights
from r3lite.models.causal_lm import CausalLM
from r3lite.models.gguf_files import Header
from r3lite.models.projections import Nf4Linear
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Layout
from r3lite.settings import CommandConfig, ExportSettings, LengthSettings, ModelSettings, ProtocolSettings
from r3lite.settings.common import budget_bytes
from r3lite.training.earlier_run import result_of_run, settings_of

TRAINED = "trained"  # the adapter's name


def write(settings: ExportSettings, config: CommandConfig, scores: dict, output: Path) -> None:
    """Merges if there is an adapter, writes, reads back; prints what is written and how the logits differ.

    All is written beside `output` and takes its place when it is whole. Nothing does if another program would make
    another prompt of it than the training had.
    """
    folder = weights.resolve_folder(settings.model)
    for adapter in settings.adapters:
        check_base(ModelSettings(model=settings.model, adapter=adapter), weights.fingerprint(folder))
    sources = settings.adapters or (None,)  # None: the model itself may be that of a run
    trained = [place for place in (result_of_run(settings.model, adapter) for adapter in sources) if place]
    run = in_common([settings_of(place) for place in trained])
    asked = as_trained(config.protocol, run)
    for adapter in sources:
        warn_of_other_format(adapter, replace(config, protocol=asked))
    protocol, tokenizer = build_protocol(asked), Tokenizer.load(folder, run.get("thinking", "auto"))
    layout, path = Layout(tokenizer, protocol, LengthSettings()), settings.questions
    questions = read_questions(path or shipped("data", "world", "test.jsonl")) if settings.prompts else []
    prompts = [layout.prompt(question.text) for question in questions[: settings.prompts]]
    model = weights.load_model(folder, torch.float32, "cpu")
    if settings.adapters:
        load_adapters(model, settings.adapters)
    before = next_logits(model, prompts, tokenizer.size, "before") if prompts else None
    merged, file = settings.form in ("folder", "gguf"), FILES[settings.form]
    if merged and settings.adapters:
        lora.merge_adapter(model, TRAINED)
    base, on_hub = weights.public_name(settings.model)
    facts = Facts(
        base=base,
        on_hub=on_hub,
        weights=settings.weights,
        file=file,
        merged=merged,
        trained=bool(trained),
        run=run,
        averaged=len(settings.average or ()),
        license=settings.license,
        scores=scores,
    )
    place = output.resolve()
    made = place.with_name(f".{place.name}.new{PART}") / place.name
    try:
        made.parent.mkdir(parents=True)
        model = write_form(model, folder, settings, layout, made)
        write_text(made / CARD, card(facts, protocol, asked.format, tokenizer))
        if place.exists():
            place.rmdir()  # empty; Windows renames onto nothing
        move(made, place)
    finally:
        shutil.rmtree(made.parent, ignore_errors=True)
    size = sum(path.stat().st_size for path in output.iterdir())
    written = output / file if file else output
    print(f"written to  {written}, {size / (1 << 20):,.0f} MiB in total; model card: {output / CARD}")
    if before is not None:
        largest, mean, same = parity(before, next_logits(model, prompts, tokenizer.size, "after"))
        differ = f"logits differ by {mean:.2g} on average, {largest:.2g} at most"
        likeliest = f"the most likely next token is the same for {same}"
        print(f"compared    on {len(prompts)} prompts: {differ}; {likeliest}")


def load_adapters(model: CausalLM, folders: Sequence[str]) -> None:
    """Loads an adapter, or the mean of several, and switches it on."""
    if len(folders) == 1:
        lora.load_adapter(model, TRAINED, folders[0], trainable=False)
    else:
        names = [f"{TRAINED}-{i}" for i in range(len(folders))]
        for name, folder in zip(names, folders, strict=True):
            lora.load_adapter(model, name, folder, trainable=False)
        lora.add_mean(model, TRAINED, names)
        for name in names:
            lora.remove_adapter(model, name)
    lora.set_adapter(model, TRAINED)


def in_common(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all runs have alike."""
    if not runs:
        return {}
    return {name: value for name, value in runs[0].items() if all(run.get(name) == value for run in runs)}


@torch.no_grad()
def next_logits(model: CausalLM, prompts: Sequence[list[int]], vocabulary: int, title: str) -> Tensor:
    """Logits [n, vocabulary], fp32, of the token after each prompt."""
    bar = tqdm(prompts, desc=title, unit="prompt", disable=None)
    device = model.head_weight.device
    rows = [model.logits(model(torch.tensor([ids], device=device))[:, -1])[0, :vocabulary].float().cpu() for ids in bar]
    return torch.stack(rows)


def parity(before: Tensor, after: Tensor) -> tuple[float, float, int]:
    """The largest and the mean difference of the logits [n, V] after n prompts, and how often the likeliest next token
    is the same."""
    difference, same = (before - after).abs(), (before.argmax(-1) == after.argmax(-1)).sum()
    return difference.max().item(), difference.mean().item(), int(same)


def as_trained(asked: ProtocolSettings, run: dict[str, Any]) -> ProtocolSettings:
    """The step format and the prompts of a run, where others are not asked for."""
    usual = vars(ProtocolSettings())
    found = {name: None if value == "none" else value for name, value in run.items() if name in usual}
    return replace(asked, **{name: value for name, value in found.items() if getattr(asked, name) == usual[name]})


def write_form(model: CausalLM, folder: Path, settings: ExportSettings, layout: Layout, output: Path) -> CausalLM:
    """Writes a model or its adapter in the form of --form, and returns the model as it is read back."""
    form = settings.form
    name = "-".join(Path(adapter).name for adapter in settings.adapters) or Path(settings.model).name
    tokenizer, protocol, prompt = layout.tokenizer, layout.protocol, layout.prompt(chats.QUESTION)
    messages = chats.opening(tokenizer, protocol, chats.QUESTION)
    if form.startswith("gguf"):
        from r3lite.exporting import gguf  # needs an extra

    if form == "gguf":
        gguf.write(model, folder, tokenizer, output / GGUF, settings.weights, name)
        header = Header(output / GGUF)
        gguf.fill(model, header)
        modelfile = chats.modelfile(GGUF, protocol, tokenizer)
        chats.check_gguf(output / GGUF, gguf_tokenizer.files(header), modelfile, messages, prompt)
        write_text(output / MODELFILE, modelfile)
    elif form == "gguf-adapter":
        gguf.write_adapter(model, TRAINED, output / ADAPTER, settings.weights, name)
        gguf.fill(model, Header(output / ADAPTER), TRAINED)
        chats.write_dated(output, tokenizer)
    elif form == "adapter":
        fingerprint, dtype = weights.fingerprint(folder), DTYPES[settings.weights]
        base, _ = weights.public_name(settings.model)
        lora.save_adapter(model, TRAINED, output, base, fingerprint, dtype)
        chats.write_dated(output, tokenizer)
        thinking = tokenizer.template.variables[chats.SWITCH]
        chats.check_adapter(output, base=folder, thinking=thinking, messages=messages, ids=prompt)
        lora.load_adapter(model, "written", output, trainable=False)
        lora.set_adapter(model, "written")
    else:
        model = in_folder(model, folder, output, settings, chats.changes(folder, tokenizer))
        chats.check_folder(output, messages, prompt)
    return model


def in_folder(
    model: CausalLM, source: Path, output: Path, settings: ExportSettings, changes: dict[str, Any]
) -> CausalLM:
    """Writes the model as a folder and returns it as it is read back."""
    kind = settings.weights
    if kind != "nf4":
        most = budget_bytes(settings.max_shard_size, "--max-shard-size")
        for path, layer in list(model.named_modules()):
            if isinstance(layer, Nf4Linear):  # one without an adapter; `to` would round its absmax, too
                model.set_submodule(path, layer.dense())
        saving.save_merged(model.to(DTYPES[kind]), source, output, most, changes)
        return weights.load_model(output, DTYPES[kind], "cpu")
    with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=f".{output.name}.") as parent:
        dense = Path(parent) / "dense"  # as weights are quantized while they are read
        saving.save_merged(model, source, dense, changes=changes)
        saving.save_nf4(weights.load_model(dense, torch.float32, "cpu", quantize=True), dense, output)
    return weights.load_model(output, torch.float32, "cpu")
