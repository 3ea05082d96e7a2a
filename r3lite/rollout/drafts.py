"""Drafts from the context: tokens that probably come next, run in one pass and verified without loss.

Much of what a trained model writes is copied from the context: from the question, documents or its earlier steps.

1. Lookup (prompt lookup decoding). We look for the last occurrence of a row's last 3 tokens, else of its last 2: first
   in the episode itself, then in other episodes of the question in the same run. The tokens that followed there are the
   draft.
2. Length. We assume that token i of a draft is accepted with probability p^i. p is the share of the drafted tokens of
   this run that were accepted after matches of the same length. It starts from a prior (EXPECTED), and old tokens count
   less than new ones (FADING). Token i is drafted if p^i outweighs its cost, see `Drafter.propose`. The costs are
   constants and not measured by the clock, so that runs are repeatable to the bit.
3. Verification. One pass runs each row's last token and its draft (models/verification.py). The engine then samples
   the token after each of these at once, with the uniform numbers that sampling one by one would use (`Uniforms`). A
   row's sampled tokens are appended until one differs from the draft, ends its turn, or has logits that are not finite.
   Only the uniform numbers of appended tokens are removed from the stream. So the appended tokens are those of sampling
   one by one, except for the rounding of wider passes.
4. Roll-back. `Scheduler.split` removes from the cache the drafted tokens that were not accepted. If a hidden state of
   the pass is not finite, the whole pass is undone, and the rows are run without drafts. A NaN may come from a draft:
   attention gives later tokens a weight of 0, but 0 times NaN is NaN.

A CUDA graph runs the same number of tokens in each row. The more rows a graph has, the shorter drafts may be: see
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
# The unit of time is that of reading all weights once. A pass takes 1 + ROW_COST * rows + TOKEN_COST * drafted tokens,
# and PASS_COST more if there are drafts.
ROW_COST = 0.1
TOKEN_COST = 0.06
CARD_TOKEN_COST = 0.01  # TOKEN_COST on a card, where computing a token takes little beside reading the weights
PASS_COST = 0.1
MARGIN = 1.25  # the gain of drafts must be at least this many times their cost
# A prior: the share of drafted tokens that is expected to be accepted. The index is the length of the match. The prior
# has the weight of EXPECTED_WEIGHT examined tokens.
EXPECTED = (0.0, 0.0, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7, 0.8)
EXPECTED_WEIGHT = 8.0
FADING = 0.99  # the counts are multiplied by it at each match, because the texts of a run change

# The tokens of an episode, and the index of the token after a pair or triple. The list is the episode's own, which
# grows.
Occurrence = tuple[list[int], int]


class Occurrences:
    """The last place of each pair and triple of tokens that another token follows, in one or several episodes."""

    def __init__(self):
        self.pairs: dict[tuple[int, int], Occurrence] = {}
        self.triples: dict[tuple[int, int, int], Occurrence] = {}

    def read(self, tokens: list[int], first: int) -> None:
        """Adds those occurrences of an episode that are followed by the token at index `first` or by a later one.

        The earlier occurrences were added already.
        """
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
    length: int = 0  # how many of the sequence's tokens were read


@dataclass
class Acceptance:
    """How many drafted tokens were examined and accepted, after matches of one length. Both numbers fade."""

    expected: float  # the prior: the share that is expected to be accepted before any token was examined
    accepted: float = 0.0
    examined: float = 0.0

    @property
    def share(self) -> float:
        """The share of drafted tokens that is expected to be accepted from now on."""
        accepted = self.accepted + EXPECTED_WEIGHT * self.expected
        return accepted / (self.examined + EXPECTED_WEIGHT)

    def fade(self) -> None:
        """Makes the tokens examined so far count less than later ones."""
        self.accepted *= FADING
        self.examined *= FADING


@dataclass
class SamplingResult:
    """What came of a pass: how far drafts agreed with sampled tokens, and which sequences did not fail."""

    examined: list[int]  # for each row: the drafted tokens that were compared with sampled ones, over all its sequences
    accepted: list[int]  # for each row: those of them that were equal to the sampled ones
    surviving: list[Sequence]  # the sequences of all rows, without those that failed because logits were not finite


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
        # The occurrences in all episodes of a question that has several, by Python's id of the question.
        self.groups: dict[int, Occurrences] = {}
        for question_id, count in episode_counts.items():
            if count > 1:
                self.groups[question_id] = Occurrences()
        self.acceptances = [Acceptance(share) for share in EXPECTED]
        self.match_lengths: list[int] = []  # of each row in the last call of `propose`; 0: no match

    def propose(self, rows: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Returns a draft for each row, empty if none pays. `rows` has the first sequence of each row.

        `limits` are the most tokens that each row's draft may have. A drafted token pays if the probability that it is
        accepted exceeds `least_probability`.
        """
        speed = len(rows) / (1 + ROW_COST * len(rows))  # tokens per unit of time without drafts
        # A drafted token gains one token with the probability that it is accepted. It takes the time `token_cost`, in
        # which token_cost * speed tokens would be sampled without drafts.
        least_probability = MARGIN * self.token_cost * speed
        self.match_lengths = [0] * len(rows)
        drafts: list[list[int]] = [[] for _ in rows]
        self._read(rows)
        free_tokens = MOST_DRAFTED
        gain = 0.0  # the expected number of accepted tokens, over all rows
        for row, (sequence, row_limit) in enumerate(zip(rows, limits, strict=True)):
            length, occurrence = self._match(sequence)
            if not length:
                continue
            acceptance = self.acceptances[length]
            acceptance.fade()
            draft = self._continuation(occurrence, min(self.limit, row_limit, free_tokens))
            count, row_gain = worthwhile(acceptance.share, least_probability, len(draft))
            drafts[row] = draft[:count]
            self.match_lengths[row] = length
            free_tokens -= len(drafts[row])
            gain += row_gain
        # All drafts together must pay for what a pass with drafts costs in addition.
        if gain < MARGIN * PASS_COST * speed:
            return [[] for _ in rows]
        return drafts

    def record(self, result: SamplingResult) -> None:
        """Adds to the counts the examined and accepted tokens of the drafts that `propose` returned last."""
        counts_of_rows = zip(self.match_lengths, result.examined, result.accepted, strict=True)
        for length, examined, accepted in counts_of_rows:
            acceptance = self.acceptances[length]
            acceptance.examined += examined
            acceptance.accepted += accepted

    def _read(self, rows: list[Sequence]) -> None:
        """Adds the occurrences in the tokens that the rows have got since the last call; forgets finished sequences."""
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
        """Returns how many of a sequence's last tokens occurred before, and the occurrence; (0, ([], 0)) if none."""
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
    """Returns how many tokens may be drafted for a sequence; below 0 if it may not get even one token.

    It is one less than the tokens that the sequence may get: a pass may append one token more than the draft has.
    """
    in_turn = sequence.turn_start + lengths.max_new_tokens - len(sequence.tokens)
    in_episode = lengths.max_length - len(sequence.tokens)
    return min(in_turn, in_episode, sequence.tokens_left) - 1


