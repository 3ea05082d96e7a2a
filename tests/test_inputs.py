"""What a training run reads is in its identity: with other content under the same names it is not resumed."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from r3lite import ppo
from r3lite.assembly.inputs import fingerprint_of_adapter, fingerprints_of_rl
from r3lite.core.invocation import with_values
from r3lite.datasets.qa import read_questions
from r3lite.datasets.sources import protocols_of
from r3lite.models import lora, weights
from r3lite.models.weights import resolve_folder
from r3lite.settings import PpoConfig
from r3lite.training import checkpoint
from tests.question_rows import HOTPOT

OWN_FORMAT = 'kind = "headings"\nprompt = "Q: {question}"\ndocuments_prompt = "D: {documents}"\n'
# By what an error calls an input: the setting that names it, and the file that is changed.
INPUTS = {
    "the adapter of --adapter": ("adapter", "sft/adapter_config.json"),
    "the passages of --corpus": ("corpus", "corpus.jsonl"),
    "the passages of --index": ("index", "index/manifest.json"),
    "the passages of --source-index News": ("source_index", "news/passages.jsonl"),
    "the model of --encoder": ("encoder", "encoder/config.json"),
    "the model of --rerank": ("rerank", "reranker/config.json"),
    "the model of --judge-model": ("judge_model", "judge/config.json"),
    "the format of --format": ("format", "own.toml"),
    "the rewards of own_rewards_of_inputs": ("rewards", "own_rewards_of_inputs.py"),
    "the prompts": ("init_prompt", "init.txt"),
    "the paragraphs of the questions": ("data", "questions.jsonl"),
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A run of RL that reads as much as a run can, from files in `tmp_path`."""
    files = {file: "{}\n" for _, file in INPUTS.values()}
    files |= {"init.txt": "Now: {question}", "step.txt": "{documents}", "own.toml": OWN_FORMAT}
    files["own_rewards_of_inputs.py"] = "def brevity(episode):\n    return 0.0\n"
    files["questions.jsonl"] = json.dumps(HOTPOT)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    values = {setting: file.partition("/")[0] for setting, file in INPUTS.values()}
    values |= {"source_index": ["News=news"], "rewards": "own_rewards_of_inputs:brevity=1", "judge": "local"}
    yield with_values(PpoConfig(), values | {"step_prompt": "step.txt"})
    sys.modules.pop("own_rewards_of_inputs", None)


def inputs_of(config: PpoConfig) -> dict[str, str]:
    return fingerprints_of_rl(
        config, read_questions(config.data.data), [], protocols_of(config.protocol, config.mixture)
    )


@pytest.mark.parametrize("name", INPUTS)
def test_every_input_is_told_apart_by_its_content(settings, name):
    fingerprints_before = inputs_of(settings)
    file = Path(INPUTS[name][1])
    assert fingerprints_before.keys() == INPUTS.keys() and inputs_of(settings) == fingerprints_before
    text = file.read_text(encoding="utf-8")
    changed_text = text.replace("{}", '{"x": 1}').replace("Now:", "Then:").replace("kind", "# changed\nkind")
    file.write_text(
        changed_text.replace("0.0", "1.0").replace(HOTPOT["context"][0][1][0], "Another."), encoding="utf-8"
    )
    fingerprints_after = inputs_of(settings)
    assert [key for key in fingerprints_after if fingerprints_after[key] != fingerprints_before[key]] == [name]


def test_the_prompt_for_documents_and_those_of_other_formats_count(settings):
    fingerprints_before = inputs_of(settings)
    Path("step.txt").write_text("Read: {documents}", encoding="utf-8")
    assert inputs_of(settings)["the prompts"] != fingerprints_before["the prompts"]
    config, protocols = settings, protocols_of(settings.protocol, settings.mixture)
    with_second_format = fingerprints_of_rl(config, [], [], protocols | {"talk": protocols[""]})
    assert with_second_format["the prompts"] != fingerprints_of_rl(config, [], [], protocols)["the prompts"]


def test_questions_that_are_held_out_count_and_gold_ones(settings):
    (question,) = read_questions(settings.data.data)
    protocols = protocols_of(settings.protocol, settings.mixture)
    key = "the paragraphs of the questions"
    fingerprints = [
        fingerprints_of_rl(settings, training, held_out, protocols)[key]
        for training, held_out in (([question], []), ([question], [question]), ([replace(question, gold=())], []))
    ]
    assert len(set(fingerprints)) == 3


