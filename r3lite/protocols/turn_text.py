"""The text of a turn while it is written: as the protocol parses it, and as a user reads it.

The end of a turn is looked for after each token, so only the last few tokens are decoded for that.
"""

from collections.abc import Sequence

from r3lite.protocols.base import Protocol
from r3lite.protocols.chat_template import THINK
from r3lite.protocols.thoughts import Thoughts
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Transcript

BYTES = "\ufffd"  # decoded from bytes that are not a whole character


class TurnText:
    """Decodes the current turns of transcripts."""

    def __init__(self, tokenizer: Tokenizer, protocol: Protocol, thoughts: Thoughts):
        self.tokenizer = tokenizer
        self.protocol = protocol
        self.thoughts = thoughts
        self._may_close: dict[int, bool] = {}  # for each token, whether it may be the last token of a stop string

    def read(self, transcript: Transcript) -> str:
        """Returns the text of the current turn as the protocol parses it."""
        if transcript.forced_step is not None:
            return self.tokenizer.decode(transcript.turn)
        return self.thoughts.read(transcript.tokens, transcript.turn_start)

    def readable(self, transcript: Transcript, turn_is_over: bool) -> str:
        """Returns the text of the current turn for a user: with the heading of a forced answer, without a thought that
        began with <think>, and up to a stop string.

        While the turn goes on, the text of each call continues the text of the call before: incomplete characters, and
        what may be the beginning of a thought or of a stop string, are left out until `turn_is_over`.
        """
        if transcript.forced_step is None:
            text = self.thoughts.readable(transcript.tokens, transcript.turn_start)
        else:
            text = self.protocol.answer_heading + self.tokenizer.decode(transcript.turn)
            model_wrote_before = any(transcript.action_mask[: transcript.turn_start])  # not so in a baseline
            if model_wrote_before:
                text = f"\n{text}"
        stops = self.protocol.stop_strings
        stop_places = [text.index(stop) for stop in stops if stop in text]
        if stop_places:
            return text[: min(stop_places)]
        if turn_is_over:
            return text
        text = text.rstrip(BYTES)
        if THINK.startswith(text.strip()):  # perhaps the beginning of a thought
            return ""
        held_back = max((_overlap(text, stop) for stop in stops), default=0)
        return text[: len(text) - held_back]

    def ends_with_stop(self, turn: Sequence[int]) -> bool:
        """Returns whether the last token of a turn completes a stop string."""
        last_token = turn[-1]
        if last_token not in self._may_close:
            self._may_close[last_token] = self._may_end_stop_string(last_token)
        if not self._may_close[last_token]:
            return False
        return any(self._completes(turn, stop) for stop in self.protocol.stop_strings)

    def _completes(self, turn: Sequence[int], stop: str) -> bool:
        """Returns whether the last token of a turn completes a stop string.

        One that was complete before does not count: a thought may have quoted it.
        """
        end_of_turn = turn[-len(stop.encode()) :]  # a stop string of n bytes spans at most n tokens
        text_before = self.tokenizer.decode(end_of_turn[:-1])
        return self.tokenizer.decode(end_of_turn).count(stop) > text_before.count(stop)

    def _may_end_stop_string(self, token: int) -> bool:
        """Returns whether a token has the last character of a stop string, or some of the bytes of this character.

        This is true of few tokens, so little text is decoded.
        """
        text = self.tokenizer.decode([token])
        has_bytes = BYTES in text
        for stop in self.protocol.stop_strings:
            last_character = stop[-1]
            if last_character in text or (has_bytes and not last_character.isascii()):
                return True
        return False


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a stop string."""
    for length in range(len(stop) - 1, 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
