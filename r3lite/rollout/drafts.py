"""Drafts from the context: tokens that probably come next, run in one pass and verified without loss.

Much of what a trained model writes stands before it: in the question, in documents, in its earlier steps.

1. Lookup (prompt lookup decoding). We look for the last occurrence of a row's last 3 tokens, else of its last 2: in the
   episode itself, or in another episode of the question in the same run. The draft is what followed there.
2. Length. The i-th token of a draft is accepted with probability p^i, where p is the share of drafted tokens that were
   accepted in this run after matches of this length: a mean with a prior (EXPECTED), in which old tokens count less
   (FADING). A draft gets longer as long as p^i pays for one more token, see `Drafter.propose`. The costs are constants
   and not measured by the clock, so that runs are repeated to the bit.
3. Verification. One pass runs each row's last token and its draft (models/verification.py). The engine samples the
   token after each of these at once, with the uniform numbers that would be drawn one after the other (`Uniforms`). A
   row's sampled tokens are appended until one differs from the draft, ends its turn, or has logits that are not finite.
   Only numbers of appended tokens count as drawn, so these tokens are those of sampling one by one, except for the
   rounding of wider passes.
4. Roll-back. `Scheduler.split` removes the drafted tokens that were not accepted from the cache.
   If a number of the pass is not finite, all of the pass is taken back, and the rows are run without drafts. A NaN may
   come from a draft: attention gives later tokens a weight of 0, but 0 times NaN is NaN.

A CUDA graph runs equally many tokens of each row. The more rows it has, the shorter drafts may be: see
`GraphDecoder.draft_limit`.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from r3lite.models.causal_lm import CausalLM
from r3lite.protocols.layout import Layout
from r3lite.rollout.sampling_batches import SampledToken, SamplingBatch, sampling_batches
from r3lite.rollout.sequence import Sequence
from r3lite.settings.rollout import MOST_DRAFTED, LengthSettings

LONGEST_MATCH = 8  # a longer match counts as one of this length
# The unit of time is that of reading all weights once. A pass takes 1 + ROW_COST * rows + TOKEN_COST * drafted tokens.
ROW_COST = 0.1
TOKEN_COST = 0.06
CARD_TOKEN_COST = 0.01  # TOKEN_COST on a card, where computing a token takes little beside reading the weights
PASS_COST = 0.1  # what a pass with drafts takes in addition, however many tokens they have
MARGIN = 1.25  # what drafts must bring, divided by what they cost
# A prior: the share of drafted tokens that is expected to be accepted, by the length of the match. It counts as if
# EXPECTED_WEIGHT tokens had been examined.
EXPECTED = (0.0, 0.0, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7, 0.8)
EXPECTED_WEIGHT = 8.0
FADING = 0.99  # the counts of examined tokens are multiplied by it at each match, because a model's texts change

Occurrence = tuple[list[int], int]  # the tokens of an episode, and the index of the token that followed a match


class Occurrences:
    """Where pairs and triples of tokens occurred last with a token after them, in one text or several."""

    def __init__(self):
        self.pairs: dict[tuple[int, int], Occurrence] = {}
        self.triples: dict[tuple[int, int, int], Occurrence] = {}

    def read(self, tokens: list[int], first: int) -> None:
        """Adds the occurrences in a text from the index `first` on; those before it were added already."""
        for index in range(max(first, 2), len(tokens)):
            occurrence = (tokens, index)
            pair = (tokens[index - 2], tokens[index - 1])
            self.pairs[pair] = occurrence
            if index > 2:
                self.triples[tokens[index - 3], *pair] = occurrence


@dataclass
class Reader:
    """The occurrences in one sequence, as far as it was read."""

    sequence: Sequence
    occurrences: Occurrences = field(default_factory=Occurrences)
    length: int = 0  # tokens that were read


@dataclass
class Acceptance:
    """How many drafted tokens were examined and accepted, after matches of one length. Both numbers fade."""

    expected: float  # the share that is expected before any was examined
    accepted: float = 0.0
    examined: float = 0.0

    @property
    def share(self) -> float:
        """The share that is expected to be accepted."""
        accepted = self.accepted + EXPECTED_WEIGHT * self.expected
        return accepted / (self.examined + EXPECTED_WEIGHT)

    def fade(self) -> None:
        """Makes the tokens examined so far count less than later ones."""
        self.accepted *= FADING
        self.examined *= FADING


@dataclass
class Agreement:
    """How far the drafts of a pass agreed with the sampled tokens, by row."""

    examined: list[int]  # drafted tokens that were compared with sampled ones, summed over the row's sequences
    accepted: list[int]  # drafted tokens that were equal to sampled ones
    not_finite: set[int]  # ids of the sequences whose logits were not finite


class Drafter:
    """Proposes drafts for the sequences of one run, and counts how many of their tokens are accepted."""

    def __init__(
        self,
        limit: int,
        stop_id: int,
        sequences: Several[Sequence] = (),
        token_cost: float = TOKEN_COST,
    ):
        """A draft has at most `limit` tokens and none after a stop token.

        `sequences` are those of the run. Sequences of the same question draft for each other.
        """
        self.limit = limit
        self.stop_id = stop_id
        self.token_cost = token_cost
        self.readers: dict[int, Reader] = {}  # of unfinished sequences, by Python's id of the sequence
        episode_counts = Counter(id(sequence.question) for sequence in sequences)
        self.groups: dict[int, Occurrences] = {}  # of questions with several episodes, by Python's id of the question
        for question_id, count in episode_counts.items():
            if count > 1:
                self.groups[question_id] = Occurrences()
        self.acceptances = [Acceptance(share) for share in EXPECTED]
        self.matches: list[int] = []  # of each row: the length of the match of its last draft

    def propose(self, rows: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Returns a draft for each row, empty if none pays.

        `limits` are the most tokens that each row's draft may have. A draft pays if it brings MARGIN times as many
        tokens as are sampled without drafts in the time that the draft takes.
        """
        speed = len(rows) / (1 + ROW_COST * len(rows))  # tokens per unit of time without drafts
        # A drafted token brings as many tokens as the probability is that it is accepted. In the time that it takes,
        # `token_cost`, token_cost * speed tokens would be sampled without drafts.
        least_probability = MARGIN * self.token_cost * speed
        self.matches = [0] * len(rows)
        drafts: list[list[int]] = [[] for _ in rows]
        self._read(rows)
        free_tokens = MOST_DRAFTED
        gain = 0.0  # tokens that the drafts bring on average
        for row, (sequence, row_limit) in enumerate(zip(rows, limits, strict=True)):
            length, occurrence = self._match(sequence)
            if not length:
                continue
            acceptance = self.acceptances[length]
            acceptance.fade()
            draft = self._continuation(occurrence, min(self.limit, row_limit, free_tokens))
            count, row_gain = worthwhile(acceptance.share, least_probability, len(draft))
            drafts[row] = draft[:count]
            self.matches[row] = length
            free_tokens -= len(drafts[row])
            gain += row_gain
        if gain < MARGIN * PASS_COST * speed:
            return [[] for _ in rows]
        return drafts

    def count(self, agreement: Agreement) -> None:
        """Counts the examined and accepted tokens of the drafts that were proposed last."""
        pairs = zip(agreement.examined, agreement.accepted, strict=True)
        for length, (examined, accepted) in zip(self.matches, pairs, strict=True):
            acceptance = self.acceptances[length]
            acceptance.examined += examined
            acceptance.accepted += accepted

    def _read(self, rows: list[Sequence]) -> None:
        """Reads the tokens that the rows have got since the last call, and forgets sequences that are finished."""
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

    def _match(self, sequence: Sequence) -> tuple[int, Occurrence]:
        """Returns how many of a sequence's last tokens occurred before, or 0, and the occurrence."""
        tokens = sequence.tokens
        searched = [self.readers[id(sequence)].occurrences]
        group = self.groups.get(id(sequence.question))
        if group:
            searched.append(group)
        pair = tuple(tokens[-2:])
        triple = tuple(tokens[-3:])
        for occurrences in searched:
            if triple in occurrences.triples:
                occurrence = occurrences.triples[triple]
                return _match_length(tokens, occurrence), occurrence
        for occurrences in searched:
            if pair in occurrences.pairs:
                return 2, occurrences.pairs[pair]
        return 0, ([], 0)

    def _continuation(self, occurrence: Occurrence, count: int) -> list[int]:
        """Returns at most `count` tokens that followed an occurrence, none of them after a stop token."""
        tokens, first = occurrence
        draft = tokens[first : first + count]
        if self.stop_id in draft:
            return draft[: draft.index(self.stop_id) + 1]
        return draft


