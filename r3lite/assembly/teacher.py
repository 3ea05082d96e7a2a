"""The teacher of failed episodes: a model that is loaded beside the policy in each round, or a cache of distributions.

`ppo` makes its batches here. `teacher_cache.py` writes the cache.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from r3lite.assembly.policy import Policy, check_base, check_lengths, load_frozen
from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import folder_fingerprint
from r3lite.core.inherited import adapter_folder
from r3lite.datasets import teacher_logprobs
from r3lite.datasets.teacher_logprobs import Lesson
from r3lite.datasets.trajectories import Row
from r3lite.models import activation_checkpointing, lora, weights
from r3lite.models.logprobs import TopTokens, top_logprobs
from r3lite.models.packing import pack_rows, states_before
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.learner import Learner
from r3lite.settings import ModelSettings, PpoConfig, RLSettings

ADAPTER = "teacher"


@torch.no_grad()
def top_tokens(
    policy: Policy,
    vocabulary: int,
    top: int,
    rows: list[Row],
    max_rows: int | None = None,
) -> list[TopTokens]:
    """Returns for each row the model's distributions, at temperature 1, for those tokens of the row that have loss.

    A distribution has the `top` likeliest tokens among the first `vocabulary` ids. At most `max_rows` rows go through
    the model together.
    """
    by_row: dict[int, TopTokens] = {}  # by the index of the row
    memory = policy.grant.memory
    head = policy.model.head_weight[:vocabulary]  # [V, C]
    tokens_of_rows = [row.tokens for row in rows]
    for pack in pack_rows(tokens_of_rows, memory.micro_batch_tokens, max_rows or len(rows)):
        packed_rows = [rows[i] for i in pack]
        with policy.precision.autocast():
            tokens = [row.tokens for row in packed_rows]
            masks = [row.action_mask for row in packed_rows]
            hidden, _ = states_before(policy.model, tokens, masks)
            likeliest = top_logprobs(hidden, head, k=min(top, vocabulary), chunk=memory.loss_chunk)
        likeliest = TopTokens(likeliest.ids.cpu(), likeliest.logprobs.cpu())
        parts = likeliest.split([row.loss_tokens for row in packed_rows])
        by_row.update(zip(pack, parts, strict=True))
    return [by_row[i] for i in range(len(rows))]


def fingerprint(folder: Path, adapter: str | None, nf4: bool) -> str:
    """Returns a text that differs between teachers with different distributions."""
    parts = [weights.fingerprint(folder) or "unknown"]
    if nf4:
        parts.append("nf4")
    if adapter:
        parts.append(folder_fingerprint(adapter_folder(adapter)))
    return "-".join(parts)


@dataclass(frozen=True)
class TeacherInTurns:
    """Loads the teacher for each round, beside the policy, and drops it before the update."""

    folder: Path
    settings: RLSettings
    learner: Learner
    vocabulary: int
    nf4_cache: str | None

    def batch(self, rollouts: list[Rollout], questions: dict[int, str]) -> Batch:
        """Returns the rollouts as a batch, with the teacher's distributions at the tokens of those that failed.

        `questions`, the id of each group's question, is not needed here.
        """
        batch = Batch.of(rollouts)
        failed_rows = [row for row, rollout in enumerate(rollouts) if rollout.failed]
        if not failed_rows:
            return batch
        ranks = self.learner.ranks
        tokens = batch.token_rows()
        # This rank's share, as indices in `failed_rows`.
        share = ranks.rows_of_rank([len(tokens[row]) for row in failed_rows])
        rows = [failed_rows[i] for i in share]
        distributions = self.learner.grant.run_within_memory("update", self.read, batch.select(rows))
        by_row: dict[int, TopTokens] = {}
        for rank_part in ranks.gather(dict(zip(rows, distributions, strict=True))):
            by_row |= rank_part
        return replace(batch, teacher=[by_row.get(row) for row in range(len(rollouts))])

    def read(self, batch: Batch) -> list[TopTokens]:
        """Loads the teacher; returns its distributions at the action tokens of each row."""
        settings = self.settings
        precision = self.learner.precision
        grant = self.learner.grant
        model = load_frozen(
            self.folder,
            precision,
            nf4=settings.teacher_quantize == "nf4",
            cache=self.nf4_cache,
        )
        if settings.teacher_adapter:
            lora.load_adapter(model, ADAPTER, settings.teacher_adapter, trainable=False)
            lora.set_adapter(model, ADAPTER)
        activation_checkpointing.enable(model, grant)
        rows = []
        for tokens, mask in zip(batch.token_rows(), batch.action_mask.tolist(), strict=True):
            rows.append(Row(tokens=tokens, action_mask=mask[: len(tokens)]))
        return top_tokens(
            Policy(model.eval(), precision, grant),
            vocabulary=self.vocabulary,
            top=settings.teacher_top,
            rows=rows,
            max_rows=settings.micro_batch_size,
        )


@dataclass(frozen=True)
class CachedTeacher:
    """Replaces failed episodes by cached trajectories of their questions, with a teacher's distributions."""

    lessons: dict[str, Lesson]

    def batch(self, rollouts: list[Rollout], questions: dict[int, str]) -> Batch:
        """Returns the rollouts as a batch, in which cached trajectories replace failed rollouts of their questions.

        `questions` has the id of each group's question. A trajectory gets the reward of the rollout that it replaces,
        so that the advantages of the group stay as they are.
        """
        return Batch.of([self.replaced(rollout, questions[rollout.group]) for rollout in rollouts])

    def replaced(self, rollout: Rollout, question: str) -> Rollout:
        """Returns the rollout or, if it failed and `question` has a trajectory, that trajectory with the same reward.

        Raises R3LiteError if the trajectory does not begin with the rollout's prompt.
        """
        lesson = self.lessons.get(question)
        if not rollout.failed or lesson is None:
            return rollout
        row = lesson.row
        prompt_length = rollout.record.action_mask.index(True)
        prompt = rollout.record.first(prompt_length)
        start = row.first(len(prompt.tokens))
        if start.tokens != prompt.tokens or any(start.action_mask):
            cause = f"the cached trajectory of question {question} has another prompt than its episodes"
            raise R3LiteError(
                cause,
                "Collect the log-probabilities with this run's --format, prompts and questions.",
                code="lesson-prompt-differs",
            )
        trajectory = Rollout.with_final_reward(row, reward=rollout.total, group=rollout.group)
        return replace(trajectory, failed=True, teacher=lesson.teacher, signal=rollout.signal)


