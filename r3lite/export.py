"""Exports a trained model: a merged folder for transformers, or a GGUF file for llama.cpp and Ollama."""

from pathlib import Path

from r3lite.core import command, run_files
from r3lite.core.errors import R3LiteError, UsageError, extra
from r3lite.core.files import names_in, read_record, sole_writer, sweep
from r3lite.exporting import hub
from r3lite.exporting.files import FILES, is_export
from r3lite.settings import CommandConfig, ExportSettings, ProtocolSettings


class ExportConfig(CommandConfig):
    """Merges an adapter into its base model and writes the result for other programs to the folder --output. Without
    --adapter, exports the base model.

    python -m r3lite.export --adapter runs/ppo --output my-model
    python -m r3lite.export --adapter runs/ppo --form gguf --weights q8_0 --output my-gguf
    python -m r3lite.export --adapter runs/ppo --form adapter --weights fp32 --output my-adapter
    python -m r3lite.export --average runs/seed-0,runs/seed-1 --output my-mean
    python -m r3lite.export --model Qwen/Qwen2.5-0.5B --form gguf --output base-gguf
    python -m r3lite.export --adapter runs/ppo --output my-model --push me/my-model --yes

    The merge is in fp32 and needs 4 bytes of memory per weight. Format, prompts, chat template and end-of-turn token
    are those of the adapter's run; if other programs would build a different prompt, the export stops with an error.
    The exported model is loaded again and compared with the original on --prompts prompts: logits and most likely next
    token. The folder also has a model card with the base model, settings, scores (--evaluation), prompt and example
    code, and for GGUF a Modelfile for Ollama.
    """

    export: ExportSettings = ExportSettings()
    protocol: ProtocolSettings = ProtocolSettings()


def export(config: ExportConfig) -> None:
    """Writes the export to --output, unless it was exported there before, and with --push uploads it."""
    settings = config.export
    check_output(config)
    # What would stop the export is checked before the merge, which takes minutes.
    if FILES[settings.form]:
        with extra("gguf", "a GGUF file"):
            import gguf  # noqa: F401
    if settings.yes:
        hub.token()  # raises an error if there is no token
    scores = {}
    if settings.evaluation:
        scores = read_record(Path(settings.evaluation) / run_files.SCORES, "Pass the folder of an evaluation.").values
    output = Path(config.common.output)
    with sole_writer(output, folder=False):
        check_output(config)  # again: another process may have written there before this one had the lock
        sweep(output)  # removes what a killed export left
        if is_export(output):
            print(f"{output} was already exported, and is not changed")
        else:
            from r3lite.assembly import exporter

            exporter.write(settings, config, scores, output)
        if settings.push:
            upload(settings, output)


def check_output(config: ExportConfig) -> None:
    """Raises an error if --output is missing or occupied. With --push it may hold an export, which is then uploaded."""
    if config.common.output is None:
        raise UsageError("--output is missing: pass a new folder", code="output-missing")
    output = Path(config.common.output)
    is_uploaded = config.export.push and is_export(output)
    if is_occupied(output) and not is_uploaded:
        raise R3LiteError(f"--output {output} already exists", "Pass a new folder.", code="output-exists")


def is_occupied(output: Path) -> bool:
    """Returns whether a path is that of a file, or of a folder that is not empty."""
    if output.is_dir():
        return bool(names_in(output))
    return output.exists()


def plan(config: ExportConfig) -> str:
    """Checks --output as the export does, for `--dry-run`; returns no text."""
    check_output(config)
    return ""


def upload(settings: ExportSettings, output: Path) -> None:
    """Prints what --push uploads, and with --yes does it."""
    print(hub.summary(output, settings.push, settings.push_as))
    if settings.yes:
        print(f"uploaded    {hub.push(output, settings.push, settings.push_as)}")
    else:
        print("nothing was uploaded: check the folder, then run the same command with --yes")


main = command.Command("export", ExportConfig(), work=export, plan=plan)

if __name__ == "__main__":
    raise SystemExit(main())