def _sequence_limit(sequence: Sequence, lengths: LengthSettings) -> int:
    """Returns how many tokens may be drafted: a pass may append one token more than the draft has.

    It is negative if the sequence may not get even one token.
    """
    in_turn = sequence.turn_start + lengths.max_new_tokens - len(sequence.tokens)
    in_episode = lengths.max_length - len(sequence.tokens)
    return min(in_turn, in_episode, sequence.tokens_left) - 1


def draft_limits(
    rows: list[list[Sequence]],
    limit: int,
    layout_of: Callable[[Sequence], Layout],
) -> list[int]:
    """Returns how many tokens may be drafted for each row: at most `limit`, and what its sequences may have."""
    limits = []
    for row in rows:
        of_sequences = [_sequence_limit(sequence, layout_of(sequence).lengths) for sequence in row]
        limits.append(min(limit, *of_sequences))
    return limits


def drafter_of(
    model: CausalLM,
    limit: int,
    stop_id: int,
    sequences: Several[Sequence],
) -> Drafter | None:
    """Returns the drafter of a run; None if the `limit` is 0, or if the cost of a token is not known: on MPS."""
    device = model.head_weight.device.type
    if limit and device == "cpu":
        return Drafter(limit, stop_id, sequences)
    if limit and device == "cuda":
        return Drafter(limit, stop_id, sequences, token_cost=CARD_TOKEN_COST)
    return None


