"""A trial of RL on last turns, rewarded by the probability of the right answer, after demonstrated documents.

    python -m bench.answer_likelihood --demonstrations gold.jsonl=99 --learn answer --adapter runs/sft --data TRAIN.json

It differs from `ppo --learn answer` in two ways, and takes the flags of ppo besides its own.

Contexts are those of demonstrations: their steps and documents without the last turn. So no episodes are sampled for
contexts. Of each file of --demonstrations so many contexts are drawn; a round takes the next --batch-size of them. Only
questions of the run count, and of those that are answered by yes or no, as many of each answer in each data set: else a
run learns which of both is more frequent.

The reward of an end is p, the probability that the policy writes the right answer after the analysis of this end
(VeriFree, arXiv 2505.21493). Exact match is 0 or 1, and often equal for all ends of a context; p tells them
apart. It is the expected exact match of the analysis, if an answer counts as right in one wording only. For the ends i
of a context the gradient is that of the mean of p:

    sum_i (p_i - mean of p_j, j != i) grad log pi(analysis_i)  +  sum_i p_i grad log pi(right answer | analysis_i)

The answers that were sampled are not learned. Ends that search again are left out, ends without an answer have p = 0.
bench/results/recipe.json has the results (trial 5). For the format r3 alone, on one process.
"""

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

from r3lite import ppo
from r3lite.assembly import reinforcement
from r3lite.assembly.answer_round import AnswerRound, AnswerSampler
from r3lite.assembly.reinforcement import RLTrainer
from r3lite.core.episode import ANSWERED, Question
from r3lite.core.spans import Stopwatch
from r3lite.core.token_record import TokenRecord
from r3lite.datasets.order import Passes
from r3lite.datasets.trajectories import read_rows
from r3lite.protocols.layout import Layout
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rl.advantages import leave_one_out
from r3lite.rl.algorithms.dr_grpo import DrGrpo
from r3lite.rl.batch import Batch, Rollout
from r3lite.rollout.sequence import Sequence as SampledSequence
from r3lite.rollout.uniforms import Uniforms

YES_NO = ("yes", "no")
MAX_CONTEXT = 1700  # tokens; longer contexts are left out, so that a last turn fits into the 2,048 of preset hotpotqa


@dataclass(frozen=True)
class Demonstrations:
    """A file of demonstrations, and how many contexts are drawn from it."""

    file: str
    count: int

    @staticmethod
    def parse(text: str) -> "Demonstrations":
        """Reads FILE=COUNT."""
        file, _, count = text.rpartition("=")
        return Demonstrations(file, int(count))


def balanced(questions: Sequence[Question]) -> list[Question]:
    """Returns the questions of each data set, but equally many that are answered by yes and by no."""
    rng = random.Random("yes and no")
    chosen = []
    for source in dict.fromkeys(question.source for question in questions):
        of_source = [question for question in questions if question.source == source]
        by_answer = {}
        for answer in YES_NO:
            by_answer[answer] = [question for question in of_source if question.answers[0].lower() == answer]
        count = min(map(len, by_answer.values()))
        drawn = set()
        for of_answer in by_answer.values():
            drawn |= {question.id for question in rng.sample(of_answer, count)}
        chosen += [q for q in of_source if q.answers[0].lower() not in YES_NO or q.id in drawn]
    return chosen


def contexts_of(
    files: Sequence[Demonstrations], questions: Sequence[Question], layout: Layout
) -> list[SampledSequence]:
    """Returns the demonstrations, in tokens, whose last turns are to be sampled anew."""
    by_text = {question.text: question for question in balanced(questions)}
    document_tokens = layout.lengths.max_document_tokens
    rng = random.Random("pool")
    contexts = []
    for demonstrations in files:
        rows = read_rows(demonstrations.file, layout.protocol)
        rng.shuffle(rows)
        drawn = []
        for row in rows:
            if row.question not in by_text or len(drawn) == demonstrations.count:
                continue
            transcript = layout.lay_out(by_text[row.question], row.steps, document_tokens)
            if transcript.turn_start > MAX_CONTEXT:
                continue
            drawn.append(SampledSequence(**vars(transcript) | {"finish": ANSWERED}, stream=Uniforms("")))
        contexts += drawn
    return contexts


@dataclass
class DemonstratedContexts(AnswerSampler):
    """Takes the contexts of rounds from demonstrations."""

    files = ()  # set by `main`

    def __post_init__(self):
        super().__post_init__()
        self.contexts = contexts_of(self.files, self.questions, self.engine.layout)

    def _draw(self, number: int) -> tuple[list[SampledSequence], list[SampledSequence]]:
        """Returns the contexts of a round, twice: they are what was drawn, too. Each pass over all is shuffled anew."""
        size = self.config.rl.batch_size
        passes = Passes(len(self.contexts), f"{self.config.common.seed}/")
        contexts = [self.contexts[i] for i in passes.rows((number - 1) * size, number * size)]
        return contexts, contexts


