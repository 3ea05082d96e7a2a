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
        """Returns whether the template has opened a thought just before the token at `start`."""
        if not self.tokenizer.opens_thought:
            return False
        opening = self.tokenizer.opening
        tokens_before = tokens[max(0, start - len(opening)) : start]
        return list(tokens_before) == opening

    def read(self, tokens: Sequence[int], start: int) -> str:
        """Returns the text of the turn that begins at `start` after its thought; empty until the thought has ended.

        If the format itself has <think>, the thought stays.
        """
        # Where the template has ended the thought, a model may think all the same: without <think>, but with the token
        # that ends a thought.
        ends_thought = self.tokenizer.thought_end_id in tokens[start:]
        if ends_thought and not self.in_format:
            _, _, reply = self._decode(tokens, start).partition(THOUGHT_END)
            return reply.lstrip()
        return self.readable(tokens, start)

    def readable(self, tokens: Sequence[int], start: int) -> str:
        """Returns what a user reads of the turn that begins at `start`, while it is written: the text that `read` will
        return, as far as it is known.

        A thought without <think> stays: it looks like text until its end, and the user has read it by then.
        """
        text = self._decode(tokens, start)
        is_opened = self.are_opened(tokens, start)
        if self.in_format:
            if is_opened:
                return THINK + text
            return text
        thought, _, reply = text.partition(THOUGHT_END)
        if is_opened or thought.lstrip().startswith(THINK):
            return reply.lstrip()
        return text

    def _decode(self, tokens: Sequence[int], start: int) -> str:
        return self.tokenizer.decode(tokens[start:]).removeprefix(self.tokenizer.lead)

    def encode_turn(self, prefix: Sequence[int], text: str) -> list[int]:
        """Returns the tokens of a turn's text as the model writes it after the tokens `prefix`.

        A thought that the template has opened is left empty.
        """
        if not self.are_opened(prefix, len(prefix)):
            return self.tokenizer.encode_turn(text)
        if self.in_format:
            return self.tokenizer.encode_written(text.removeprefix(THINK))
        return self.tokenizer.encode_written(self.end(prefix) + text)

    def is_open(self, tokens: Sequence[int], start: int) -> bool:
        """Returns whether the turn that begins at `start` is inside a thought after the last of the tokens."""
        text = self.tokenizer.decode(tokens[start:])
        has_begun = self.are_opened(tokens, start) or text.lstrip().startswith(THINK)
        return has_begun and THOUGHT_END not in text

    def end_before_answer(self, tokens: Sequence[int], request: Sequence[int], turn_start: int) -> str:
        """Returns the text that ends a thought which is open where a forced answer is to be written; "" if none is.

        The answer stands behind `tokens` and `request`. With a request it begins a new message, in which the template
        may have opened a thought. Without one it continues the turn that begins at `turn_start`, in which the model may
        have opened one: a format with <think> ends that in its heading (`Protocol.heading_after_cut_off`).
        """
        if request:
            return self.end([*tokens, *request])
        if self.in_format:
            return ""
        return self.end(tokens, turn_start=turn_start)

    def end(self, tokens: Sequence[int], turn_start: int | None = None) -> str:
        """Returns the text that ends the open thought of the turn that begins at `turn_start`, by default after all
        tokens; "" if none is open."""
        if turn_start is None:
            turn_start = len(tokens)
        if self.is_open(tokens, turn_start):
            return f"\n{THOUGHT_END}\n\n"
        return ""
