"""A toy model, questions for it, and a script of what it says: what evaluations are tested with."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from r3lite.core.files import write_jsonl
from r3lite.rollout.engine import Engine

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCORES = ("em", "f1", "format_adherence", "retrieval_recall", "combined", "mean_searches")


def token_of(tokenizer, turn, index):
    """The token of a turn that is said, by its index; behind the turn the stop token."""
    ids = tokenizer.encode(turn)
    return ids[index] if index < len(ids) else tokenizer.stop_id


def paragraphs(*names):
    return [
        {"idx": i, "title": n, "paragraph_text": f"{n} lives in {n}town.", "is_supporting": i < 2}
        for i, n in enumerate(names)
    ]


def question(name, hops, answer):
    steps = [{"question": f"hop {i}", "answer": f"a{i}", "paragraph_support_idx": i % 2} for i in range(hops)]
    record = {
        "id": name,
        "question": f"Where does {name} live?",
        "answer": answer,
        "answer_aliases": [f"{answer} City"],
    }
    return record | {"paragraphs": paragraphs("Ada", "Bob", "Cy"), "question_decomposition": steps, "answerable": True}


@pytest.fixture
def toy(tmp_path, small_model, write_folder):
    """Arguments of a run: a byte-level toy model and three MuSiQue questions of 2, 2 and 3 hops."""
    folder = write_folder(small_model(vocab_size=272), tmp_path / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "pad_token": "<|endoftext|>"}))
    rows = [question("Ada", 2, "Adatown"), question("Bob", 2, "Bobtown"), question("Cy", 3, "Cytown")]
    write_jsonl(tmp_path / "questions.jsonl", rows)
    fixed = {"model": folder, "data": tmp_path / "questions.jsonl", "output": tmp_path / "out", "device": "cpu"}
    fixed |= {"dtype": "fp32", "encoder": "hashing", "max-new-tokens": 160, "top-k": 2}
    return [word for name, value in fixed.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def says(monkeypatch):
    """Lets the toy say what a script has for a question, turn by turn."""

    def script(turns):
        def sample(engine, logits, batch):
            tokens = []
            for sequence, depth in zip(batch.sequences, batch.depths, strict=True):
                turn = turns[sequence.question.id][len(sequence.steps)]
                tokens.append(token_of(engine.layout.tokenizer, turn, len(sequence.turn) + depth))
            return torch.tensor(tokens), torch.zeros(len(tokens))

        monkeypatch.setattr(Engine, "_sample", sample)

    return script


def ask(k, query):
    return f"Step {k}:\nThe problem analysis: Look.\nThe retrieval query: {query}"


def answer(k, text):
    return f"Step {k}:\nThe problem analysis: So.\nThe final answer: {text}"


def read_results(folder):
    """The scores and the predictions of an evaluation."""
    lines = (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads((folder / "scores.json").read_text()), [json.loads(line) for line in lines]