Teacher = CachedTeacher | TeacherInTurns


def build_teacher(
    config: PpoConfig, learner: Learner, tokenizer: Tokenizer, questions: Sequence[Question]
) -> Teacher | None:
    """Returns the teacher of the settings; None without one. Raises R3LiteError if it does not fit the policy."""
    rl = config.rl
    if rl.teacher_logprobs:
        return _cached_teacher(Path(rl.teacher_logprobs), config, tokenizer=tokenizer, questions=questions)
    if rl.teacher is None:
        return None
    folder = weights.resolve_folder(rl.teacher)
    if Tokenizer.load(folder).fingerprint != tokenizer.fingerprint:
        cause = f"the teacher {rl.teacher} and the policy {config.model.model} have different tokenizers"
        raise R3LiteError(cause, "Pass a --teacher of the policy's model family.", code="teacher-tokenizer-differs")
    check_lengths(folder, tokenizer.size, config.lengths.max_length)
    if rl.teacher_adapter:
        settings = ModelSettings(model=rl.teacher, adapter=rl.teacher_adapter)
        check_base(settings, weights.fingerprint(folder))
    return TeacherInTurns(
        folder=folder,
        settings=rl,
        learner=learner,
        vocabulary=tokenizer.size,
        nf4_cache=config.memory.nf4_cache,
    )


def _cached_teacher(
    folder: Path,
    config: PpoConfig,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
) -> CachedTeacher:
    """Returns the teacher of a cache; raises R3LiteError if it has a trajectory for none of the questions."""
    lessons = teacher_logprobs.read_cache(folder, tokenizer.fingerprint, config.lengths.max_length)
    count = sum(question.id in lessons for question in questions)
    if not count:
        cause = f"{folder} has no trajectory for any of the {len(questions)} questions"
        raise R3LiteError(
            cause, "Collect log-probabilities for trajectories of the questions in --data.", code="lessons-absent"
        )
    print(f"teacher: {folder} has trajectories for {count} of {len(questions)} questions", file=sys.stderr)
    return CachedTeacher(lessons)


def identity(rl: RLSettings) -> str:
    """Returns a text that differs if two runs have different teachers; empty without a teacher."""
    if rl.teacher_logprobs:
        return teacher_logprobs.identity(Path(rl.teacher_logprobs))
    if rl.teacher is None:
        return ""
    folder = weights.resolve_folder(rl.teacher)
    return fingerprint(folder, rl.teacher_adapter, nf4=rl.teacher_quantize == "nf4")
