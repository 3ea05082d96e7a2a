"""The thoughts of thinking models (DeepSeek-R1, Qwen3): text between <think> and </think> at the beginning of a turn.

Either the model writes <think>, or the chat template *opens* the thought: it writes <think> before the model's turn.
The step follows the thought. Thoughts are sampled and trained on like all text of a turn. They are not part of the
step, unless the format of steps itself has <think>.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from r3lite.protocols.chat_template import THINK, THOUGHT_END
from r3lite.protocols.tokenizer import Tokenizer


@dataclass(frozen=True)
class Thoughts:
    """Separates thoughts from steps, and ends them where needed."""

    tokenizer: Tokenizer
    in_format: bool  # whether the steps of the format begin with <think>, so that the thought is part of the step

    def _opened_by_template(self, tokens: Sequence[int], start: int) -> bool:
        """Returns whether the template has opened a thought just before the token at `start`."""
        if not self.tokenizer.opens_thought:
            return False
        generation_prompt = self.tokenizer.generation_prompt
        tokens_before = tokens[max(0, start - len(generation_prompt)) : start]
        return list(tokens_before) == generation_prompt

    def read(self, tokens: Sequence[int], start: int) -> str:
        """Returns the text of the turn that begins at `start`, without its thought.

        The text is empty until the thought has ended. If the format itself has <think>, the thought is not removed.
        """
        # With thinking off, the template writes an empty thought before the turn. A model may think all the same: it
        # then writes no <think>, but ends the thought with the token of </think>.
        ends_thought = self.tokenizer.thought_end_id in tokens[start:]
        if ends_thought and not self.in_format:
            _, _, reply = self._decode(tokens, start).partition(THOUGHT_END)
            return reply.lstrip()
        return self.readable(tokens, start)

    def readable(self, tokens: Sequence[int], start: int) -> str:
        """Returns what a user reads of the turn that begins at `start` while the model writes it.

        This is the beginning of the text that `read` will return. The one difference: a thought that began without
        <think> is not removed. It looks like other text until </think>, and by then the user has read it.
        """
        text = self._decode(tokens, start)
        is_opened = self._opened_by_template(tokens, start)
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

        If the template has opened a thought there, the text goes on in it if the format itself has <think>. Otherwise
        the tokens first end this thought, which stays empty.
        """
        if not self._opened_by_template(prefix, len(prefix)):
            return self.tokenizer.encode_turn(text)
        if self.in_format:
            return self.tokenizer.encode_written(text.removeprefix(THINK))
        return self.tokenizer.encode_written(self.closing_text(prefix) + text)

    def is_open(self, tokens: Sequence[int], start: int) -> bool:
        """Returns whether the turn that begins at `start` is inside a thought after the last of the tokens."""
        text = self.tokenizer.decode(tokens[start:])
        has_begun = self._opened_by_template(tokens, start) or text.lstrip().startswith(THINK)
        return has_begun and THOUGHT_END not in text

    def closing_text_before_answer(self, tokens: Sequence[int], request: Sequence[int], turn_start: int) -> str:
        """Returns the text that ends a thought that is open after `tokens` and `request`, where a forced answer begins.

        The text is "" if no thought is open. With a `request` the answer begins a new message, in which the template
        may have opened a thought. Without a request the answer continues the turn that begins at `turn_start`, in which
        the model may have opened a thought. A format with <think> ends the model's thought itself
        (`Protocol.heading_after_cut_off`), so the text is "".
        """
        if request:
            return self.closing_text([*tokens, *request])
        if self.in_format:
            return ""
        return self.closing_text(tokens, turn_start=turn_start)

    def closing_text(self, tokens: Sequence[int], turn_start: int | None = None) -> str:
        """Returns the text that ends the open thought of the turn that begins at `turn_start`; "" if none is open.

        Without `turn_start` the turn begins after all of the tokens.
        """
        if turn_start is None:
            turn_start = len(tokens)
        if self.is_open(tokens, turn_start):
            return f"\n{THOUGHT_END}\n\n"
        return ""
