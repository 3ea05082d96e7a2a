"""Every reader against hostile input made from its own layout: each one is used rightly or refused, in time.

For each reader there is a valid sample. Each case changes one place of it to a value of another type or out of range,
or breaks its text. The reader must raise R3LiteError that names the file: any other exception, a wait or a sample that
is taken all the same is a failure. Places that a reader rightly ignores, or takes in several forms, are named here.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from r3lite.core.errors import R3LiteError
from r3lite.core.files import shipped
from r3lite.datasets.qa import read_questions
from r3lite.datasets.trajectories import read_rows
from r3lite.models.bert import read_bert_config
from r3lite.models.lora import read_adapter_config
from r3lite.models.tensor_files import write_tensors
from r3lite.models.weights import read_config
from r3lite.protocols.r3 import R3
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.retrieval.corpus import read_corpus
from r3lite.retrieval.procedures import read_procedures
from r3lite.training import checkpoint
from tests.errors import raises
from tests.question_rows import HOTPOT, MUSIQUE, TWO_WIKI

PROTOCOL = R3("{question}", "{documents}")
HUGE = "9" * 5000
# What a value of each type must never be taken for.
WRONG: dict[type, list] = {
    str: [7, 1.5, True, [], ["a"], {}, {"a": 1}],
    bool: ["false", "true", 0, 1, [], {}, 0.0],
    int: ["1", True, 1.5, [], {}, -(10**30), 10**30],
    float: ["0.5", True, [], {}, 10**400],
    list: ["text", 7, True, {}, {"a": 1}],
    dict: [[], "text", 7, True],
}
# Texts that are no sound JSON, made of the text of a sound one.
BROKEN: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) // 2],
    "NaN": lambda text: text[:-1] + ', "x-extra": NaN}',
    "Infinity": lambda text: text[:-1] + ', "x-extra": [-Infinity]}',
    "a key twice": lambda text: text[:-1] + ', "x-extra": 1, "x-extra": 2}',
    "thousands of digits": lambda text: text[:-1] + f', "x-extra": {HUGE}}}',
    "deep nesting": lambda text: text[:-1] + f', "x-extra": {"[" * 5000}{"]" * 5000}}}',
    "nesting that json takes": lambda text: text[:-1] + f', "x-extra": {"[" * 200}{"]" * 200}}}',
    "half a surrogate pair": lambda text: text[:-1] + r', "x-extra": "\ud83d"}',
    "a second value": lambda text: text + " " + text,
    "a list": lambda text: f"[[{text}]]",
    "a number": lambda text: "7",
    "nothing": lambda text: "",
}


@dataclass
class Reader:
    """A reader with a valid sample: `read` takes the path of a file that holds it."""

    sample: dict
    read: Callable[[Path], object]
    file: str = "sample.jsonl"
    beside: Path | None = None  # a folder whose other files the reader needs
    ignored: tuple[str, ...] = ()  # keys that the reader does not use, at any depth
    lenient: Callable[[str, object], bool] = field(default=lambda key, value: False)


def answer_or_id(key: str, value: object) -> bool:
    """Answers may be text, a number or a list of them, and an id is text or a whole number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 10**300
    if key in ("id", "_id"):
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return key in ("answer", "answers") and (is_number or value in (["a"], "text"))


def in_evidence(key: str, value: object) -> bool:
    """An evidence of 2WikiMultiHopQA may name numbers."""
    return key in ("0", "1", "2") and isinstance(value, (int, float)) and not isinstance(value, bool)


STEPS = [
    {"analysis": "I must look.", "query": "who?", "documents": [{"id": "1", "title": "T", "text": "It is Ann."}]},
    {"analysis": "So.", "answer": "Ann"},
]
TRAJECTORY = {"id": "t", "question": "Who?", "answers": ["Ann"], "steps": STEPS, "source": "gold"}
CHAT = {"id": "c", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
ADAPTER = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none", "use_rslora": False,
    "target_modules": ["q_proj", "v_proj"],
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_act": "gelu", "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32, "type_vocab_size": 2,
}  # fmt: skip
TINY = shipped("checkpoints", "tiny")