def test_what_is_not_here_has_no_fingerprint():
    config = with_values(PpoConfig(), {"retriever": "http://host:8000/retrieve", "encoder": "intfloat/e5-base-v2"})
    assert inputs_of_none(config).keys() == {"the prompts", "the paragraphs of the questions"}
    assert fingerprint_of_adapter(config.model) == {}


def inputs_of_none(config: PpoConfig) -> dict[str, str]:
    return fingerprints_of_rl(config, [], [], protocols_of(config.protocol, config.mixture))


WATCHED: list[list[str]] = []  # names of files that are opened, while someone wants to know


def _watch(event: str, arguments: tuple) -> None:
    if event == "open" and WATCHED and isinstance(arguments[0], str):
        WATCHED[-1].append(arguments[0])


@pytest.fixture
def opened():
    """The files that are opened during a test; a hook cannot be taken away again."""
    sys.addaudithook(_watch)
    WATCHED.append([])
    yield WATCHED[-1]
    WATCHED.clear()


def write_files(folder: Path) -> None:
    """An adapter, a corpus, a question and a prompt."""
    model = weights.load_model(resolve_folder("tiny"), torch.float32, torch.device("cpu"))
    lora.add_adapter(model, "policy", 4, 8)
    lora.save_adapter(model, "policy", folder / "sft", "tiny", weights.fingerprint(resolve_folder("tiny")))
    passage = {"id": "1", "title": "A", "text": "The river Lom runs through A."}
    question = {"id": "1", "question": "Which river runs through A?", "answer": "Lom"}
    texts = {"corpus.jsonl": json.dumps(passage), "questions.jsonl": json.dumps(question)}
    for name, text in (texts | {"prompt.txt": "The question: {question}"}).items():
        (folder / name).write_text(text, encoding="utf-8")


def test_a_run_is_not_resumed_with_other_files_and_reads_no_others(tmp_path, capsys, opened):
    """With the adapter of another run the KL divergence was .006 instead of 0; with another prompt, or half of the
    corpus, the run went on without a word. Inputs of an earlier version are not known, and count as unchanged."""
    write_files(tmp_path)
    arguments = ["--preset", "tiny", "--algorithm", "grpo", "--guard", "off", "--device", "cpu", "--dtype", "fp32"]
    small = "--batch-size 1 --num-generations 2 --max-steps 2 --max-new-tokens 8 --max-hops 1"
    arguments += small.split()
    places = {"data": "questions.jsonl", "corpus": "corpus.jsonl", "init-prompt": "prompt.txt", "adapter": "sft"}
    arguments += [x for name, place in places.items() for x in (f"--{name}", str(tmp_path / place))]
    arguments += ["--output", str(tmp_path / "rl")]
    opened.clear()
    assert ppo.main([*arguments, "--stop-after", "1"]) == 0
    read = {Path(name).relative_to(tmp_path).as_posix() for name in opened if Path(name).is_relative_to(tmp_path)}
    input_files = {name for name in read if not name.startswith("rl/") and (tmp_path / name).is_file()}
    input_files -= {"sft/adapter_model.safetensors"}  # which is not always opened by Python
    inputs = {"corpus.jsonl", "prompt.txt", "sft/adapter_config.json"}
    assert input_files == inputs | {"questions.jsonl"}  # which are the data

    for name in inputs:
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write("\n.\n" if name == "prompt.txt" else "\n")
    assert ppo.main([*arguments, "--resume", "auto"]) == 1
    message = "has changed since it started: the adapter of --adapter, the prompts, the passages of --corpus"
    assert message in capsys.readouterr().err

    step = tmp_path / "rl" / "checkpoint-1" / checkpoint.STATE
    state = json.loads(step.read_text(encoding="utf-8"))
    del state["inputs"]
    step.write_text(json.dumps(state), encoding="utf-8")
    manifest = json.loads((step.parent / checkpoint.MANIFEST).read_text(encoding="utf-8"))
    manifest["files"][checkpoint.STATE] = {"bytes": step.stat().st_size, "crc32": checkpoint.crc(step)}
    (step.parent / checkpoint.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    assert ppo.main([*arguments, "--resume", "auto"]) == 0
