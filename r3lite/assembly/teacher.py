"""The teacher of failed episodes: a model that is loaded in turns with the policy, or a cache of what it said.

`ppo` makes its batches here, and `collect` writes the cache.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from r3lite.assembly.policy import Policy, check_base, check_lengths, load_frozen, load_policy
from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import folder_fingerprint, sole_writer, sweep
from r3lite.datasets import teacher_logprobs
from r3lite.datasets.teacher_logprobs import PART, Lesson, Origin
from r3lite.datasets.trajectories import Conversation, Row, Trajectory, encode_row, read_rows
from r3lite.datasets.trajectories import fingerprint as rows_fingerprint
from r3lite.devices.live_tensors import MIB
from r3lite.memory.plan import Plan, make_plan
from r3lite.memory.workloads import read_workload
from r3lite.models import activation_checkpointing, lora, weights
from r3lite.models.logprobs import TopTokens, top_logprobs
from r3lite.models.packing import groups, states_before
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Layout
from r3lite.rl.batch import Batch, Rollout
from r3lite.rl.learner import Learner
from r3lite.settings import CollectConfig, ModelSettings, PpoConfig, RLSettings

ADAPTER = "teacher"


@torch.no_grad()
def top_tokens(policy: Policy, vocabulary: int, top: int, rows: list[Row], most: int | None = None) -> list[TopTokens]:
    """What a model would have said, at temperature 1, at each token of the rows that has loss: its `top` likeliest
    tokens of `vocabulary`. At most `most` rows go through the model together."""
    found: dict[int, TopTokens] = {}
    memory, head = policy.grant.memory, policy.model.head_weight[:vocabulary]
    for group in groups([row.tokens for row in rows], memory.micro_batch_tokens, most or len(rows)):
        with policy.precision.autocast():
            tokens, masks = [rows[i].tokens for i in group], [rows[i].loss_mask for i in group]
            hidden, _ = states_before(policy.model, tokens, masks)
            likeliest = top_logprobs(hidden, head, min(top, vocabulary), memory.loss_chunk)
        said = TopTokens(likeliest.ids.cpu(), likeliest.logprobs.cpu())
        found |= zip(group, said.split([rows[i].loss_tokens for i in group]), strict=True)
    return [found[i] for i in range(len(rows))]


def fingerprint(folder: Path, adapter: str | None, nf4: bool) -> str:
    """Tells teachers apart that say different things."""
    parts = [weights.fingerprint(folder) or "unknown", *(["nf4"] if nf4 else [])]
    return "-".join([*parts, *([folder_fingerprint(lora.adapter_folder(adapter))] if adapter else [])])


@dataclass(frozen=True)
class TeacherInTurns:
    """Loads the teacher for each round, beside the policy, and drops it before the update."""

    folder: Path
    settings: RLSettings
    learner: Learner
    vocabulary: int
    nf4_cache: str | None

    def batch(self, rollouts: list[Rollout], questions: dict[int, str]) -> Batch:
        """The rollouts, with what the teacher would have said at the tokens of those that failed."""
        batch = Batch.of(rollouts)
        if not (failed := [i for i, rollout in enumerate(rollouts) if rollout.failed]):
            return batch
        ranks, grant, rows = self.learner.ranks, self.learner.grant, batch.token_rows()
        mine = [failed[i] for i in ranks.share([len(rows[row]) for row in failed])]
        said = dict(zip(mine, grant.attempt("update", self.read, batch.rows(mine)), strict=True))
        said = {row: of_row for part in ranks.gather(said) for row, of_row in part.items()}
        return replace(batch, teacher=[said.get(row) for row in range(len(rollouts))])

    def read(self, batch: Batch) -> list[TopTokens]:
        """What the teacher would have said at the action tokens of each row."""
        s, precision, grant = self.settings, self.learner.precision, self.learner.grant
        model = load_frozen(self.folder, precision, s.teacher_quantize == "nf4", self.nf4_cache)
        if s.teacher_adapter:
            lora.load_adapter(model, ADAPTER, s.teacher_adapter, trainable=False)
            lora.set_adapter(model, ADAPTER)
        activation_checkpointing.enable(model, grant)
        pairs = zip(batch.token_rows(), batch.action_mask.tolist(), strict=True)
        rows = [Row(tokens, mask[: len(tokens)]) for tokens, mask in pairs]
        teacher = Policy(model.eval(), precision, grant)
        return top_tokens(teacher, self.vocabulary, s.teacher_top, rows, s.micro_batch_size)


@dataclass(frozen=True)
class CachedTeacher:
    """Replaces failed episodes by trajectories of their questions, along which a teacher's distributions are known."""

    lessons: dict[str, Lesson]

    def batch(self, rollouts: list[Rollout], questions: dict[int, str]) -> Batch:
        """The rollouts; in the place of each that failed, if there is one, the trajectory of its question.

        Its reward is given at the trajectory's end, so that the advantages of its group stay as they are.
        """
        return Batch.of([self.replaced(rollout, questions[rollout.group]) for rollout in rollouts])

    def replaced(self, rollout: Rollout, question: str) -> Rollout:
        """The rollout, or a trajectory as that of its question; R3LiteError if it does not begin with its prompt."""
        if not rollout.failed or not (lesson := self.lessons.get(question)):
            return rollout
        row, prompt = lesson.row, rollout.action_mask.index(True)
        if row.tokens[:prompt] != rollout.tokens[:prompt] or any(row.loss_mask[:prompt]):
            cause = f"the cached trajectory of question {question} has another prompt than its episodes"
            raise R3LiteError(cause, "Collect the log-probabilities with this run's --format, prompts and questions.")
        made = Rollout.with_final_reward(row.tokens, row.loss_mask, None, rollout.total, rollout.group)
        return replace(made, failed=True, teacher=lesson.teacher, signal=rollout.signal)