def sample_of(name: str) -> dict:
    return json.loads((TINY / name).read_text(encoding="utf-8"))


TOOLS = {
    "id": "c",
    "tools": [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}],
    "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}},
        ]},
        {"role": "tool", "content": "It is red.", "tool_call_id": "1"},
        {"role": "assistant", "content": "Red.", "weight": 1},
    ],
}  # fmt: skip
THOUGHT = "<think>\nLet me see.\n</think>\n\n4"
LAYOUTS = {
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "Alpaca": {"instruction": "Add.", "input": "2 2", "output": "4", "system": "Be exact.", "history": [["a", "b"]]},
    "completion": {"prompt": "Hi", "completion": "Hello"},
    "Glaive": {"system": "SYSTEM: Help.", "chat": "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>"},
    "R1": {"question": "2+2?", "reasoning": "Let me see.", "answer": "4"},
    "s1K": {"question": "2+2?", "thinking_trajectories": ["Let me see."], "attempt": "4", "solution": "4"},
    "OpenR1": {"problem": "2+2?", "generations": [THOUGHT], "correctness_math_verify": [True], "answer": "4"},
    "tools": TOOLS,
}
PROCEDURE = {
    "name": "Lease", "description": "Who signed a lease", "trigger": "lease", "category": "contracts", "priority": 2,
    "steps": [{"action": "Search for the name", "condition": "there is one"}],
}  # fmt: skip


def adapter_config(path: Path) -> object:
    """The config of an adapter with the weights that it describes."""
    names = [f"base_model.model.model.layers.0.self_attn.{p}.lora_A.weight" for p in ADAPTER["target_modules"]]
    write_tensors(path.parent / "adapter_model.safetensors", {name: torch.zeros(8, 4) for name in names})
    return read_adapter_config(path.parent)


def chat_rows(path: Path) -> list:
    return read_rows(path, PROTOCOL)


# Gold answers, which SFT does not read, and what a function's schema and a call's arguments hold.
UNREAD = {"s1K": ("solution",), "OpenR1": ("answer",), "tools": ("parameters", "description", "at")}
READERS = {
    **{
        name: Reader(
            sample, chat_rows, ignored=UNREAD.get(name, ()), lenient=lambda key, value: key == "tools" and value == {}
        )
        for name, sample in LAYOUTS.items()
    },
    "procedures": Reader(
        PROCEDURE, read_procedures, "sample.json",
        lenient=lambda key, value: key == "priority" and value in (1.5, 10**30),
    ),
    "questions": Reader({"id": "q", "question": "Who?", "answer": "Ann"}, read_questions, lenient=answer_or_id),
    "HotpotQA": Reader(HOTPOT, read_questions, lenient=answer_or_id),
    "2WikiMultiHopQA": Reader(TWO_WIKI, read_questions, lenient=lambda k, v: answer_or_id(k, v) or in_evidence(k, v)),
    "MuSiQue": Reader(MUSIQUE, read_questions, ignored=("paragraphs[].x", "[].id"), lenient=answer_or_id),
    "trajectories": Reader(TRAJECTORY, chat_rows, lenient=answer_or_id),
    "conversations": Reader(CHAT, chat_rows, lenient=answer_or_id),
    "corpus": Reader({"id": "1", "title": "T", "text": "It is."}, read_corpus, lenient=answer_or_id),
    "model config": Reader(
        sample_of("config.json"), lambda path: read_config(path.parent), "config.json",
        ignored=("architectures", "torch_dtype", "dtype", "attention_dropout", "bos_token_id", "eos_token_id",
                 "initializer_range", "use_cache", "transformers_version", "sliding_window", "pad_token_id",
                 "max_window_layers"),
    ),
    "tokenizer config": Reader(
        sample_of("tokenizer_config.json"), lambda path: Tokenizer.load(path.parent), "tokenizer_config.json", TINY,
        ignored=("added_tokens_decoder", "additional_special_tokens", "bos_token", "clean_up_tokenization_spaces",
                 "eos_token", "errors", "model_max_length", "split_special_tokens", "tokenizer_class", "unk_token",
                 "add_bos_token", "add_prefix_space", "extra_special_tokens", "is_local", "backend"),
    ),
    "adapter config": Reader(
        ADAPTER, adapter_config, "adapter_config.json",
        lenient=lambda key, value: (key, value) in [("lora_alpha", 1.5), ("target_modules", "text")],  # a pattern
    ),
    "encoder config": Reader(BERT, lambda path: read_bert_config(path.parent), "config.json"),
    "checkpoint manifest": Reader(
        {"format": checkpoint.FORMAT, "step": 3, "files": {"weights.safetensors": {"bytes": 1, "crc32": 2}}},
        lambda path: checkpoint.read(path.parent), checkpoint.MANIFEST,
    ),
}  # fmt: skip


