"""The episodes of a round of --learn answer: several ends of each context. Only the last turn of an end is learned.

A context is an episode without its last turn. Only episodes whose documents have every gold paragraph give one. An end
is a context with a new last turn. All ends of a context read the same documents, so their rewards do not depend on the
luck of retrieval. Training on reading alone is reported to help in arXiv 2505.13258 and 2503.12759.
"""

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import ClassVar

from r3lite.assembly.rl_round import Round, RoundSampler
from r3lite.core.config import UsageError, flag
from r3lite.core.episode import SEARCHING
from r3lite.core.errors import R3LiteError
from r3lite.core.spans import Stopwatch
from r3lite.datasets.sources import protocols_of
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.algorithms.base import Algorithm
from r3lite.rl.refill import groups_with_variance
from r3lite.rollout.engine import Engine
from r3lite.rollout.sequence import Sequence
from r3lite.settings import PpoConfig
from r3lite.settings.rl import UNPAID_FOR_ANSWERS

DRAWS_PER_CONTEXT = 4  # a round draws at most this many questions for each context that it needs
MIN_DRAW_LIMIT = 64  # as long as a round has no context, it may draw at least this many questions


@dataclass(frozen=True)
class AnswerRound(Round):
    """The ends of a round's contexts.

    Groups without variance have nothing to teach and are not learned from. (`LikelihoodRound`, which also learns right
    answers, chooses its groups by another rule.)
    """

    drawn: list[Sequence] = field(default_factory=list)  # the whole episodes; some of them give a context

    @property
    def token_count(self) -> int:
        """The number of tokens of the whole episodes, plus that of the tokens sampled for the ends."""
        end_tokens = sum(sum(end.action_mask) for end in self.sequences)
        return end_tokens + sum(len(episode.tokens) for episode in self.drawn)

    def metrics(self) -> dict[str, float | None]:
        """Returns the metrics of the ends, and those of the whole episodes: `searches` and the `contexts/` metrics.

        `searches` is of the whole episodes, since an end makes no search. `contexts/zero_std` is the share of contexts
        whose ends all have the same reward. frac_reward_zero_std does not show this share: it is computed from the
        batch, from which these contexts are left out (with verifree, only those whose rewards are all 0).
        """
        episodes = [sequence.episode() for sequence in self.drawn]
        group_count = len(set(self.groups))
        return super().metrics() | {
            "searches": statistics.fmean(episode.search_count for episode in episodes),
            "contexts/episodes": len(episodes),
            "contexts/recall": statistics.fmean(episode.recall or 0.0 for episode in episodes),
            "contexts/full_recall": statistics.fmean(map(is_context, self.drawn)),
            "contexts/zero_std": 1 - len(groups_with_variance(self.signals())) / group_count,
            "ends/searching_ratio": statistics.fmean(end.finish == SEARCHING for end in self.sequences),
        }


