"""What was said in each conversation, within bounds: turns of one, conversations, bytes of all."""

from collections import deque
from dataclasses import dataclass, field

from r3lite.serving.asks import Message

Turn = tuple[str, str]  # what was asked, what was answered


@dataclass
class Conversations:
    """The last turns of each conversation, by its id. The one that was silent longest is forgotten first."""

    turns: int  # of a conversation
    conversations: int
    size: int  # bytes of text in all
    _of: dict[str, deque[Turn]] = field(default_factory=dict)  # the one that was silent longest is the first

    @property
    def held(self) -> int:
        """Bytes of text now."""
        turns = (turn for turns in self._of.values() for turn in turns)
        return sum(len(text.encode("utf-8", "replace")) for turn in turns for text in turn)

    def messages(self, id: str | None, all_but_last: bool = False) -> tuple[Message, ...]:
        """The messages of a conversation so far; `all_but_last`: without its last turn, which is tried again."""
        turns = list(self._of.get(id, ()))
        pairs = turns[:-1] if all_but_last else turns
        roles = ("user", "assistant")
        return tuple({"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair))

    def add(self, id: str, asked: str, answered: str, in_place_of_last: bool = False) -> None:
        """Remembers a turn, and forgets what there is no room for."""
        turns = self._of[id] = self._of.pop(id, deque(maxlen=self.turns))
        if in_place_of_last and turns:
            turns.pop()
        turns.append((asked, answered))
        while self._of and (len(self._of) > self.conversations or self.held > self.size):
            oldest = next(iter(self._of))
            if oldest == id and len(turns) > 1:  # alone it takes too much: its first turns go
                turns.popleft()
            else:
                del self._of[oldest]