def places(value, way: tuple = ()) -> list[tuple]:
    """The way to every value in a sample."""
    ways = [way] if way else []
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ways + [place for key, child in inside for place in places(child, (*way, key))]


def changed(sample: dict, way: tuple, value) -> dict:
    copy = json.loads(json.dumps(sample))
    owner = copy
    for key in way[:-1]:
        owner = owner[key]
    owner[way[-1]] = value
    return copy


def hostile(reader: Reader) -> dict[str, str]:
    """Name and text of every hostile form of a reader's sample, in a fixed random order."""
    text = json.dumps(reader.sample)
    texts = {name: broken(text) for name, broken in BROKEN.items()}
    for way in places(reader.sample):
        old = reader.sample
        for key in way:
            old = old[key]
        spelled = ".".join(map(str, way))
        if old is None or any(str(key) in reader.ignored for key in way) or (spelled.endswith(".id") and len(way) > 2):
            continue
        for value in WRONG[type(old)]:
            if not reader.lenient(str(way[-1]), value):
                texts[f"{spelled} = {json.dumps(value)[:40]}"] = json.dumps(changed(reader.sample, way, value))
    names = sorted(texts)
    random.Random(0).shuffle(names)
    return {name: texts[name] for name in names[:120]}


def outcome(reader: Reader, folder: Path, text: str) -> str | None:
    """What is wrong with how a text is read, or None if it is refused by an error that names the file."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(reader.beside, folder) if reader.beside else folder.mkdir()
    path = folder / reader.file
    path.write_text(text, encoding="utf-8")
    try:
        taken = reader.read(path)
    except R3LiteError as error:
        place = folder.name if reader.beside else reader.file  # a tokenizer is a folder of several files
        return None if place in str(error) else f"the error does not name the file: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return f"taken as {str(taken)[:200]}"


def test_there_are_hundreds_of_cases():
    assert sum(len(hostile(reader)) for reader in READERS.values()) >= 400


@pytest.mark.parametrize("name", READERS)
def test_hostile_input_is_refused_and_nothing_else(tmp_path, name):
    reader = READERS[name]
    outcomes = {case: outcome(reader, tmp_path / "hostile", text) for case, text in hostile(reader).items()}
    assert {case: problem for case, problem in outcomes.items() if problem} == {}


@pytest.mark.parametrize("name", [n for n in READERS if n != "checkpoint manifest"])  # its sample has no such files
def test_each_sample_is_read(tmp_path, name):
    problem = outcome(READERS[name], tmp_path / "sound", json.dumps(READERS[name].sample))
    assert problem.startswith("taken as")


@pytest.mark.parametrize("name", [n for n, reader in READERS.items() if reader.file == "sample.jsonl"])
def test_bytes_that_are_no_text_and_pipes_are_refused(tmp_path, name):
    reader = READERS[name]
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(json.dumps(reader.sample).encode() + b"\n\xff\xfe\n")
    with raises(R3LiteError, "not-utf8", "bytes.jsonl"):
        reader.read(path)
    with raises(R3LiteError, "not-a-file", "pipe or device"):
        reader.read(Path("/dev/zero"))
