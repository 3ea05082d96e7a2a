"""The thoughts of a model that thinks before it speaks (DeepSeek-R1, Qwen3): text between <think> and </think>.

A chat template may open the thought itself. What a step is comes after it, unless the format has such thoughts of its
own. Thoughts are sampled and learned from like any text of a turn, and are part of no step.
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
        """The text after its thought of a turn that begins at `start`; nothing while the thought is not over.

        A thought of the format's own is kept.
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
        """The tokens of a turn's text as the model writes it. A thought that is opened and not in the text is empty."""
        if not self.are_opened(given, len(given)):
            return self.tokenizer.encode_turn(text)
        written = text.removeprefix(THINK) if self.in_format else self.end(given) + text
        return self.tokenizer.encode_written(written)

    def end(self, tokens: Sequence[int], start: int | None = None) -> str:
        """What ends the thought in which a turn is that begins at `start`, by default now; empty if it is in none."""
        start = len(tokens) if start is None else start
        text = self.tokenizer.decode(tokens[start:])
        inside = self.are_opened(tokens, start) or text.lstrip().startswith(THINK)
        return f"\n{THOUGHT_END}\n\n" if inside and THOUGHT_END not in text else ""
