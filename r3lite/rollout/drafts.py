"""Drafts from the context: tokens that probably come next, run in one pass and verified without loss.

Much of what a trained model writes stands before it: in the question, in documents, in its earlier steps.

1. Lookup (prompt lookup decoding). A draft is what followed the last occurrence of a row's last 3 tokens, else of its
   last 2: in the episode itself, or in another one of its question that is sampled in the same run.
2. Length. A place is drafted if it pays: the probability that it is kept, against `PLACE_COST` of a pass. The
   probability is p^place, where p is the share of drafts that was accepted in this run after matches of this length.
   All is a function of tokens and numbers of rows, never of the clock, so that runs are repeated to the bit.
3. Verification. One pass runs each row's last token and its draft (models/verification.py). Then the engine samples
   place by place, as it does without drafts, those rows whose tokens agree with their drafts so far. A row leaves when
   its token differs, ends its turn or is no number. So a uniform number is drawn for a token that is kept, and for no
   other; tokens are those of sampling one by one, but for the rounding of wider passes.
4. Roll-back. The rows of the cache end with the tokens that were kept: `Scheduler.split`.
   If a number of the pass is not finite, all of it is taken back, and the rows are run without drafts: what follows a
   draft has a weight of 0 in the attention of places before it, which does not remove a NaN.

With CUDA graphs all rows of a pass have as many places, of which few are for many rows: see `GraphDecoder`.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import accumulate

from r3lite.models.causal_lm import CausalLM
from r3lite.rollout.sequence import Sequence
from r3lite.settings.rollout import MOST_DRAFTED, LengthSettings

LONGEST_MATCH = 8  # a longer match counts as one of this length
# A pass takes about 1 + rows * ROW_COST + drafted tokens * PLACE_COST of what reading its weights takes.
ROW_COST = 0.1
PLACE_COST = 0.06
CARD_PLACE_COST = 0.01  # the same on a card, where reading the weights, or copying them, takes longer than some tokens
PASS_COST = 0.1  # what a verification takes beside its places
MARGIN = 1.25  # a place is drafted if it pays so many times
# What is expected of a match before drafts were made: the share that is accepted, by the length of the match.
EXPECTED = (0.0, 0.0, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7, 0.8)
EXPECTED_WEIGHT = 8.0  # it counts as much as so many drafted tokens
FADING = 0.99  # what was counted fades at each match of the same length, as what a model writes changes

Place = tuple[list[int], int]  # the tokens of an episode, and the index of the token that followed a match


class Occurrences:
    """Where pairs and triples of tokens occurred last with a token after them, in one text or several."""

    def __init__(self):
        self.pairs: dict[tuple[int, int], Place] = {}
        self.triples: dict[tuple[int, int, int], Place] = {}

    def read(self, tokens: list[int], first: int) -> None:
        """Takes in a text from the index `first` on; what is before it was taken in already."""
        for index in range(max(first, 2), len(tokens)):
            place = (tokens, index)
            pair = (tokens[index - 2], tokens[index - 1])
            self.pairs[pair] = place
            if index > 2:
                self.triples[tokens[index - 3], *pair] = place


@dataclass
class Reader:
    """What was taken in of one sequence."""

    sequence: Sequence
    occurrences: Occurrences = field(default_factory=Occurrences)
    length: int = 0  # tokens that were taken in


@dataclass
class Acceptance:
    """How many of the drafted tokens that followed matches of one length were accepted; both numbers fade."""

    expected: float
    accepted: float = 0.0
    examined: float = 0.0

    @property
    def share(self) -> float:
        """The share that is expected to be accepted."""
        accepted = self.accepted + EXPECTED_WEIGHT * self.expected
        return accepted / (self.examined + EXPECTED_WEIGHT)

    def fade(self) -> None:
        """Makes what was counted weigh less than what will be."""
        self.accepted *= FADING
        self.examined *= FADING


@dataclass
class Agreement:
    """What became of the drafts of a pass, by row."""

    examined: list[int]  # drafted tokens that were compared with sampled ones
    accepted: list[int]  # those that were equal
    failed: set[int]  # ids of the sequences whose logits were not finite


class Drafter:
    """Makes the drafts of the sequences of one run, and records what becomes of them."""

    def __init__(
        self,
        limit: int,
        stop_id: int,
        sequences: Several[Sequence] = (),
        place_cost: float = PLACE_COST,
    ):
        """A draft has at most `limit` tokens and none after a stop token.

        Of the `sequences`, those of the same question draft for each other.
        """
        self.limit = limit
        self.stop_id = stop_id
        self.place_cost = place_cost
        self.readers: dict[int, Reader] = {}  # by the id of a sequence that is not finished
        episodes = Counter(id(sequence.question) for sequence in sequences)
        self.groups: dict[int, Occurrences] = {}  # by the id of a question with several episodes
        for question, count in episodes.items():
            if count > 1:
                self.groups[question] = Occurrences()
        self.acceptances = [Acceptance(share) for share in EXPECTED]
        self.matches: list[int] = []  # of each row: the length of the match of its last draft

    def propose(self, rows: list[Sequence], rooms: list[int]) -> list[list[int]]:
        """Returns a draft of each row; an empty one if it has none that pays.

        Of each row `rooms` has how many tokens its draft may have.
        """
        per_pass = len(rows) / (1 + ROW_COST * len(rows))  # tokens in the time in which the weights are read once
        price = MARGIN * self.place_cost * per_pass  # the tokens that a place must bring to pay
        self.matches = [0] * len(rows)
        drafts: list[list[int]] = [[] for _ in rows]
        self._read(rows)
        free_places = MOST_DRAFTED
        gain = 0.0
        for row, (sequence, room) in enumerate(zip(rows, rooms, strict=True)):
            length, place = self._match(sequence)
            if not length:
                continue
            acceptance = self.acceptances[length]
            acceptance.fade()
            limit = min(self.limit, room, free_places)
            count, row_gain = worthwhile(acceptance.share, price, limit)
            drafts[row] = self._continuation(place, count)
            self.matches[row] = length
            free_places -= len(drafts[row])
            gain += row_gain
        if gain < MARGIN * PASS_COST * per_pass:
            return [[] for _ in rows]
        return drafts

    def count(self, agreement: Agreement) -> None:
        """Counts what became of the drafts that were proposed last."""
        pairs = zip(agreement.examined, agreement.accepted, strict=True)
        for length, (examined, accepted) in zip(self.matches, pairs, strict=True):
            acceptance = self.acceptances[length]
            acceptance.examined += examined
            acceptance.accepted += accepted

    def _read(self, rows: list[Sequence]) -> None:
        """Takes in what the rows have got since the last call, and forgets sequences that are finished."""
        finished = [key for key, reader in self.readers.items() if reader.sequence.finish is not None]
        for key in finished:
            del self.readers[key]
        for sequence in rows:
            reader = self.readers.setdefault(id(sequence), Reader(sequence))
            reader.occurrences.read(sequence.tokens, reader.length)
            group = self.groups.get(id(sequence.question))
            if group:
                group.read(sequence.tokens, reader.length)
            reader.length = len(sequence.tokens)

    def _match(self, sequence: Sequence) -> tuple[int, Place]:
        """Returns how many of a sequence's last tokens occurred before, or 0, and where the text went on after them."""
        tokens = sequence.tokens
        texts = [self.readers[id(sequence)].occurrences]
        group = self.groups.get(id(sequence.question))
        if group:
            texts.append(group)
        pair = tuple(tokens[-2:])
        triple = tuple(tokens[-3:])
        for text in texts:
            if triple in text.triples:
                place = text.triples[triple]
                return _match_length(tokens, place), place
        for text in texts:
            if pair in text.pairs:
                return 2, text.pairs[pair]
        return 0, ([], 0)

    def _continuation(self, place: Place, count: int) -> list[int]:
        """Returns at most `count` tokens from a place on, none of them after a stop token."""
        tokens, first = place
        draft = tokens[first : first + count]
        if self.stop_id in draft:
            return draft[: draft.index(self.stop_id) + 1]
        return draft


