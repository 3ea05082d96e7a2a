"""Text in tags: finds the blocks of a turn and their faults, and quotes text in which tags must have no effect.

Each tag has two ends, an opening one such as `<search>` and a closing one such as `</search>`. This module knows
neither the names of tags nor what a block means.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from r3lite.protocols.base import faults_if, one_line

# Worded to follow `step k`.
FAULTS = {
    "text_outside_tags": "has text outside its tags",
    "unclosed_tag": "does not close a tag",
    "unopened_tag": "closes a tag that is not open",
    "nested_tag": "opens a tag inside another",
}


@dataclass(frozen=True)
class Tag:
    """The two ends of a block. The closing end is a text of its own, because in some systems it has no slash."""

    opening: str
    closing: str

    def around(self, text: str) -> str:
        """Returns a block with the text. The spaces keep both ends apart from it: a token might span `>Tokyo`."""
        return f"{self.opening} {text} {self.closing}"


@dataclass(frozen=True)
class Block:
    """The text after an opening tag, up to the next tag of any kind or the end of the text."""

    tag: Tag
    text: str
    closed: bool  # whether the tag that follows is the block's own closing tag


@dataclass(frozen=True)
class Markup:
    """The tags of a protocol. With `any_case`, `<Search>` is read as `<search>`."""

    tags: tuple[Tag, ...]
    any_case: bool = False

    def read(self, text: str) -> tuple[list[Block], list[str]]:
        """Returns the blocks of a text in order, and the faults of its tags. Text outside of tags is in no block."""
        preamble, *contents = self._ends.split(text)  # the text before the first end, and after each end
        meanings = self._meanings_in(text)
        blocks = []
        faults = faults_if(text_outside_tags=preamble.strip())
        for i, (tag, opens) in enumerate(meanings):
            content = contents[i].strip()
            if not opens:
                is_open = i > 0 and meanings[i - 1] == (tag, True)
                faults += faults_if(unopened_tag=not is_open, text_outside_tags=content)
                continue
            next_tag = None
            next_opens = False
            if i + 1 < len(meanings):
                next_tag, next_opens = meanings[i + 1]
            is_closed = next_tag == tag and not next_opens
            blocks.append(Block(tag, content, is_closed))
            if is_closed:
                continue
            if next_opens:
                faults.append("nested_tag")
            else:
                faults.append("unclosed_tag")
        return blocks, faults

    def tags_in(self, text: str) -> set[Tag]:
        """Returns the tags that have an end in a text."""
        return {tag for tag, _ in self._meanings_in(text)}

    def opens(self, tag: Tag, text: str) -> bool:
        """Returns whether a text opens a tag at least once."""
        return (tag, True) in self._meanings_in(text)

    def is_open(self, tag: Tag, text: str) -> bool:
        """Returns whether a text opens a tag more often than it closes the tag."""
        meanings = self._meanings_in(text)
        return meanings.count((tag, True)) > meanings.count((tag, False))

    def quoted(self, text: str) -> str:
        """Returns text of others, such as a document, on one line, so that the protocol's tags have no effect in it.

        U+2039 replaces the `<` of these tags in any letter case. All else stays, also other angle brackets, so that a
        reader sees what the text said.
        """
        return self._ends_in_any_case.sub(lambda end: "\u2039" + end[0][1:], one_line(text))

    def _meanings_in(self, text: str) -> list[tuple[Tag, bool]]:
        """Returns the tag of each end in a text, in order, and whether the end opens the tag."""
        return [self._meanings[end.lower()] for end in self._ends.findall(text)]

    @cached_property
    def _ends(self) -> re.Pattern:
        """Matches an end of a tag of the protocol, as `any_case` says."""
        if self.any_case:
            return self._ends_in_any_case
        return re.compile(self._ends_in_any_case.pattern)

    @cached_property
    def _ends_in_any_case(self) -> re.Pattern:
        ends = (end for tag in self.tags for end in (tag.opening, tag.closing))
        return re.compile("|".join(map(re.escape, ends)), re.IGNORECASE | re.ASCII)

    @cached_property
    def _meanings(self) -> dict[str, tuple[Tag, bool]]:
        """By an end in lower case: its tag, and whether it opens the tag. An end that could do both opens the tag."""
        closing = {tag.closing.lower(): (tag, False) for tag in self.tags}
        opening = {tag.opening.lower(): (tag, True) for tag in self.tags}
        return closing | opening
