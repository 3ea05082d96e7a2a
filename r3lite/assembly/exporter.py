"""Writes a trained model for other programs, with a card, and compares what was written with what it was made of."""

import tempfile
from itertools import islice
from pathlib import Path

import torch

from r3lite.assembly.policy import check_base
from r3lite.core.files import shipped, write_text
from r3lite.datasets.qa import read_questions
from r3lite.devices.precision import DTYPES
from r3lite.exporting import parity
from r3lite.exporting.card import Facts, card, modelfile
from r3lite.exporting.files import CARD, FILES, GGUF, MODELFILE
from r3lite.models import lora, saving, weights
from r3lite.models.causal_lm import CausalLM
from r3lite.models.projections import Nf4Linear
from r3lite.protocols.base import Protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Layout
from r3lite.settings import ExportSettings, LengthSettings, ModelSettings
from r3lite.settings.common import budget_bytes
from r3lite.training.earlier_run import settings_of


def write(settings: ExportSettings, format: str, protocol: Protocol, scores: dict, output: Path) -> None:
    """Merges, or not, writes and reads back; tells what is written and how near the two are."""
    folder = weights.resolve_folder(settings.model)
    check_base(ModelSettings(model=settings.model, adapter=settings.adapter), weights.fingerprint(folder))
    tokenizer, prompts = Tokenizer.load(folder), None
    if settings.prompts:
        layout = Layout(tokenizer, protocol, LengthSettings())
        path = settings.questions or str(shipped("data", "world", "test.jsonl"))
        prompts = [layout.prompt(question.text) for question in islice(read_questions(path), settings.prompts)]
    model = weights.load_model(folder, torch.float32, "cpu")
    lora.load_adapter(model, "trained", settings.adapter, trainable=False)
    lora.set_adapter(model, "trained")
    before = parity.next_logits(model, prompts, tokenizer.size, "before") if prompts else None
    file, name = FILES[settings.form], Path(settings.adapter).name
    written = output / file if file else output
    if merged := settings.form in ("folder", "gguf"):
        lora.merge_adapter(model, "trained")
    if settings.form.startswith("gguf"):
        from r3lite.exporting import gguf  # needs an extra

    if settings.form == "gguf":
        gguf.write(model, folder, written, settings.weights, name)
        gguf.fill(model, written)
        write_text(output / MODELFILE, modelfile(GGUF, protocol, tokenizer))
    elif settings.form == "gguf-adapter":
        gguf.write_adapter(model, "trained", written, settings.weights, name)
        gguf.fill_adapter(model, "trained", written)
    elif settings.form == "adapter":
        fingerprint, dtype = weights.fingerprint(folder), DTYPES[settings.weights]
        lora.save_adapter(model, "trained", output, settings.model, fingerprint, dtype)
        lora.load_adapter(model, "written", output, trainable=False)
        lora.set_adapter(model, "written")
    else:
        model = in_folder(model, folder, output, settings)
    run = settings_of(settings.adapter)
    facts = Facts(settings.model, settings.weights, file, merged, run, settings.license, scores)
    write_text(output / CARD, card(facts, protocol, format))
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"written to  {written}, {size / (1 << 20):,.0f} MiB in all, with a card in {output / CARD}")
    if before is not None:
        print(parity.compare(before, parity.next_logits(model, prompts, tokenizer.size, "after")).told())


def in_folder(model: CausalLM, source: Path, output: Path, settings: ExportSettings) -> CausalLM:
    """Writes the model as a folder and returns it as it is read back."""
    kind = settings.weights
    if kind != "nf4":
        most = budget_bytes(settings.max_shard_size, "--max-shard-size")
        for path, layer in list(model.named_modules()):
            if isinstance(layer, Nf4Linear):  # one without an adapter; `to` would round its absmax, too
                model.set_submodule(path, layer.dense())
        saving.save_merged(model.to(DTYPES[kind]), source, output, most)
        return weights.load_model(output, DTYPES[kind], "cpu")
    with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=f".{output.name}.") as parent:
        dense = Path(parent) / "dense"  # as weights are quantized while they are read
        saving.save_merged(model, source, dense)
        quantized = weights.load_model(dense, torch.float32, "cpu", quantize=True)
        saving.save_nf4(quantized, dense, output)
    return weights.load_model(output, torch.float32, "cpu")
