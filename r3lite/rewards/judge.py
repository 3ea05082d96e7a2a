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
from r3lite.core.spans import Spans, span
from r3lite.llm.episodes import DOCUMENT_LENGTH, described
from r3lite.llm.replies import FAILURES, Reply, Request
from r3lite.protocols.templates import filled
from r3lite.rewards.registry import needs_verdict
from r3lite.rewards.verdict import StepVerdict, Verdict
from r3lite.settings import JudgeSettings, RewardSettings

if TYPE_CHECKING:  # its libraries take long to load
    from r3lite.llm.client import Client

OUTPUT_TOKENS, OUTPUT_TOKENS_PER_STEP = 256, 64
# The run stops when more than half of the last WINDOW replies failed, of at least ENOUGH; when IN_A_ROW failed; and
# when a round ends before any call succeeded.
WINDOW, ENOUGH, IN_A_ROW = 40, 20, 8

_SHARES = ("relevance", "rationality", "coherence")


def read_verdict(data: Any, episode: Episode) -> Verdict:
    """The judge's reply about an episode; without an answer nothing is right. Raises InvalidRecord if it is not of the
    form of the schema."""
    grade, last = Record(data, Source("the verdict")), len(episode.steps)
    entries = grade.records("steps")
    numbers = [entry.whole("step") for entry in entries]
    if numbers != list(range(1, last + 1)):
        raise grade.error(f"the steps are {shown(numbers)}; they must be 1 to {last}, in order")
    opinions = [_opinion(entry, step) for entry, step in zip(entries, episode.steps, strict=True)]
    return Verdict(grade.flag("answer_is_right") and bool(episode.prediction), tuple(opinions))


def _opinion(entry: Record, step: Step) -> StepVerdict:
    """In tenths, as in R3-RAG; without documents relevance is 0, and without a query rationality."""
    relevance, rationality, coherence = (round(entry.number(name, low=0.0, high=1.0), 1) for name in _SHARES)
    return StepVerdict(relevance if step.documents else 0.0, coherence, rationality if step.searches else 0.0)


@functools.cache
def question() -> tuple[str, dict]:
    """What the judge is asked, and the JSON schema of its reply. Both are part of the name of a cached reply: if they
    change, every episode is judged anew."""
    text, schema = (
        shipped("prompts", "judge", name).read_text(encoding="utf-8") for name in ("instructions.txt", "schema.json")
    )
    return filled(text.strip(), {"document_length": str(DOCUMENT_LENGTH)}), json.loads(schema)


def request_for(episode: Episode) -> Request:
    """The one call that judges an episode."""
    system, schema = question()
    return Request(
        prompt=json.dumps(described(episode), ensure_ascii=False, indent=1),
        system=system,
        schema=schema,
        read=functools.partial(read_verdict, episode=episode),
        max_output_tokens=OUTPUT_TOKENS + OUTPUT_TOKENS_PER_STEP * len(episode.steps),
    )


class Judge:
    """Judges episodes with a language model and counts its calls.

    A call that failed is a missing verdict, and the run goes on; it stops if that is the rule and not the exception.
    """

    def __init__(self, client: "Client", spans: Spans | None = None):
        self.client, self.spans = client, spans
        self.missing = 0  # verdicts
        # Without those from the cache.
        self._replies = self._failed = 0
        self._latest: deque[Reply] = deque(maxlen=WINDOW)
        self._has_succeeded = False  # or has found a verdict in the cache

    def verdicts(self, episodes: list[Episode], progress: str | None = None) -> list[Verdict | None]:
        """One verdict per episode, None if the call failed; `progress` names a progress bar.

        Raises R3LiteError if most calls fail, if a cap is reached or if no call can succeed.
        """
        # An episode without a query or an answer has nothing to judge, and costs no call.
        asked = [i for i, e in enumerate(episodes) if e.prediction or e.searches]
        with span(self.spans, "judge", episodes=len(asked)):
            replies = self.client.generate_all([request_for(episodes[i]) for i in asked], progress, self._watch)
        if replies and not self._has_succeeded:
            raise self._failing()
        verdicts: list[Verdict | None] = [Verdict(False, (StepVerdict(0.0, 0.0),) * len(e.steps)) for e in episodes]
        for i, reply in zip(asked, replies, strict=True):
            verdicts[i] = reply.value
        self.missing += verdicts.count(None)
        return verdicts

    def counts(self) -> dict[str, float]:
        """Calls, cache hits, failures and their share, tokens, cost and missing verdicts so far, as metrics."""
        counts = {f"judge/{name}": value for name, value in self.client.counts().items()}
        ratio = self._failed / self._replies if self._replies else 0.0
        return counts | {"judge/failure_ratio": ratio, "judge/missing": self.missing}

    def _watch(self, reply: Reply) -> None:
        """Raises R3LiteError if a cap is reached or if most calls fail: the run would go on without verdicts."""
        if reply.failure == "capped":
            remedy = "Raise --judge-max-calls or --judge-max-cost and run again; finished verdicts are cached."
            raise R3LiteError(f"the judge's limit is reached: {reply.detail}", remedy)
        self._has_succeeded |= reply.failure is None
        if reply.cached:
            return
        self._latest.append(reply)
        self._replies += 1
        self._failed += reply.failure is not None
        failed = [r.failure is not None for r in self._latest]
        all_lately = len(failed) >= IN_A_ROW and all(failed[-IN_A_ROW:])
        if all_lately or (len(failed) >= ENOUGH and sum(failed) > len(failed) / 2):
            raise self._failing()

    def _failing(self) -> R3LiteError:
        """The error that says how many of the latest calls failed, and why."""
        failures = Counter(reply.failure for reply in self._latest if reply.failure)
        reasons = "; ".join(f"{times} x {FAILURES[kind]}" for kind, times in failures.most_common())
        detail = next((reply.detail for reply in reversed(self._latest) if reply.detail), "")
        cause = f"{failures.total()} of the last {len(self._latest)} calls of the judge failed: {reasons}"
        remedy = "Lower --judge-rpm or --judge-concurrency, or try again later; finished verdicts are cached."
        return R3LiteError(f"{cause} ({detail})" if detail else cause, remedy)


def note_on(judge: Judge | None) -> str:
    """What the end of a run adds about verdicts that are missing; nothing if none is."""
    return f"\n{judge.missing} verdicts of the judge are missing" if judge and judge.missing else ""


def build_judge(
    settings: JudgeSettings,
    output: str | Path,
    reward: RewardSettings | None,
    make_client: "Callable[[JudgeSettings, Path], Client]",
    spans: Spans | None = None,
) -> Judge | None:
    """The judge that the settings ask for, or None; its cache is in the run folder `output` unless they name another.

    With `reward`: raises R3LiteError if the weights need a judge and the settings name none. `make_client` makes the
    client of the settings and a cache.
    """
    if settings.judge == "none":
        if reward and needs_verdict(reward):
            cause = "--outcome-judge, --process-judge or --rewards needs a judge, but --judge is none"
            raise R3LiteError(cause, "Pass --judge gemini, openai or local, or remove them.")
        return None
    cache = Path(settings.judge_cache) if settings.judge_cache else Path(output) / "judge-cache"
    return Judge(make_client(settings, cache), spans)
