"""The model card of an export: what it is and how to use it."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PureWindowsPath

from r3lite.core.config import flag
from r3lite.core.files import shipped
from r3lite.exporting.chats import QUESTION, SWITCH, TEMPLATE, opening
from r3lite.exporting.files import TRAINED_BY
from r3lite.protocols.base import Protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.tokenizer_classes import FOLLOWS_THE_FILE
from r3lite.settings import ProtocolSettings

SCORES = {"em": "exact match", "f1": "F1", "retrieval_recall": "recall of the gold paragraphs", "combined": "combined"}
FIRST_QUERY = "This writes the first query only; retrieving the documents is up to you."
SETTINGS = (
    "data",
    "algorithm",
    "max_steps",
    "learning_rate",
    "lora_r",
    "lora_alpha",
    "batch_size",
    "seed",
    "max_length",
)


@dataclass(frozen=True)
class Facts:
    """The facts that a card tells of an export."""

    base: str
    on_hub: bool  # whether `base` is a hub id
    weights: str  # their format, such as bf16
    file: str | None  # the GGUF file; None: a folder
    merged: bool  # True: the export is a whole model; False: it is an adapter of `base`
    trained: bool  # whether a run is known to have trained the export, or its adapter
    run: Mapping[str, object]  # the settings of that run; empty if they are not known
    averaged: int = 0  # number of adapters whose mean the export is; 0: it is no mean
    license: str | None = None
    scores: Mapping[str, dict] = field(default_factory=dict)


def card(facts: Facts, protocol: Protocol, settings: ProtocolSettings, tokenizer: Tokenizer) -> str:
    """Returns README.md of an export, with the header that the Hugging Face hub reads.

    `settings` are those of the protocol.
    """
    messages = opening(tokenizer, protocol, "{question}")
    turns = [f"[{message['role']}]\n{message['content']}" for message in messages]
    origin = "exported by r3lite"
    answers = "The prompt asks it to answer"
    if facts.trained:
        origin = TRAINED_BY
        answers = "It answers"
    parts = [
        _head(facts),
        f"# {facts.base}, {origin}",
        f"{_subject(facts)}, weights in {facts.weights}. {answers} questions in steps, each of which reasons and then "
        "asks a retriever or answers.",
        _run(facts.run, facts.averaged),
        _scores(facts.scores),
        f"## Prompt\n\nThe step format is `{_published(settings.format)}`. An episode opens with:",
        "\n".join(["```text", *turns, "```"]),
        "## Use",
        _use(
            facts,
            messages=messages,
            settings=settings,
            tokenizer=tokenizer,
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _subject(facts: Facts) -> str:
    """Returns what was exported, in words."""
    if not facts.trained:
        return f"The model {facts.base}, not trained further"
    if facts.run.get("no_lora"):
        return f"The model {facts.base}, with all weights trained"
    adapter = "A LoRA adapter"
    if facts.averaged:
        adapter = f"The mean of {facts.averaged} LoRA adapters"
    if facts.merged:
        return f"{adapter} merged into {facts.base}"
    return f"{adapter} of {facts.base}"


def _head(facts: Facts) -> str:
    """Returns the header that the hub reads."""
    lines = ["---"]
    if facts.on_hub:  # the hub takes only its own ids as base_model
        lines.append(f"base_model: {facts.base}")
    if facts.file:
        library = "gguf"
    elif facts.weights == "nf4":  # transformers does not know this kind of NF4
        library = "r3lite"
    elif facts.merged:
        library = "transformers"
    else:
        library = "peft"
    lines.append(f"library_name: {library}")
    if facts.license:
        lines.append(f"license: {facts.license}")
    lines.append("tags: [r3lite, multi-hop question answering, retrieval]")
    lines.append("---")
    return "\n".join(lines)


def _run(run: Mapping[str, object], averaged: int) -> str:
    """Returns a sentence with the settings of the training run; "" if none is known."""
    names = [name for name in SETTINGS if not (run.get("no_lora") and name.startswith("lora_"))]
    values = {name: run[name] for name in names if run.get(name) not in (None, "none")}
    data = values.get("data")
    if isinstance(data, str) and "," not in data:  # a file: nobody is to learn the folders of this machine
        values["data"] = PureWindowsPath(data).name  # PureWindowsPath splits at / and at \\
    settings = ", ".join(f"{name} {value}" for name, value in values.items())
    if not settings:
        return ""
    if averaged:
        return f"All were trained with: {settings}."
    return f"Its last training run: {settings}."


def _scores(scores: Mapping[str, dict]) -> str:
    """Returns a table of the scores; "" if there are none."""
    rows = []
    for name, title in SCORES.items():
        score = scores.get(name) or {}
        if score.get("value") is not None:
            rows.append(f"| {title} | {score['value']:.3f} | {score['low']:.3f} | {score['high']:.3f} |")
    if not rows:
        return ""
    lines = [f"## Scores\n\nOn {scores['n']} questions, with 95 % intervals.\n"]
    lines += ["| score | value | from | to |", "|---|---|---|---|"]
    lines += rows
    return "\n".join(lines)


def _use(facts: Facts, messages: list[dict[str, str]], settings: ProtocolSettings, tokenizer: Tokenizer) -> str:
    """Returns the commands or the program with which the export is used. `messages` open an episode."""
    if facts.file is None:
        ask = _ask(facts, settings, tokenizer)
        if facts.weights == "nf4":
            return f"Only r3lite can load these weights:\n\n{ask}"
        code = _transformers(facts, messages, tokenizer)
        return f"{code}\n\n{FIRST_QUERY} r3lite does both:\n\n{ask}"
    template_flags = ""
    if tokenizer.template.has_clock:
        template_flags = f" --jinja --chat-template-file {TEMPLATE}"
    use = "# llama.cpp; BASE.gguf is the base; prompt as above"
    lines = [f"llama-cli -m BASE.gguf --lora {facts.file} -cnv{template_flags}   {use}"]
    if facts.merged:
        lines = ["ollama create my-model -f Modelfile   # in this folder", f'ollama run my-model "{QUESTION}"']
        lines.append(f"llama-cli -m {facts.file} -cnv              # llama.cpp; give the prompt above yourself")
    return "\n".join(["```", *lines, f"```\n\n{FIRST_QUERY}"])


def _ask(facts: Facts, settings: ProtocolSettings, tokenizer: Tokenizer) -> str:
    """Returns the command that asks the export, with the format and the prompts of its training."""
    words = ["python -m r3lite.ask --model FOLDER"]
    if not facts.merged:
        words = [f"python -m r3lite.ask --model {facts.base} --adapter FOLDER"]
        if tokenizer.template.variables[SWITCH]:
            words.append("--thinking on")
    words.append("--index INDEX")
    if facts.merged and not facts.trained:
        words.append("--steps on")
    defaults = ProtocolSettings(worked_example=facts.merged)  # by default `ask --adapter` leaves the example out
    for name, value in vars(settings).items():
        if value == getattr(defaults, name):
            continue
        if value is True:
            words.append(flag(name))
        elif value is False:
            words.append(flag(f"no_{name}"))
        elif name in ("format", "init_prompt", "step_prompt"):
            words.append(f"{flag(name)} {shlex.quote(_published(value))}")
        else:
            words.append(f"{flag(name)} {shlex.quote(str(value))}")
    return "\n".join(["```", " ".join(words), "```"])


def _published(path: str) -> str:
    """Returns a path in the package of r3lite as it is, and the last part of any other path: nobody is to learn the
    folders of this machine."""
    if shipped(path).exists() and not PureWindowsPath(path).anchor:
        return path
    return PureWindowsPath(path).name


def _transformers(facts: Facts, messages: list[dict[str, str]], tokenizer: Tokenizer) -> str:
    """Returns a Python program that writes the first step with transformers. Each variable is a piece of its text."""
    *earlier, last = messages
    earlier_lines = "".join(f"    {message!r},\n" for message in earlier)
    tokenizer_class = "AutoTokenizer"
    model = "AutoModelForCausalLM.from_pretrained(folder)"
    tokenizer_source = "folder"
    imports = ""
    base = ""
    thinking = ""
    end_token = ""
    template = ""
    if not facts.merged:  # the program loads tokenizer, template and end-of-text token from the base
        if tokenizer.other_class:
            tokenizer_class = FOLLOWS_THE_FILE
        imports = "from peft import PeftModel\n"
        model = "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)"
        base = f"base = {facts.base!r}\n"
        if not facts.on_hub:
            base = f"base = {facts.base!r}  # its folder\n"
        tokenizer_source = "base"
        end_token = f", eos_token_id={tokenizer.stop_id}"
        if SWITCH in tokenizer.template.source:
            thinking = f", {SWITCH}={tokenizer.template.variables[SWITCH]}"
        if tokenizer.template.has_clock:
            template_text = f'open(f"{{folder}}/{TEMPLATE}", encoding="utf-8").read()'
            template = f"\ntokenizer.chat_template = {template_text}  # the base's writes today's date"
    return f"""```python
{imports}from transformers import AutoModelForCausalLM, {tokenizer_class}

folder = "."  # this folder
{base}tokenizer = {tokenizer_class}.from_pretrained({tokenizer_source}){template}
model = {model}
prompt = {last["content"]!r}
messages = [
{earlier_lines}    {{"role": "user", "content": prompt.replace("{{question}}", {QUESTION!r})}},
]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True{thinking}
)
written = model.generate(**inputs, max_new_tokens=128, do_sample=False{end_token})
print(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""
