"""Rows, prompts and turns of exactly the length that is asked for, so that every contestant does the same work.

Whatever weights a model has: random ones never end a turn, real ones end it early.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from r3lite.core.episode import ANSWERED, Question, Step
from r3lite.models.weights import resolve_folder
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rollout.sequence import Sequence
from r3lite.settings import LengthSettings, ProtocolSettings

ORDINARY = (1000, 100_000)  # ids of ordinary tokens, from and up to


def full_rows(folder: str, tokens: int, path: Path) -> None:
    """Writes conversations of exactly so many tokens, nearly all of them the assistant's."""
    tokenizer = Tokenizer.load(resolve_folder(folder))

    def messages(words: int) -> list[dict]:
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": " a" * words}]

    given = len(tokenizer.chat(messages(100))[0]) - 100
    row = {"messages": messages(tokens - given)}
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(4)), encoding="utf-8")


def full_question(folder: str, where: Path, tokens: int) -> list[str]:
    """The flags of RL on one question whose prompt takes so many tokens; writes the files that they name."""
    tokenizer = Tokenizer.load(resolve_folder(folder))
    words = " a" * (tokens - len(tokenizer.open_chat(" b", None)))
    data, prompt = where / "data.jsonl", where / "prompt.txt"
    data.write_text(json.dumps({"id": "1", "question": "b", "answer": "x"}) + "\n", encoding="utf-8")
    prompt.write_text(words + " {question}", encoding="utf-8")
    return ["--data", str(data), "--init-prompt", str(prompt), "--retriever", "none", "--max-hops", "1"]


def full_trace(folder: str, where: Path, tokens: int) -> list[str]:
    """The flags of a teacher's trace of so many tokens for the question of `full_question`; writes its file."""
    protocol = build_protocol(ProtocolSettings(init_prompt=str(where / "prompt.txt")))
    layout = Layout(Tokenizer.load(resolve_folder(folder)), protocol, LengthSettings())

    def length(words: int) -> int:
        return len(layout.lay_out(Question("1", "b", ("x",)), [Step("a" + " a" * words, answer="x")], 0).tokens)

    words = tokens - length(0)
    assert length(words) == tokens, "a word is a token"
    step = {"analysis": "a" + " a" * words, "answer": "x"}
    trace = {"id": "1", "question": "b", "answers": ["x"], "steps": [step], "source": "teacher"}
    path = where / "traces.jsonl"
    path.write_text(json.dumps(trace) + "\n", encoding="utf-8")
    return ["--traces", str(path)]


def full_prompts(batch: int, tokens: int) -> list[list[int]]:
    """Random ordinary tokens, every row its own, the same for every contestant."""
    stream = random.Random(0)
    return [[stream.randrange(*ORDINARY) for _ in range(tokens)] for _ in range(batch)]


@dataclass
class FullTurns(Layout):
    """Every turn has `max_new_tokens` tokens, whatever they are; `searches` turns search, and the next one answers."""

    searches: int = 0

    def turn_is_over(self, sequence: Sequence) -> bool:
        return len(sequence.turn) >= self.lengths.max_new_tokens

    def close_turn(self, sequence: Sequence) -> None:
        if len(sequence.steps) < self.searches:
            query = f"the river of town {sequence.stream.source.randrange(1000)}"
            sequence.add_step(Step.asking("analysis", query))
            sequence.pending = (query,)
        else:
            sequence.add_step(Step("analysis", answer="x"))
            sequence.finish = ANSWERED


def check_lengths(sequences: list[Sequence], sampled: int) -> None:
    """Stops a bench whose episodes did not sample so many tokens each: its figures would be of other work."""
    lengths = [sum(sequence.action_mask) for sequence in sequences]
    assert lengths == [sampled] * len(sequences), f"{sampled} tokens each were to be sampled, not {lengths}"