@dataclass
class AnswerSampler(RoundSampler):
    """Samples the rounds of --learn answer: --batch-size contexts, each with --num-generations ends."""

    engine: Engine  # never a remote engine, which has no `end_again`
    # By the id of their question, see answer_contexts.py. None: contexts are sampled for each round.
    contexts: dict[str, Sequence] | None = None
    requirement: ClassVar[str] = "retrieved every gold paragraph"  # of contexts, as an error says it

    def __post_init__(self):
        if self.contexts is not None:
            self.questions = [question for question in self.questions if question.id in self.contexts]
        super().__post_init__()
        self.order = replace(self.order, generations=1)  # one whole episode of each question

    def run_stages(self, number: int, watch: Stopwatch) -> AnswerRound:
        """Samples and scores the ends of a round's contexts; `watch` times its stages."""
        rl = self.config.rl
        with watch.stage("contexts"):
            drawn, contexts = self._draw(number)
        starts = []
        seeds = []
        for i, context in enumerate(contexts):
            for k in range(rl.num_generations):
                starts.append(context)
                seeds.append(f"{self.config.common.seed}/end {number}/{i}/{k}")
        with watch.stage("rollout"):
            ends = self.sample_episodes(self.engine.end_again, starts, seeds)
        with watch.stage("score"):
            groups = [i // rl.num_generations for i in range(len(ends))]
            this_round = self.score(number, ends, groups)
        metrics = self.cache.metrics() if self.cache else {}
        return AnswerRound(
            sequences=ends,
            rewards=this_round.rewards,
            groups=groups,
            learned_groups=groups_with_variance(this_round.signals()),
            extra_metrics=metrics,
            drawn=drawn,
        )

    def _draw(self, number: int) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the whole episodes of a round, and --batch-size of them that give a context.

        With --contexts both are the demonstrations of the next questions. Otherwise there are fewer contexts if the
        limit of draws is reached; raises R3LiteError if there is none. Questions are drawn in batches, since sampling
        many episodes together takes hardly longer than sampling one. Each further batch has as many questions as should
        yield the missing contexts if the share of usable episodes stays as it was so far.
        """
        size = self.config.rl.batch_size
        drawn: list[Sequence] = []
        contexts: list[Sequence] = []
        questions, seeds = self.order.of_round(number, size)
        if self.contexts is not None:
            contexts = [self.contexts[question.id] for question in questions]
            return contexts, contexts
        attempt = 0
        while True:
            sampled = self.sample_episodes(self.engine.run, questions, seeds)
            drawn += sampled
            contexts += [sequence for sequence in sampled if self.is_usable(sequence)]
            limit = DRAWS_PER_CONTEXT * size
            if not contexts:
                limit = max(limit, MIN_DRAW_LIMIT)
            if len(contexts) >= size or len(drawn) >= limit:
                break
            attempt += 1
            missing = size - len(contexts)
            needed = math.ceil(missing * len(drawn) / max(len(contexts), 1))
            used = {sequence.question.id for sequence in drawn}
            questions, seeds = self.order.of_refill(
                number,
                attempt,
                size=min(needed, limit - len(drawn)),
                used=used,
            )
        if not contexts:
            cause = f"none of {len(drawn)} episodes {self.requirement}, but --learn answer needs such episodes"
            raise R3LiteError(
                cause,
                "Raise --top-k or --max-hops, check the retriever, or pass --contexts.",
                code="no-complete-contexts",
            )
        return drawn, contexts[:size]

    def is_usable(self, sequence: Sequence) -> bool:
        """Returns whether an episode gives a context whose ends can be learned."""
        return is_context(sequence)


def is_context(sequence: Sequence) -> bool:
    """Returns whether an episode gives a context.

    It does if no retrieval failed and its documents, which may have been cut to fit, have every gold paragraph.
    """
    return sequence.failure is None and sequence.episode().recall == 1.0


def check(config: PpoConfig) -> None:
    """Raises UsageError if a setting makes no sense with --learn answer, or if the algorithm needs --learn answer."""
    rl = config.rl
    if rl.learn != "answer":
        if ALGORITHMS[rl.algorithm].learns_right_answers:
            raise UsageError(
                f"--algorithm {rl.algorithm} learns last turns: pass --learn answer", code="algorithm-of-answers"
            )
        return
    if not learns_from_ends(ALGORITHMS[rl.algorithm]):
        names = ", ".join(name for name, algorithm in ALGORITHMS.items() if learns_from_ends(algorithm))
        raise UsageError(
            f"--learn answer compares the ends of a context, which {rl.algorithm} cannot: pass {names}",
            code="ends-not-compared",
        )
    if config.retrieval.retriever == "none":
        raise UsageError(
            "--learn answer needs retrieved documents, but --retriever is none", code="answers-without-documents"
        )
    if not any(protocol.can_search for protocol in protocols_of(config.protocol, config.mixture).values()):
        raise UsageError(
            f"--learn answer needs a --format that searches, which {config.protocol.format} does not",
            code="answers-without-searches",
        )
    if rl.contexts and any("format" in entry for entry in config.mixture.sources or ()):
        raise UsageError(
            "--contexts needs sources of one format: pass --format, without a format of a source",
            code="contexts-of-formats",
        )
    if config.remote.rollout_server:
        raise UsageError("--learn answer does not work with --rollout-server: remove one", code="answers-from-workers")
    if rl.expand_limit or rl.refill_limit:
        name = "expand_limit" if rl.expand_limit else "refill_limit"
        raise UsageError(
            f"--learn answer does not work with {flag(name)}: pass {flag(name)} 0", code="answers-with-setting"
        )
    if not config.reward.outcome_em:
        raise UsageError("--learn answer pays --outcome-em alone: pass --outcome-em above 0", code="answers-unrewarded")
    for name in UNPAID_FOR_ANSWERS:
        if getattr(config.reward, name):
            raise UsageError(
                f"--learn answer pays --outcome-em alone: remove {flag(name)}", code="answers-reward-em-alone"
            )


def learns_from_ends(algorithm: type[Algorithm]) -> bool:
    """Returns whether an algorithm can learn from ends.

    It must compare the episodes of a group, and have no critic, traces, replay buffer or teacher.
    """
    learns_off_policy = algorithm.has_traces or algorithm.has_replay or algorithm.has_teacher
    return algorithm.has_groups and not algorithm.has_critic and not learns_off_policy
