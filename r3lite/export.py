"""Exports a trained model: a merged folder for transformers, or a GGUF file for llama.cpp and Ollama, with a card."""

import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from r3lite.core import command
from r3lite.core.config import UsageError, load_toml
from r3lite.core.errors import R3LiteError
from r3lite.core.files import shipped
from r3lite.settings import Common, ExportSettings, ModelSettings, ProtocolSettings

if TYPE_CHECKING:  # torch is loaded after the arguments are read, so that --help answers at once
    from r3lite.models.qwen2 import Qwen2
    from r3lite.protocols.base import Protocol

GGUF, ADAPTER, CARD, MODELFILE = "model.gguf", "adapter.gguf", "README.md", "Modelfile"

FILES = {"folder": None, "gguf": GGUF, "adapter": None, "gguf-adapter": ADAPTER}  # None: the folder itself


@dataclass(frozen=True)
class ExportConfig:
    """Merges an adapter into its base and writes the result for other programs into the folder --output.

    python -m r3lite.export --adapter runs/ppo --output my-model
    python -m r3lite.export --adapter runs/ppo --form gguf --weights q8_0 --output my-gguf
    python -m r3lite.export --adapter runs/ppo --form adapter --weights fp32 --output my-adapter
    python -m r3lite.export --adapter runs/ppo --output my-model --push me/my-model --yes

    The merge is in fp32, and takes 4 bytes a weight of memory. What was written is read back and compared: after
    --prompts prompts, the logits of both, and whether the likeliest next token is the same. The folder has a model card
    with base, settings, scores (--evaluation), prompt and a snippet, and for GGUF a Modelfile for Ollama.
    """

    common: Common = Common()
    export: ExportSettings = ExportSettings()
    protocol: ProtocolSettings = ProtocolSettings()


def export(config: ExportConfig) -> None:
    from r3lite.core.files import names_in, sole_writer
    from r3lite.exporting import hub
    from r3lite.protocols.registry import build_protocol

    settings = config.export
    if config.common.output is None:
        raise UsageError("--output is missing: the folder to write")
    if FILES[settings.form]:
        from r3lite.exporting import gguf

        gguf.check()  # before the merge
    if settings.yes:
        hub.token()  # before the merge, too
    protocol = build_protocol(config.protocol)
    scores = read_scores(settings.evaluation)
    output = Path(config.common.output)
    with sole_writer(output, folder=False):
        if settings.push and is_export(output):
            print(f"{output} was written before, and stays as it is")
        elif names_in(output) if output.is_dir() else output.exists():
            raise R3LiteError(f"--output {output} is there already", "Name a new folder.")
        else:
            write(config, protocol, scores, output)
        if settings.push:
            upload(settings, output)


def is_export(folder: Path) -> bool:
    """Whether a folder is what this command writes: one with a card, whose weights are beside it."""
    weights = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", GGUF, ADAPTER)
    return (folder / CARD).is_file() and any((folder / name).is_file() for name in weights)


def upload(settings: ExportSettings, folder: Path) -> None:
    """Prints what --push would upload, and uploads it if --yes was given."""
    from r3lite.exporting import hub

    print(hub.summary(folder, settings.push, settings.push_as))
    if settings.yes:
        print(f"uploaded    {hub.push(folder, settings.push, settings.push_as)}")
    else:
        print("nothing was uploaded: look at the folder, then give the same command with --yes")


def read_scores(folder: str | None) -> dict:
    """What scores.json in an evaluation's folder holds; empty without a folder."""
    from r3lite.core.files import read_record

    return read_record(Path(folder) / "scores.json", "Name the folder of an evaluation.").values if folder else {}


def write(config: ExportConfig, protocol: "Protocol", scores: dict, output: Path) -> None:
    import torch

    from r3lite.assembly.policy import check_base
    from r3lite.core.files import write_text
    from r3lite.devices.precision import DTYPES
    from r3lite.exporting import gguf, parity
    from r3lite.exporting.card import Facts, card, modelfile
    from r3lite.models import lora, weights
    from r3lite.protocols.tokenizer import Tokenizer

    settings = config.export
    folder = weights.resolve_folder(settings.model)
    check_base(ModelSettings(model=settings.model, adapter=settings.adapter), weights.fingerprint(folder))
    tokenizer, prompts = Tokenizer.load(folder), None
    if settings.prompts:
        prompts = [tokenizer.open_chat(protocol.opening(q), protocol.system) for q in questions(settings, protocol)]
    model = weights.load_qwen2(folder, torch.float32, "cpu")
    lora.load_adapter(model, "trained", settings.adapter, trainable=False)
    lora.set_adapter(model, "trained")
    before = parity.next_logits(model, prompts, tokenizer.size, "before") if prompts else None
    file, name = FILES[settings.form], Path(settings.adapter).name
    written = output / file if file else output
    if merged := settings.form in ("folder", "gguf"):
        lora.merge_adapter(model, "trained")
    if settings.form == "gguf":
        gguf.write(model, folder, written, settings.weights, name)
        gguf.fill(model, written)
        write_text(output / MODELFILE, modelfile(GGUF, protocol))
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
    run = run_of(settings.adapter)
    facts = Facts(settings.model, settings.weights, file, merged, run, settings.license, scores)
    write_text(output / CARD, card(facts, protocol, config.protocol.format))
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"written to  {written}, {size / (1 << 20):,.0f} MiB in all, with a card in {output / CARD}")
    if before is not None:
        print(parity.compare(before, parity.next_logits(model, prompts, tokenizer.size, "after")).told())


def in_folder(model: "Qwen2", source: Path, output: Path, settings: ExportSettings) -> "Qwen2":
    """Writes the model as a folder and returns it as it is read back."""
    import tempfile

    import torch

    from r3lite.devices.precision import DTYPES
    from r3lite.models import weights
    from r3lite.settings.common import budget_bytes

    kind = settings.weights
    if kind != "nf4":
        most = budget_bytes(settings.max_shard_size, "--max-shard-size")
        weights.save_merged(model.to(DTYPES[kind]), source, output, most)
        return weights.load_qwen2(output, DTYPES[kind], "cpu")
    with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=f".{output.name}.") as parent:
        dense = Path(parent) / "dense"  # as weights are quantized while they are read
        weights.save_merged(model, source, dense)
        quantized = weights.load_qwen2(dense, torch.float32, "cpu", quantize=True)
        weights.save_nf4(quantized, dense, output)
    return weights.load_qwen2(output, torch.float32, "cpu")


def questions(settings: ExportSettings, protocol: "Protocol") -> list[str]:
    """The first --prompts questions, as they stand in a prompt."""
    from r3lite.datasets.qa import read_questions

    path = settings.questions or str(shipped("data", "world", "test.jsonl"))
    return [protocol.quoted(question.text) for question in islice(read_questions(path), settings.prompts)]


def run_of(adapter: str) -> dict:
    """The settings of the run that wrote an adapter, if its folder is beside them."""
    for folder in (Path(adapter), Path(adapter).parent):
        if (folder / "config.toml").exists():
            return next((t for t in load_toml(folder / "config.toml").values() if isinstance(t, dict)), {})
    return {}


def main(argv: list[str] | None = None) -> int:
    return command.run("export", ExportConfig(), export, argv)


if __name__ == "__main__":
    sys.exit(main())
