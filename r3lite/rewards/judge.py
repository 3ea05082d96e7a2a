"""A language model as judge: one call per episode says whether the answer is right and how good each step was.

Owns the question that is put to the judge and the form of its verdict. Knows no network (see llm/client.py) and no
weights (see reward.py).
"""

import functools
import json
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3lite.core.episode import Episode, Step
from r3lite.core.errors import R3LiteError
from r3lite.core.files import shipped
from r3lite.core.records import Record, Source, shown
from r3lite.core.spans import NO_SPANS, Spans
from r3lite.llm.episodes import DOCUMENT_LENGTH, described
from r3lite.llm.replies import FAILURES, Reply, Request
from r3lite.protocols.templates import filled
from r3lite.rewards.registry import needs_verdict
from r3lite.rewards.verdict import StepVerdict, Verdict
from r3lite.settings import JudgeSettings, RewardSettings

if TYPE_CHECKING:  # its libraries take long to load
    from r3lite.llm.client import Client

OUTPUT_TOKENS = 256
OUTPUT_TOKENS_PER_STEP = 64
# The run stops when more than half of the last WINDOW replies failed (once there are MIN_REPLIES), when IN_A_ROW
# replies in a row failed, and when a round ends before any call succeeded.
WINDOW = 40
MIN_REPLIES = 20
IN_A_ROW = 8


def read_verdict(data: Any, episode: Episode) -> Verdict:
    """Returns the judge's reply about an episode as a verdict. An episode without an answer is never right.

    Raises InvalidRecord if the reply is not of the form of the schema.
    """
    grade = Record(data, Source("the verdict"))
    entries = grade.records("steps")
    numbers = [entry.whole("step") for entry in entries]
    step_count = len(episode.steps)
    if numbers != list(range(1, step_count + 1)):
        raise grade.error(f"the steps are {shown(numbers)}; they must be 1 to {step_count}, in order")
    pairs = zip(entries, episode.steps, strict=True)
    opinions = [_opinion(entry, step) for entry, step in pairs]
    is_right = grade.flag("answer_is_right") and bool(episode.prediction)
    return Verdict(is_right, tuple(opinions))


def _opinion(entry: Record, step: Step) -> StepVerdict:
    """Returns the judge's opinion of a step, in tenths, as in R3-RAG.

    Relevance is 0 without documents, and rationality without a query.
    """
    relevance = _tenths(entry, "relevance")
    rationality = _tenths(entry, "rationality")
    coherence = _tenths(entry, "coherence")
    return StepVerdict(
        relevance=relevance if step.documents else 0.0,
        coherence=coherence,
        rationality=rationality if step.searches else 0.0,
    )


def _tenths(entry: Record, name: str) -> float:
    return round(entry.number(name, low=0.0, high=1.0), 1)


@functools.cache
def judge_prompt() -> tuple[str, dict]:
    """Returns the judge's instructions and the JSON schema of its reply.

    Both are part of the name of a cached reply: if they change, every episode is judged anew.
    """
    instructions = shipped("prompts", "judge", "instructions.txt").read_text(encoding="utf-8").strip()
    schema = shipped("prompts", "judge", "schema.json").read_text(encoding="utf-8")
    return filled(instructions, {"document_length": str(DOCUMENT_LENGTH)}), json.loads(schema)


def request_for(episode: Episode) -> Request:
    """Returns the one call that judges an episode."""
    system, schema = judge_prompt()
    return Request(
        prompt=json.dumps(described(episode), ensure_ascii=False, indent=1),
        system=system,
        schema=schema,
        read=functools.partial(read_verdict, episode=episode),
        max_output_tokens=OUTPUT_TOKENS + OUTPUT_TOKENS_PER_STEP * len(episode.steps),
    )


