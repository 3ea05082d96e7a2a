"""The cache of a teacher's distributions along trajectories, which `collect --teacher-logprobs` writes."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from r3lite.assembly.policy import load_policy
from r3lite.assembly.teacher import fingerprint, top_tokens
from r3lite.core.errors import R3LiteError
from r3lite.core.files import sole_writer, sweep
from r3lite.datasets import teacher_logprobs
from r3lite.datasets.teacher_logprobs import ROWS_PER_PART, CacheOrigin
from r3lite.datasets.trajectories import Conversation, Row, Trajectory, encode_row, read_rows
from r3lite.datasets.trajectories import fingerprint as rows_fingerprint
from r3lite.devices.live_tensors import MIB
from r3lite.memory.plan import Plan, make_plan
from r3lite.memory.workloads import read_workload
from r3lite.models import weights
from r3lite.protocols.layout import Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.settings import CollectConfig


def plan_memory(config: CollectConfig, rows: int = 1000) -> Plan:
    """Returns the memory plan of the teacher alone, which reads `rows` trajectories."""
    workload = read_workload(config.model, config.lengths.max_length, rows)
    return make_plan(workload, config.memory)


def size_on_disk(tokens: int, top: int) -> str:
    """Returns the size of a cache of `tokens` tokens with `top` log-probabilities each, as a text."""
    return f"{tokens * top * teacher_logprobs.TOKEN_BYTES / MIB:,.0f} MiB"


def write_cache(config: CollectConfig) -> None:
    """Writes a teacher's distributions along trajectories; goes on after the parts that an earlier run wrote."""
    data = config.data
    top = config.cache.teacher_top
    folder = Path(config.cache.teacher_logprobs)
    with sole_writer(folder):
        base = weights.resolve_folder(config.model.model)
        protocol = build_protocol(config.protocol)
        tokenizer = Tokenizer.load(base, config.model.thinking)
        trajectories = read_rows(data.data, protocol, limit=data.limit, skip_bad_rows=data.skip_bad_rows)
        questions, rows = laid_out(trajectories, Layout(tokenizer, protocol, config.lengths))
        plan = plan_memory(config, len(rows))
        origin = CacheOrigin(
            teacher=fingerprint(base, config.model.adapter, nf4=plan.memory.nf4),
            tokenizer=tokenizer.fingerprint,
            trajectories=rows_fingerprint(rows),
            top=str(top),
        )
        sweep(folder)
        parts_done = teacher_logprobs.parts_done(folder, origin)
        token_count = sum(row.loss_tokens for row in rows)
        print(f"{len(rows)} trajectories, {token_count:,} tokens: {size_on_disk(token_count, top)} on disk")
        if parts_done * ROWS_PER_PART < len(rows):
            policy = load_policy(base, config.model, memory=config.memory, plan=plan)
            policy.model.eval()
            rows_done = parts_done * ROWS_PER_PART
            bar = tqdm(total=len(rows), initial=rows_done, desc="teacher", unit="trajectory", disable=None)
            for number in range(parts_done, math.ceil(len(rows) / ROWS_PER_PART)):
                part = rows[number * ROWS_PER_PART : (number + 1) * ROWS_PER_PART]
                distributions = top_tokens(policy, vocabulary=tokenizer.size, top=top, rows=part)
                teacher_logprobs.write_part(folder, number, origin=origin, rows=part, teacher=distributions)
                bar.update(len(part))
            bar.close()
        teacher_logprobs.write_manifest(folder, origin, questions)
    print(f"written to {folder}")


def laid_out(trajectories: Sequence[Trajectory | Conversation], layout: Layout) -> tuple[list[str], list[Row]]:
    """Returns the ids of the questions and the tokens of the trajectories that fit; prints how many do not.

    Raises R3LiteError if none fits, or if there is a conversation.
    """
    if any(isinstance(row, Conversation) for row in trajectories):
        raise R3LiteError(
            "--data has conversations",
            "Pass trajectories, which have steps, to --teacher-logprobs.",
            code="teacher-conversations",
        )
    questions = []
    rows = []
    for trajectory in trajectories:
        row = encode_row(trajectory, layout)
        if row:
            questions.append(trajectory.id)
            rows.append(row)
    left_out = len(trajectories) - len(rows)
    if left_out:
        longest = layout.lengths.max_length
        print(f"left out {left_out} of {len(trajectories)} trajectories, longer than {longest} tokens", file=sys.stderr)
    if not rows:
        raise R3LiteError("no trajectory fits", "Raise --max-length.", code="no-trajectory-fits")
    return questions, rows
