"""Writes a trained model for other programs, with a card, and compares what was written with what it was made of."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from r3lite.assembly.policy import check_base, warn_of_other_format
from r3lite.core.files import PART, move, shipped, write_text
from r3lite.core.inherited import in_common, settings_of
from r3lite.datasets.qa import read_questions
from r3lite.devices.precision import DTYPES
from r3lite.exporting import chats
from r3lite.exporting.card import Facts, card
from r3lite.exporting.files import ADAPTER, CARD, FILES, GGUF, MODELFILE
from r3lite.models import gguf_tokenizer, lora, saving, weights
from r3lite.models.causal_lm import CausalLM
from r3lite.models.gguf_files import Header
from r3lite.models.projections import Nf4Linear
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import CommandConfig, ExportSettings, LengthSettings, ModelSettings
from r3lite.settings.common import budget_bytes
from r3lite.training.earlier_run import result_of_run

TRAINED = "trained"  # the adapter's name
REREAD = "written"  # the name of the adapter that is read back


def write(settings: ExportSettings, config: CommandConfig, scores: dict, output: Path) -> None:
    """Writes the export and reads it back; prints what is written and how the logits differ.

    The forms `folder` and `gguf` have the adapter merged into the base. All files are written to a folder beside
    `output`, which takes its place when it is complete. Raises R3LiteError, and writes no `output`, if other programs
    would build other prompts from the files than those of the training.
    """
    folder = weights.resolve_folder(settings.model)
    for adapter in settings.adapters:
        check_base(ModelSettings(model=settings.model, adapter=adapter), weights.fingerprint(folder))
    adapters = settings.adapters or (None,)  # None: the model itself may be that of a run
    run_folders = [result_of_run(settings.model, adapter) for adapter in adapters]
    runs = [settings_of(run_folder) for run_folder in run_folders if run_folder]
    run = in_common(runs)
    for adapter in adapters:
        warn_of_other_format(adapter, config)
    protocol = build_protocol(config.protocol)
    tokenizer = Tokenizer.load(folder, run.get("thinking", "auto"))
    layout = Layout(tokenizer, protocol, LengthSettings())
    prompts = read_prompts(settings, layout)
    model = weights.load_model(folder, torch.float32, "cpu")
    if settings.adapters:
        load_adapters(model, settings.adapters)
    logits = None
    if prompts:
        logits = next_logits(
            model,
            prompts=prompts,
            vocabulary=tokenizer.size,
            title="before",
        )
    facts = facts_of(settings, run, trained=bool(runs), scores=scores)
    if facts.merged and settings.adapters:
        lora.merge_adapter(model, TRAINED)
    place = output.resolve()
    unfinished = place.with_name(f".{place.name}.new{PART}") / place.name
    try:
        unfinished.parent.mkdir(parents=True)
        model = write_form(
            model,
            folder=folder,
            settings=settings,
            layout=layout,
            output=unfinished,
        )
        text = card(
            facts,
            protocol=protocol,
            settings=config.protocol,
            tokenizer=tokenizer,
        )
        write_text(unfinished / CARD, text)
        if place.exists():
            place.rmdir()  # an empty folder: Windows cannot rename a folder to a name that exists
        move(unfinished, place)
    finally:
        shutil.rmtree(unfinished.parent, ignore_errors=True)
    print_size(output, facts.file)
    if logits is not None:
        logits_of_copy = next_logits(
            model,
            prompts=prompts,
            vocabulary=tokenizer.size,
            title="after",
        )
        print_parity(logits, logits_of_copy)


def read_prompts(settings: ExportSettings, layout: Layout) -> list[list[int]]:
    """Returns the token ids of the prompts on which logits are compared."""
    if not settings.prompts:
        return []
    questions = read_questions(settings.questions or shipped("data", "world", "test.jsonl"))
    return [layout.prompt(question.text) for question in questions[: settings.prompts]]


def facts_of(settings: ExportSettings, run: dict[str, Any], trained: bool, scores: dict) -> Facts:
    """Returns what the card says of an export.

    `trained` says whether runs of r3lite have trained it; `run` has the settings that these runs have in common.
    """
    base, on_hub = weights.public_name(settings.model)
    return Facts(
        base=base,
        on_hub=on_hub,
        weights=settings.weights,
        file=FILES[settings.form],
        merged=settings.form in ("folder", "gguf"),
        trained=trained,
        run=run,
        averaged=len(settings.average or ()),
        license=settings.license,
        scores=scores,
    )


def print_size(output: Path, file: str | None) -> None:
    """Prints what is written, and the size of all files."""
    size = sum(path.stat().st_size for path in output.iterdir())
    main_file = output / file if file else output
    print(f"written to  {main_file}, {size / (1 << 20):,.0f} MiB in total; model card: {output / CARD}")


def print_parity(logits: Tensor, logits_of_copy: Tensor) -> None:
    """Prints how the logits [n, V] of the model differ from those of what was read back."""
    largest, mean, same_token = parity(logits, logits_of_copy)
    differ = f"logits differ by {mean:.2g} on average, {largest:.2g} at most"
    likeliest = f"the most likely next token is the same for {same_token}"
    print(f"compared    on {len(logits)} prompts: {differ}; {likeliest}")


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


@torch.no_grad()
def next_logits(model: CausalLM, prompts: Sequence[list[int]], vocabulary: int, title: str) -> Tensor:
    """Returns the logits [n, vocabulary], fp32, of the token after each prompt."""
    device = model.head_weight.device
    rows = []
    for prompt in tqdm(prompts, desc=title, unit="prompt", disable=None):
        hidden = model(torch.tensor([prompt], device=device))  # [1, T, C]
        logits = model.logits(hidden[:, -1])  # [1, V]
        rows.append(logits[0, :vocabulary].float().cpu())
    return torch.stack(rows)


def parity(logits: Tensor, logits_of_copy: Tensor) -> tuple[float, float, int]:
    """Returns the largest and the mean difference of the logits [n, V] after n prompts, and how often the likeliest
    next token is the same."""
    difference = (logits - logits_of_copy).abs()
    same_token = (logits.argmax(-1) == logits_of_copy.argmax(-1)).sum()
    return difference.max().item(), difference.mean().item(), int(same_token)


def write_form(model: CausalLM, folder: Path, settings: ExportSettings, layout: Layout, output: Path) -> CausalLM:
    """Writes a model or its adapter in the form of --form, and returns the model as it is read back."""
    form = settings.form
    name = "-".join(Path(adapter).name for adapter in settings.adapters) or Path(settings.model).name
    tokenizer = layout.tokenizer
    protocol = layout.protocol
    prompt = layout.prompt(chats.QUESTION)
    messages = chats.opening(tokenizer, protocol, chats.QUESTION)
    if form.startswith("gguf"):
        from r3lite.exporting import gguf  # needs an extra

    if form == "gguf":
        gguf.write(
            model,
            folder=folder,
            tokenizer=tokenizer,
            path=output / GGUF,
            weights=settings.weights,
            name=name,
        )
        header = Header(output / GGUF)
        gguf.fill(model, header)
        modelfile = chats.modelfile(GGUF, protocol, tokenizer)
        chats.check_gguf(
            output / GGUF,
            files=gguf_tokenizer.files(header),
            modelfile=modelfile,
            messages=messages,
            ids=prompt,
        )
        write_text(output / MODELFILE, modelfile)
    elif form == "gguf-adapter":
        gguf.write_adapter(
            model,
            adapter=TRAINED,
            path=output / ADAPTER,
            weights=settings.weights,
            name=name,
        )
        gguf.fill(model, Header(output / ADAPTER), TRAINED)
        chats.write_dated(output, tokenizer)
    elif form == "adapter":
        base_model, _ = weights.public_name(settings.model)
        lora.save_adapter(
            model,
            name=TRAINED,
            folder=output,
            base_model=base_model,
            fingerprint=weights.fingerprint(folder),
            dtype=DTYPES[settings.weights],
        )
        chats.write_dated(output, tokenizer)
        chats.check_adapter(
            output,
            base=folder,
            thinking=tokenizer.template.variables[chats.SWITCH],
            messages=messages,
            ids=prompt,
        )
        lora.load_adapter(model, REREAD, output, trainable=False)
        lora.set_adapter(model, REREAD)
    else:
        model = in_folder(
            model,
            source=folder,
            output=output,
            settings=settings,
            changes=chats.changes(folder, tokenizer),
        )
        chats.check_folder(output, messages, prompt)
    return model


def in_folder(
    model: CausalLM, source: Path, output: Path, settings: ExportSettings, changes: dict[str, Any]
) -> CausalLM:
    """Writes the model as a folder and returns it as it is read back."""
    kind = settings.weights
    if kind != "nf4":
        max_shard = budget_bytes(settings.max_shard_size, "--max-shard-size")
        for path, layer in list(model.named_modules()):
            # A layer that had no adapter is still in NF4. Left so, `to` below would round its absmax, too.
            if isinstance(layer, Nf4Linear):
                model.set_submodule(path, layer.dense())
        saving.save_merged(
            model.to(DTYPES[kind]),
            source_folder=source,
            out_folder=output,
            max_shard=max_shard,
            changes=changes,
        )
        return weights.load_model(output, DTYPES[kind], "cpu")
    with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=f".{output.name}.") as parent:
        dense = Path(parent) / "dense"  # on disk, since weights are quantized while they are read
        saving.save_merged(model, source, dense, changes=changes)
        quantized = weights.load_model(dense, torch.float32, "cpu", quantize=True)
        saving.save_nf4(quantized, dense, output)
    return weights.load_model(output, torch.float32, "cpu")
