"""The episodes of a round of --learn turn: several ends of each context, which may lack gold paragraphs.

A context is the beginning of a demonstration (see answer_contexts.py), and an end is a context with one more turn. If
the context has every gold paragraph, the turn has to answer and is rewarded by exact match. Otherwise it has to search,
and is rewarded if its query finds a gold paragraph that the context lacks. A turn that does the other thing has the
reward 0: if a search that is not needed had none, as with --learn answer, the policy would learn to search too often.
"""

import statistics
from dataclasses import dataclass
from itertools import chain

from r3lite.assembly.answer_round import AnswerSampler
from r3lite.assembly.rl_round import Round
from r3lite.core.answer_match import answer_scores
from r3lite.core.episode import SEARCHING, Failure, retrieve_all
from r3lite.rewards.reward import EpisodeReward
from r3lite.rollout.sequence import Sequence


@dataclass
class TurnSampler(AnswerSampler):
    """Samples the rounds of --learn turn: --batch-size contexts, each with --num-generations ends."""

    def score(self, number: int, sequences: list[Sequence], groups: list[int]) -> Round:
        """Returns the ends with their rewards.

        The reward is missing if the retriever fails. The metric `ends/found_ratio` is the share of the turns that have
        to search and find a missing gold paragraph.
        """
        rewards = super().score(number, sequences, groups).rewards
        searching = [i for i, end in enumerate(sequences) if missing_gold(end)]  # ends whose turn has to search
        found = self.ranks.from_first(lambda: self._found([sequences[i] for i in searching]))
        for i, is_found in zip(searching, found, strict=True):
            rewards[i] = None if is_found is None else self._reward_of_search(sequences[i], is_found)
        for i, end in enumerate(sequences):
            if end.finish == SEARCHING and i not in searching:
                rewards[i] = self._reward_of_search(end, is_found=False)
        scored = [is_found for is_found in found if is_found is not None]
        metrics = {"ends/found_ratio": statistics.fmean(scored)} if scored else {}
        return Round(sequences, rewards, groups, extra_metrics=metrics)

    def _found(self, ends: list[Sequence]) -> list[bool | None]:
        """Returns for each end whether a query of its turn finds a gold paragraph that its context lacks.

        None: the retriever failed at a query.
        """
        pairs = []
        for end in ends:
            pairs += [(end.question, search) for search in end.steps[-1].searches]
        outcomes = iter(retrieve_all(self.retrieve, pairs))
        found: list[bool | None] = []
        for end in ends:
            of_turn = [next(outcomes) for _ in end.steps[-1].searches]
            if any(isinstance(outcome, Failure) for outcome in of_turn):
                found.append(None)
            else:
                gold = end.question.gold_indices(chain.from_iterable(of_turn))
                found.append(not gold.isdisjoint(missing_gold(end)))
        return found

    def _reward_of_search(self, end: Sequence, is_found: bool) -> EpisodeReward:
        """Returns the reward of an end whose turn searches or has to search, given at its last step."""
        amount = self.config.reward.outcome_em if is_found else 0.0
        episode = end.episode()
        em, f1 = answer_scores(episode)
        by_step = [0.0] * len(end.steps)
        by_step[-1] = amount
        parts = {"format": 0.0, "process": amount, "outcome": 0.0, "em": em, "f1": f1, "recall": episode.recall}
        return EpisodeReward(by_step, parts)


def missing_gold(end: Sequence) -> set[int]:
    """Returns the indices of the gold paragraphs that an end's context lacks, in its documents as they were cut."""
    question = end.question
    documents = [document for step in end.steps[:-1] for document in step.documents]
    return set(range(len(question.gold))) - question.gold_indices(documents)