def draft_limits(
    rows: list[list[Sequence]],
    limit: int,
    layout_of: Callable[[Sequence], Layout],
) -> list[int]:
    """Returns how many tokens may be drafted for each row: at most `limit`, and not too many for any sequence of it."""
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
    """Returns the drafter of a run. None if `limit` is 0, and on MPS, where the cost of a token is not known."""
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
) -> SamplingResult:
    """Samples after a pass, and appends tokens to each row's sequences: one, or with a draft perhaps several.

    The pass has run the last token of the first row and its draft, then those of the next row, and so on. Sampled
    tokens are appended up to the first one that differs from the row's draft or ends the turn. If all agree, the token
    after the draft is appended, too. `append` returns False if the sequence failed and no token was appended.
    """
    sampled = {}  # by Python's id of the sequence, and how many drafted tokens come before the sampled one
    for batch in sampling_batches(rows, drafts):
        for sequence, depth, token in zip(batch.sequences, batch.depths, sample(batch), strict=True):
            sampled[id(sequence), depth] = token
    result = SamplingResult(examined=[0] * len(rows), accepted=[0] * len(rows), surviving=[])
    for row, (members, draft) in enumerate(zip(rows, drafts, strict=True)):
        for sequence in members:
            is_finite = True
            for depth in range(1 + len(draft)):
                is_finite = append(sequence, sampled[id(sequence), depth])
                if not is_finite or depth == len(draft):
                    break
                result.examined[row] += 1
                if sequence.tokens[-1] != draft[depth]:
                    break
                result.accepted[row] += 1
                if turn_is_over(sequence):
                    break
            if is_finite:
                result.surviving.append(sequence)
    return result


def worthwhile(
    share: float,
    least_probability: float,
    limit: int,
) -> tuple[int, float]:
    """Returns how many tokens to draft, at most `limit`, and the expected number of them that are accepted.

    Token i, counted from 1, is accepted with probability share^i. It is drafted if that exceeds `least_probability`.
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
    """Returns how many of the last `tokens` also stand before the occurrence's index: from 3 to LONGEST_MATCH."""
    episode_tokens, end = occurrence
    length = 3  # the occurrence is one of a triple
    longest = min(LONGEST_MATCH, len(tokens), end)
    # `tokens` and `episode_tokens[:end]` both end with the match, which is extended backwards, token by token.
    while length < longest and episode_tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
