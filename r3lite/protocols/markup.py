"""Text in tags: the blocks that a turn has and what is wrong with them, and text from outside that must not make any.

Knows no names of tags and not what a block means.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from r3lite.protocols.base import named, one_line

# Worded to follow `step k`.
FAULTS = {
    "text_outside_tags": "has text outside its tags",
    "unclosed_tag": "does not close a tag",
    "unopened_tag": "closes a tag that is not open",
    "nested_tag": "opens a tag inside another",
}


@dataclass(frozen=True)
class Tag:
    """The two ends of a block. The closing one is a text of its own: not every system's has a slash."""

    opening: str
    closing: str

    def around(self, text: str) -> str:
        """A block. Its spaces keep tag and text apart: in `<answer>Tokyo` one token would span both."""
        return f"{self.opening} {text} {self.closing}"


@dataclass(frozen=True)
class Block:
    """What follows an opening tag, up to the next tag of any kind or the end of the text."""

    tag: Tag
    text: str
    closed: bool  # by its own closing tag


@dataclass(frozen=True)
class Markup:
    """The tags of a protocol. With `any_case`, `<Search>` is read as `<search>`."""

    tags: tuple[Tag, ...]
    any_case: bool = False

    def read(self, text: str) -> tuple[list[Block], list[str]]:
        """The blocks of a text in order, and the faults of its tags; text that is in no tag is in no block."""
        before, *contents = self._marks.split(text)
        meanings = [None, *(self._meanings[mark.lower()] for mark in self._marks.findall(text)), None]
        blocks, faults = [], named(text_outside_tags=before.strip())
        for previous, (tag, opens), following, content in zip(meanings, meanings[1:-1], meanings[2:], contents):
            if opens:
                blocks.append(Block(tag, content.strip(), closed=following == (tag, False)))
                if not blocks[-1].closed:
                    faults.append("nested_tag" if following and following[1] else "unclosed_tag")
                continue
            faults += named(unopened_tag=previous != (tag, True), text_outside_tags=content.strip())
        return blocks, faults

    def tags_in(self, text: str) -> set[Tag]:
        """The tags that have an end in a text."""
        return {self._meanings[mark[0].lower()][0] for mark in self._marks.finditer(text)}

    def quoted(self, text: str) -> str:
        """Text from outside on one line, with U+2039 for the `<` of every tag in it, whatever the tag's letter case.

        All else stays, so that a reader sees what the text said; other angle brackets are text.
        """
        return self._in_any_case.sub(lambda mark: "\u2039" + mark[0][1:], one_line(text))

    @cached_property
    def _marks(self) -> re.Pattern:
        return self._in_any_case if self.any_case else re.compile(self._in_any_case.pattern)

    @cached_property
    def _in_any_case(self) -> re.Pattern:
        ends = (end for tag in self.tags for end in (tag.opening, tag.closing))
        return re.compile("|".join(map(re.escape, ends)), re.IGNORECASE | re.ASCII)

    @cached_property
    def _meanings(self) -> dict[str, tuple[Tag, bool]]:
        """The tag that an end belongs to, and whether it opens it; one that does both opens."""
        closing = {tag.closing.lower(): (tag, False) for tag in self.tags}
        return closing | {tag.opening.lower(): (tag, True) for tag in self.tags}
