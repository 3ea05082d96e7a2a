"""Makes rows, prompts and turns of exactly a certain length, so that every contestant does the same work.

The lengths do not depend on the weights of the model: random weights never end a turn, real ones end it early.
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

ORDINARY = (1000, 100_000)  # ids of ordinary tokens, which are not special: from the first up to the second
WORDS = 100  # of a message whose template is measured
ROWS = 4  # of a file
TOWNS = 1000  # different queries


def full_rows(folder: str, tokens: int, path: Path) -> None:
    """Writes ROWS conversations of exactly `tokens` tokens, nearly all of which are the assistant's."""
    tokenizer = Tokenizer.load(resolve_folder(folder))

    def messages(words: int) -> list[dict]:
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": " a" * words}]

    template_tokens = len(tokenizer.chat(messages(WORDS))[0]) - WORDS  # a word is a token
    row = {"messages": messages(tokens - template_tokens)}
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(ROWS)), encoding="utf-8")


def full_question(folder: str, where: Path, tokens: int) -> list[str]:
    """Writes a question whose prompt has exactly `tokens` tokens; returns the flags of RL on it.

    The files are written into the folder `where`.
    """
    tokenizer = Tokenizer.load(resolve_folder(folder))
    words = " a" * (tokens - len(tokenizer.open_chat(" b", None)))
    data = where / "data.jsonl"
    prompt = where / "prompt.txt"
    data.write_text(json.dumps({"id": "1", "question": "b", "answer": "x"}) + "\n", encoding="utf-8")
    prompt.write_text(words + " {question}", encoding="utf-8")
    return ["--data", str(data), "--init-prompt", str(prompt), "--retriever", "none", "--max-hops", "1"]


def full_trace(folder: str, where: Path, tokens: int) -> list[str]:
    """Writes a teacher's trace of `tokens` tokens for the question of `full_question`; returns its flags."""
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
    """Returns `batch` rows of random ordinary tokens. Every call returns the same rows, for all contestants."""
    stream = random.Random(0)
    return [[stream.randrange(*ORDINARY) for _ in range(tokens)] for _ in range(batch)]


@dataclass
class FullTurns(Layout):
    """A layout in which every turn ends after `max_new_tokens` tokens, whatever they are.

    The first `searches` turns search, and the next one answers.
    """

    searches: int = 0

    def turn_is_over(self, sequence: Sequence) -> bool:
        return len(sequence.turn) >= self.lengths.max_new_tokens

    def close_turn(self, sequence: Sequence) -> None:
        if len(sequence.steps) < self.searches:
            query = f"the river of town {sequence.stream.source.randrange(TOWNS)}"
            sequence.add_step(Step.asking("analysis", query))
            sequence.pending = (query,)
        else:
            sequence.add_step(Step("analysis", answer="x"))
            sequence.finish = ANSWERED


def check_lengths(sequences: list[Sequence], sampled: int) -> None:
    """Raises AssertionError unless each episode sampled `sampled` tokens: the figures would be of other work."""
    lengths = [sum(sequence.action_mask) for sequence in sequences]
    assert lengths == [sampled] * len(sequences), f"{sampled} tokens each were to be sampled, not {lengths}"