def append_sampled(
    rows: list[list[Sequence]],
    drafts: list[list[int]],
    sample: Callable[[SamplingBatch], list[SampledToken]],
    append: Callable[[Sequence, SampledToken], bool],
    turn_is_over: Callable[[Sequence], bool],
) -> Agreement:
    """Samples after a pass, and appends tokens to each row's sequences: one, or with a draft perhaps several.

    The pass has run the last token of the first row and its draft, then those of the next row, and so on. Sampled
    tokens are appended as long as they agree with the row's draft, and one more; none after the end of a turn. `append`
    returns False if the sequence failed instead.
    """
    sampled = {}  # by Python's id of the sequence, and how many drafted tokens come before the sampled one
    for batch in sampling_batches(rows, drafts):
        for sequence, depth, token in zip(batch.sequences, batch.depths, sample(batch), strict=True):
            sampled[id(sequence), depth] = token
    agreement = Agreement(examined=[0] * len(rows), accepted=[0] * len(rows), not_finite=set())
    for row, (members, draft) in enumerate(zip(rows, drafts, strict=True)):
        for sequence in members:
            for depth in range(1 + len(draft)):
                if not append(sequence, sampled[id(sequence), depth]):
                    agreement.not_finite.add(id(sequence))
                    break
                if depth == len(draft):
                    break
                agreement.examined[row] += 1
                if sequence.tokens[-1] != draft[depth]:
                    break
                agreement.accepted[row] += 1
                if turn_is_over(sequence):
                    break
    return agreement


def worthwhile(
    share: float,
    least_probability: float,
    limit: int,
) -> tuple[int, float]:
    """Returns the number of tokens to draft, at most `limit`, and how many of them are accepted on average.

    Token number i is accepted with probability share^i; it is drafted if that is above `least_probability`.
    """
    count = 0
    gain = 0.0
    probability = share
    while count < limit and probability > least_probability:
        count += 1
        gain += probability
        probability *= share
    return count, gain


def _match_length(tokens: list[int], occurrence: Occurrence) -> int:
    """Returns how many of the last tokens, at least 3 and at most LONGEST_MATCH, are those of the occurrence."""
    text, end = occurrence
    length = 3
    longest = min(LONGEST_MATCH, len(tokens), end)
    # `tokens` and `text[:end]` both end with the match. It is extended backwards, by one token at a time.
    while length < longest and text[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