class Judge:
    """Judges episodes with a language model and counts its calls.

    After a call that failed, the verdict is missing and the run goes on. If most calls fail, the run stops.
    """

    def __init__(self, client: "Client", spans: Spans = NO_SPANS):
        self.client = client
        self.spans = spans
        self.missing = 0  # number of missing verdicts
        # These three are without replies from the cache.
        self._replies = 0  # number of replies
        self._failed = 0  # number of those that failed
        self._latest: deque[Reply] = deque(maxlen=WINDOW)
        self._has_succeeded = False  # True once there was a verdict, also from the cache

    def verdicts(
        self,
        episodes: list[Episode],
        progress: str | None = None,
    ) -> list[Verdict | None]:
        """Returns one verdict per episode, None if the call failed; `progress` names a progress bar.

        Raises R3LiteError if most calls fail, if no call has succeeded yet, if a cap is reached, or if every call would
        fail, as with a wrong key.
        """
        judged = []  # indices of the episodes that need a call
        for i, episode in enumerate(episodes):
            # The other episodes have neither an answer nor a query to judge, or get no reward whatever a judge says.
            if not episode.is_void and (episode.prediction or episode.search_count):
                judged.append(i)
        with self.spans.span("judge", episodes=len(judged)):
            requests = [request_for(episodes[i]) for i in judged]
            replies = self.client.generate_all(requests, progress, self._watch)
        if replies and not self._has_succeeded:
            raise self._failing()
        verdicts = [_nothing_right(episode) for episode in episodes]
        for i, reply in zip(judged, replies, strict=True):
            verdicts[i] = reply.value
        self.missing += verdicts.count(None)
        return verdicts

    def counts(self) -> dict[str, float]:
        """Returns calls, cache hits, failures and their share, tokens, cost and missing verdicts so far, as metrics."""
        counts = {f"judge/{name}": value for name, value in self.client.counts().items()}
        counts["judge/failure_ratio"] = self._failed / self._replies if self._replies else 0.0
        counts["judge/missing"] = self.missing
        return counts

    def _watch(self, reply: Reply) -> None:
        """Counts a reply. Raises R3LiteError if a cap is reached or if most calls fail.

        Without this error the run would go on without verdicts.
        """
        if reply.failure == "capped":
            remedy = "Raise --judge-max-calls or --judge-max-cost and run again; finished verdicts are cached."
            raise R3LiteError(f"the judge's limit is reached: {reply.detail}", remedy, code="judge-limit")
        if reply.failure is None:
            self._has_succeeded = True
        if reply.cached:
            return
        self._latest.append(reply)
        self._replies += 1
        if reply.failure is not None:
            self._failed += 1
        failed = [latest.failure is not None for latest in self._latest]
        row_failed = len(failed) >= IN_A_ROW and all(failed[-IN_A_ROW:])
        most_failed = len(failed) >= MIN_REPLIES and sum(failed) > len(failed) / 2
        if row_failed or most_failed:
            raise self._failing()

    def _failing(self) -> R3LiteError:
        """Returns the error that says how many of the latest calls failed, and why."""
        failures = Counter(reply.failure for reply in self._latest if reply.failure)
        reasons = "; ".join(f"{times} x {FAILURES[kind]}" for kind, times in failures.most_common())
        detail = next((reply.detail for reply in reversed(self._latest) if reply.detail), "")
        cause = f"{failures.total()} of the last {len(self._latest)} calls of the judge failed: {reasons}"
        remedy = "Lower --judge-rpm or --judge-concurrency, or try again later; finished verdicts are cached."
        if detail:
            cause = f"{cause} ({detail})"
        return R3LiteError(cause, remedy, code="judge-failed")


def _nothing_right(episode: Episode) -> Verdict:
    """Returns the verdict on an episode that is not judged."""
    opinions = [StepVerdict(relevance=0.0, coherence=0.0) for _ in episode.steps]
    return Verdict(False, tuple(opinions))


def missing_verdicts_note(judge: Judge | None) -> str:
    """Returns a line about missing verdicts for the end of a run; an empty text if none is missing."""
    if judge is None or not judge.missing:
        return ""
    return f"\n{judge.missing} verdicts of the judge are missing"


def build_judge(
    settings: JudgeSettings,
    output: str | Path,
    reward: RewardSettings | None,
    make_client: "Callable[[JudgeSettings, Path], Client]",
    spans: Spans = NO_SPANS,
) -> Judge | None:
    """Returns the judge that the settings ask for, or None.

    Its cache is in the run folder `output` unless the settings name another. `make_client` makes the client from the
    settings and the folder of the cache. Raises R3LiteError if the weights of `reward` need a judge and the settings
    name none.
    """
    if settings.judge == "none":
        if reward and needs_verdict(reward):
            cause = "--outcome-judge, --process-judge or --rewards needs a judge, but --judge is none"
            raise R3LiteError(cause, "Pass --judge gemini, openai or local, or remove them.", code="judge-missing")
        return None
    cache = Path(settings.judge_cache) if settings.judge_cache else Path(output) / "judge-cache"
    return Judge(make_client(settings, cache), spans)