class GivenAdvantages(DrGrpo):
    """Dr. GRPO with advantages [B] that were computed before."""

    def with_advantages(self, batch: Batch) -> Batch:
        return replace(batch, advantages=self.advantages[:, None] * batch.action_mask)

    def statistics(self, batch: Batch) -> dict[str, float]:
        return {}


def answer_start(end: SampledSequence, heading: str, tokenizer: Tokenizer) -> int | None:
    """Returns the index of the first token of an end's answer; None if the heading's last token goes on behind it."""
    if end.closed_forced_step is not None:  # the heading was not sampled
        return end.turn_start
    turn = end.tokens[end.turn_start :]
    for length in range(1, len(turn) + 1):
        text = tokenizer.decode(turn[:length])
        if heading in text:
            return end.turn_start + length if text.endswith(heading) else None
    return None


def with_right_answer(end: SampledSequence, start: int, tokenizer: Tokenizer) -> TokenRecord:
    """Returns an end whose answer is the right one. Only the tokens of this answer are actions."""
    tokens = [*tokenizer.encode(f" {end.question.answers[0]}"), tokenizer.stop_id]
    return TokenRecord(
        tokens=end.tokens[:start] + tokens,
        action_mask=[False] * start + [True] * len(tokens),
        logprobs=[0.0] * len(tokens),
        values=[0.0] * len(tokens),
    )


@dataclass(frozen=True)
class LikelihoodTrainer(RLTrainer):
    """Learns from the probabilities of the right answers, see above."""

    def _learn(self, number: int, sampled: AnswerRound, watch: Stopwatch) -> dict[str, float]:
        layout = self.round_sampler.engine.layout
        answers: dict[int, tuple[int, TokenRecord]] = {}  # by the index of the end: where its answer starts
        rewards: dict[int, float] = {}  # by the index of the end
        for i, (end, reward) in enumerate(zip(sampled.sequences, sampled.rewards, strict=True)):
            if reward is None:  # it searches again
                continue
            if end.finish != ANSWERED:
                rewards[i] = 0.0
                continue
            start = answer_start(end, layout.protocol.answer_heading, layout.tokenizer)
            if start is not None:
                answers[i] = start, with_right_answer(end, start, layout.tokenizer)
        with watch.stage("likelihood"):
            records = [record for _, record in answers.values()]
            rewards |= dict(zip(answers, self._likelihoods(records), strict=True))
        sizes = Counter(sampled.groups[i] for i in rewards)
        ends = [i for i in sorted(rewards) if sizes[sampled.groups[i]] > 1]  # a single end has none to be compared with
        groups = [sampled.groups[i] for i in ends]
        of_analyses = leave_one_out(torch.tensor([rewards[i] for i in ends]), torch.tensor(groups)).tolist()
        rows: list[tuple[Rollout, float]] = []  # with their advantages
        for i, group, advantage in zip(ends, groups, of_analyses, strict=True):
            end = sampled.sequences[i]
            start, answer = answers.get(i, (len(end.tokens), None))
            analysis = end.first(start)
            if any(analysis.action_mask):
                rows.append((Rollout(analysis, token_rewards=[], group=group), advantage))
            if answer is not None:
                # The KL from the reference is measured without off-policy rows.
                rows.append((Rollout(answer, token_rewards=[], group=group, off_policy=True), rewards[i]))
        rows.sort(key=lambda row: (row[0].group, row[0].off_policy))  # off-policy rows come last in their group
        algorithm = GivenAdvantages(self.learner.settings, self.learner.algorithm.lengths)
        algorithm.advantages = torch.tensor([advantage for _, advantage in rows])
        with watch.stage("update"):
            learner = replace(self.learner, algorithm=algorithm)
            batch = Batch.of([rollout for rollout, _ in rows])
            record = learner.learn(batch, seed=f"{self.config.common.seed}/{number}")
        return record | {"likelihood": statistics.fmean(rewards.values())}

    def _likelihoods(self, records: Sequence[TokenRecord]) -> list[float]:
        """Returns the probability of the action tokens of each record, and stores their log-probabilities in it."""
        if not records:
            return []
        batch = Batch.of([Rollout(record, token_rewards=[], group=0) for record in records])
        logprobs: Tensor = self.learner.run_on_all_ranks(self.learner.policy_logprobs, batch)
        for record, row in zip(records, logprobs, strict=True):
            record.logprobs = row[torch.tensor(record.action_mask + [False] * (len(row) - len(record.tokens)))].tolist()
        return logprobs.sum(-1).exp().tolist()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--demonstrations", nargs="+", type=Demonstrations.parse, required=True, metavar="FILE=COUNT")
    flags, of_ppo = parser.parse_known_args(argv)
    with (
        mock.patch.object(DemonstratedContexts, "files", flags.demonstrations),
        mock.patch.object(reinforcement, "AnswerSampler", DemonstratedContexts),
        mock.patch.object(reinforcement, "RLTrainer", LikelihoodTrainer),
    ):
        return ppo.main(of_ppo)


if __name__ == "__main__":
    raise SystemExit(main())