def room(sequence: Sequence, lengths: LengthSettings) -> int:
    """Returns how many tokens may be drafted: those that fit behind the next one, which may be the last of all."""
    in_turn = sequence.turn_start + lengths.max_new_tokens - len(sequence.tokens)
    in_episode = lengths.max_length - len(sequence.tokens)
    return min(in_turn, in_episode, sequence.tokens_left) - 1


def drafter_of(
    model: CausalLM,
    limit: int,
    stop_id: int,
    sequences: Several[Sequence],
) -> Drafter | None:
    """Returns the drafter of a run; None if the `limit` is 0, or if it is not known what a place costs: on MPS."""
    device = model.head_weight.device.type
    if limit and device == "cpu":
        return Drafter(limit, stop_id, sequences)
    if limit and device == "cuda":
        return Drafter(limit, stop_id, sequences, place_cost=CARD_PLACE_COST)
    return None


def accept_drafts(
    rows: list[list[Sequence]],
    drafts: list[list[int]],
    sample: Callable[[list[int], list[Sequence]], list[Sequence]],
    turn_is_over: Callable[[Sequence], bool],
) -> Agreement:
    """Samples the tokens of each row's sequences that agree with the row's draft, and one more.

    The pass has the last token of the first row and its draft, then those of the next row, and so on.
    `sample(places, sequences)` writes the token that follows each of these places to its sequence, and returns the
    sequences that did not fail. Nothing is sampled behind the end of a turn.
    """
    lengths = [1 + len(draft) for draft in drafts]
    first_places = [0, *accumulate(lengths)]
    agreement = Agreement(examined=[0] * len(rows), accepted=[0] * len(rows), failed=set())
    going = [(row, sequence) for row, members in enumerate(rows) for sequence in members]
    depth = 0
    while going:
        places = [first_places[row] + depth for row, _ in going]
        sampled = sample(places, [sequence for _, sequence in going])
        sampled_ids = {id(sequence) for sequence in sampled}
        agreeing = []
        for row, sequence in going:
            if id(sequence) not in sampled_ids:
                agreement.failed.add(id(sequence))
            elif depth < len(drafts[row]):
                agreement.examined[row] += 1
                if sequence.tokens[-1] == drafts[row][depth]:
                    agreement.accepted[row] += 1
                    agreeing.append((row, sequence))
        going = [(row, sequence) for row, sequence in agreeing if not turn_is_over(sequence)]
        depth += 1
    return agreement


def worthwhile(
    share: float,
    price: float,
    limit: int,
) -> tuple[int, float]:
    """Returns the number of places to draft, at most `limit`, and the tokens that they bring in the mean.

    The place number i is kept with probability share^i; it is drafted if that is above the `price`.
    """
    count = 0
    gain = 0.0
    probability = share
    while count < limit and probability > price:
        count += 1
        gain += probability
        probability *= share
    return count, gain


def _match_length(tokens: list[int], place: Place) -> int:
    """Returns how many of the last tokens are those before a place, at most LONGEST_MATCH; the last 3 are."""
    text, end = place
    length = 3
    longest = min(LONGEST_MATCH, len(tokens), end)
    while length < longest and text[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