Teacher = CachedTeacher | TeacherInTurns


def build(config: PpoConfig, learner: Learner, tokenizer: Tokenizer, questions: Sequence[Question]) -> Teacher | None:
    """The teacher that the settings name, if they name one; R3LiteError if it does not fit the policy."""
    rl = config.rl
    if rl.teacher_logprobs:
        folder = Path(rl.teacher_logprobs)
        lessons = teacher_logprobs.read_cache(folder, tokenizer.fingerprint, config.lengths.max_length)
        known = sum(question.id in lessons for question in questions)
        if not known:
            cause = f"{folder} has no trajectory for any of the {len(questions)} questions"
            raise R3LiteError(cause, "Collect log-probabilities for trajectories of the questions in --data.")
        print(f"teacher: {folder} has trajectories for {known} of {len(questions)} questions", file=sys.stderr)
        return CachedTeacher(lessons)
    if rl.teacher is None:
        return None
    folder = weights.resolve_folder(rl.teacher)
    if Tokenizer.load(folder).fingerprint != tokenizer.fingerprint:
        cause = f"the teacher {rl.teacher} and the policy {config.model.model} have different tokenizers"
        raise R3LiteError(cause, "Pass a --teacher of the policy's model family.")
    check_lengths(folder, tokenizer.size, config.lengths.max_length)
    if rl.teacher_adapter:
        check_base(ModelSettings(model=rl.teacher, adapter=rl.teacher_adapter), weights.fingerprint(folder))
    return TeacherInTurns(folder, rl, learner, tokenizer.size, config.memory.nf4_cache)


def identity(rl: RLSettings) -> str:
    """Tells the teachers of two runs apart; empty without one."""
    if rl.teacher_logprobs:
        return teacher_logprobs.identity(Path(rl.teacher_logprobs))
    if rl.teacher is None:
        return ""
    return fingerprint(weights.resolve_folder(rl.teacher), rl.teacher_adapter, rl.teacher_quantize == "nf4")


def plan_cache(config: CollectConfig, rows: int = 1000) -> Plan:
    """The memory plan of the teacher alone, which reads `rows` trajectories."""
    return make_plan(read_workload(config.model, config.lengths.max_length, rows), config.memory)


def on_disk(tokens: int, top: int) -> str:
    """The size of a cache of `tokens` tokens with `top` log-probabilities each, for people."""
    return f"{tokens * top * teacher_logprobs.TOKEN_BYTES / MIB:,.0f} MiB"


def write_cache(config: CollectConfig) -> None:
    """Writes what a teacher would have said along trajectories; goes on with what an earlier run wrote."""
    data, cache, folder = config.data, config.cache, Path(config.cache.teacher_logprobs)
    with sole_writer(folder):
        base, protocol = weights.resolve_folder(config.model.model), build_protocol(config.protocol)
        tokenizer = Tokenizer.load(base, config.model.thinking)
        trajectories = read_rows(data.data, protocol, data.limit, data.skip_bad_rows)
        questions, rows = laid_out(trajectories, Layout(tokenizer, protocol, config.lengths))
        plan = plan_cache(config, len(rows))
        teacher = fingerprint(base, config.model.adapter, plan.memory.nf4)
        origin = Origin(teacher, tokenizer.fingerprint, rows_fingerprint(rows), str(cache.teacher_top))
        sweep(folder)
        done, tokens = teacher_logprobs.parts_done(folder, origin), sum(row.loss_tokens for row in rows)
        print(f"{len(rows)} trajectories, {tokens:,} tokens: {on_disk(tokens, cache.teacher_top)} on disk")
        if done * PART < len(rows):
            policy = load_policy(base, config.model, config.memory, plan)
            policy.model.eval()
            bar = tqdm(total=len(rows), initial=done * PART, desc="teacher", unit="trajectory", disable=None)
            for number in range(done, -(-len(rows) // PART)):
                part = rows[number * PART : (number + 1) * PART]
                said = top_tokens(policy, tokenizer.size, cache.teacher_top, part)
                teacher_logprobs.write_part(folder, number, origin, part, said)
                bar.update(len(part))
            bar.close()
        teacher_logprobs.finish(folder, origin, questions)
    print(f"written to {folder}")


def laid_out(trajectories: Sequence[Trajectory | Conversation], layout: Layout) -> tuple[list[str], list[Row]]:
    """The ids of the questions and the tokens of the trajectories that fit; prints how many do not."""
    if any(isinstance(row, Conversation) for row in trajectories):
        raise R3LiteError("--data has conversations", "Pass trajectories, which have steps, to --teacher-logprobs.")
    pairs = [(row.id, encoded) for row in trajectories if (encoded := encode_row(row, layout))]
    if left_out := len(trajectories) - len(pairs):
        most = layout.lengths.max_length
        print(f"left out {left_out} of {len(trajectories)} trajectories, longer than {most} tokens", file=sys.stderr)
    if not pairs:
        raise R3LiteError("no trajectory fits", "Raise --max-length.")
    return [id for id, _ in pairs], [row for _, row in pairs]
