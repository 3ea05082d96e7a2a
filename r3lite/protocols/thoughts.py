"""The thoughts of thinking models (DeepSeek-R1, Qwen3): text between <think> and </think> at the beginning of a turn.

A chat template may open the thought. The step follows the thought, unless the format itself has <think>. Thoughts are
sampled and trained on like all text of a turn, but are not part of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from r3lite.protocols.chat_template import THINK, THOUGHT_END
from r3lite.protocols.tokenizer import Tokenizer


@dataclass(frozen=True)
class Thoughts:
    """`in_format`: the format's turns begin with <think> themselves."""

    tokenizer: Tokenizer
    in_format: bool

    def are_opened(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the template has opened a thought just before the token at `start`."""
        opening = self.tokenizer.opening
        return self.tokenizer.opens_thought and list(tokens[max(0, start - len(opening)) : start]) == opening

    def read(self, tokens: Sequence[int], start: int) -> str:
        """The text of the turn that begins at `start` after its thought; empty until the thought has ended.

        If the format itself has <think>, the thought is kept.
        """
        text = self.tokenizer.decode(tokens[start:]).removeprefix(self.tokenizer.lead)
        opened = self.are_opened(tokens, start)
        if self.in_format:
            return THINK * opened + text
        thought, _, rest = text.partition(THOUGHT_END)
        # A model whose thought was ended for it may think all the same, and end that by its own token.
        thinks = opened or thought.lstrip().startswith(THINK) or self.tokenizer.thought_end_id in tokens[start:]
        return rest.lstrip() if thinks else text

    def written(self, given: Sequence[int], text: str) -> list[int]:
        """The tokens of a turn's text as the model writes it; a thought that the template has opened is left empty."""
        if not self.are_opened(given, len(given)):
            return self.tokenizer.encode_turn(text)
        written = text.removeprefix(THINK) if self.in_format else self.end(given) + text
        return self.tokenizer.encode_written(written)

    def end(self, tokens: Sequence[int], start: int | None = None) -> str:
        """The text that ends the open thought of the turn that begins at `start` (by default here), or ""."""
        start = len(tokens) if start is None else start
        text = self.tokenizer.decode(tokens[start:])
        inside = self.are_opened(tokens, start) or text.lstrip().startswith(THINK)
        return f"\n{THOUGHT_END}\n\n" if inside and THOUGHT_END not in text else ""
