"""Trajectories sampled from a teacher, a remote model, and checked as they are written.

The teacher sees what a student sees: the same prompts, and the documents that its own queries retrieve. It never sees
the answer.
"""

from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from r3lite.core.answer_match import is_right
from r3lite.core.bars import TimedLines
from r3lite.core.episode import Failure, Question, Retrieve, Step, retrieve_all
from r3lite.core.errors import R3LiteError
from r3lite.core.files import append_jsonl
from r3lite.datasets.collected import Earlier, Tally, ids, rejections_of
from r3lite.datasets.trajectories import Trajectory
from r3lite.llm.client import Client
from r3lite.llm.replies import Reply, Request
from r3lite.protocols.base import Protocol
from r3lite.settings import CollectConfig

# Failures of a reply that come from the question, not from network or account: after the last attempt the question is
# rejected, and no later run asks it again.
FINAL = ("blocked", "cut", "empty")
WITHOUT_SEARCH = "answered without a search"
# Attempts must differ, and newer models take no temperature. The text must not show in what the teacher writes.
ATTEMPT_NOTE = (
    "This is attempt {number} of {all} at this question. Take a way of your own: other queries, in other words or "
    "another order, than those that come to mind first. Do not write about attempts."
)


@dataclass
class Try:
    """One attempt of the teacher at a question: its steps so far, and why it ended without a right answer if it did."""

    question: Question
    steps: list[Step] = field(default_factory=list)
    failure: str | None = None  # what is wrong with the teacher's reply: another attempt is made, if one is left
    missing: str | None = None  # why there is no reply or no documents: a later run asks again

    @property
    def is_unfinished(self) -> bool:
        if self.failure or self.missing:
            return False
        return not self.steps or self.steps[-1].answer is None


@dataclass(frozen=True)
class Teacher:
    """Samples trajectories step by step, many questions at a time."""

    config: CollectConfig
    client: Client
    protocol: Protocol
    retrieve: Retrieve

    def gather(
        self,
        questions: list[Question],
        output: Path,
        earlier: Earlier,
        size: int,
    ) -> Tally:
        """Adds the teacher's trajectories with a right answer to `output`, a block of `size` questions at a time.

        Returns the counts. Continues an earlier run: questions that are in the file or, because their replies were
        rejected, in `<output>.rejected.jsonl`, are not asked again. Questions that got no reply are asked again.
        """
        tally = Tally(len(questions))
        waiting = _without_earlier(questions, earlier, tally)
        with tqdm(total=len(waiting), desc="teacher", unit="question", disable=None) as bar:
            lines = TimedLines(bar, "teacher", "questions")
            for start in range(0, len(waiting), size):
                block = waiting[start : start + size]
                attempts = self.attempt_all(block)
                _write(attempts, output, tally)
                lines.update(len(block))
                missing = [attempt.missing for attempt in attempts if attempt.missing]
                capped = [reason for reason in missing if reason.startswith("capped")]  # by a limit on the requests
                if capped:
                    later_questions = len(waiting) - start - len(block)
                    tally.extra["stopped"] = capped[0].partition(": ")[2]
                    tally.extra["questions left"] = later_questions + len(missing)
                    break
                if len(missing) == len(attempts):
                    cause = f"the teacher does not reply: {missing[0]}"
                    raise R3LiteError(cause, "Run the command again to continue.", code="teacher-silent")
        counts = self.client.counts()
        tally.extra["requests"] = counts["calls"]
        tally.extra["replies from the cache"] = counts["cache_hits"]
        tally.extra["US dollars"] = "unknown: pass --judge-input-price and --judge-output-price"
        if "cost" in counts:
            tally.extra["US dollars"] = f"{counts['cost']:.4f}"
        return tally

    def attempt_all(self, questions: list[Question]) -> list[Try]:
        """Returns the last attempt at each question; up to --attempts are made, until one has no `failure`."""
        last = {question.id: Try(question, failure="not tried") for question in questions}
        for number in range(self.config.collect.attempts):
            failed = [attempt.question for attempt in last.values() if attempt.failure]
            for attempt in self.attempt(failed, number):
                last[attempt.question.id] = attempt
        return list(last.values())

    def attempt(self, questions: list[Question], number: int) -> list[Try]:
        """Returns attempt `number` (from 0) at each question, with all its steps.

        Every pass of the loop asks for one step of each unfinished attempt, in one batch of requests.
        """
        attempts = [Try(question) for question in questions]
        while unfinished := [attempt for attempt in attempts if attempt.is_unfinished]:
            requests = [self.request(attempt, number) for attempt in unfinished]
            replies = self.client.generate_all(requests)
            for attempt, reply in zip(unfinished, replies, strict=True):
                self.add_step(attempt, reply)
            self._search([attempt for attempt in unfinished if attempt.is_unfinished])
        return attempts

    def _search(self, attempts: list[Try]) -> None:
        """Adds to the last step of each attempt the documents of its queries, all retrieved in one batch."""
        searches = []
        for attempt in attempts:
            for search in attempt.steps[-1].searches:
                searches.append((attempt.question, search))
        outcomes = iter(retrieve_all(self.retrieve, searches))
        for attempt in attempts:
            step = attempt.steps[-1]
            outcomes_of_step = [next(outcomes) for _ in step.queries]
            failures = [outcome for outcome in outcomes_of_step if isinstance(outcome, Failure)]
            if failures:
                attempt.missing = f"retriever: {failures[0].reason}"
            else:
                attempt.steps[-1] = step.with_documents(outcomes_of_step)

    def request(self, attempt: Try, number: int) -> Request:
        """Returns the request for the next step: the chat so far, as a student sees it, then `Protocol.step_request`.

        The teacher's steps are its own turns, so that no text in a document or a question can pass for such a step.
        """
        question = self.protocol.quoted(attempt.question.text)
        turns = [shot["content"] for shot in self.protocol.shots]  # of user and teacher alternately
        user_texts = [self.protocol.question_message(question)]  # the parts of the next user turn
        for k, step in enumerate(attempt.steps, 1):
            turns.append("\n\n".join(user_texts))
            turns.append(self.protocol.render(step, k))
            user_texts = [self.protocol.observation(question, attempt.steps[:k])]
        if len(attempt.steps) == self.config.lengths.max_hops:
            user_texts.append(self.protocol.answer_request)
        if number:
            user_texts.append(ATTEMPT_NOTE.format(number=number + 1, all=self.config.collect.attempts))
        user_texts.append(self.protocol.step_request(len(attempt.steps) + 1))
        return Request(
            "\n\n".join(user_texts),
            self.protocol.system,
            tuple(turns),
            nonce=f"{self.config.common.seed}/{number}",
        )

    def add_step(self, attempt: Try, reply: Reply) -> None:
        """Adds the step of a reply to the attempt, or records in the attempt why there is none. A wrong answer is a
        failure, too."""
        if reply.failure in FINAL:
            attempt.failure = f"reply {reply.failure}"
            return
        if reply.failure:
            attempt.missing = f"{reply.failure}: {reply.detail}"
            return
        step = self.protocol.parse(self.protocol.first_turn(reply.text), attempt.steps)
        if step.faults:
            attempt.failure = f"malformed step ({step.faults[0]})"
            return
        if step.searches and len(attempt.steps) == self.config.lengths.max_hops:
            attempt.failure = f"no answer after {self.config.lengths.max_hops} queries"
            return
        attempt.steps.append(step)
        if step.answer is None:
            return
        if not is_right(attempt.question, step.answer, self.config.collect.min_f1):
            attempt.failure = "wrong answer"
        elif len(attempt.steps) == 1 and self.config.collect.without_search == "drop":
            attempt.failure = WITHOUT_SEARCH


def _without_earlier(questions: list[Question], earlier: Earlier, tally: Tally) -> list[Question]:
    """Returns the questions that no earlier run has kept or rejected; counts the others in `tally`."""
    accepted_ids = ids(earlier.accepted)
    rejected_ids = ids(earlier.rejected)
    done = accepted_ids | rejected_ids
    waiting = [question for question in questions if question.id not in done]
    if len(waiting) < len(questions):
        tally.accepted_earlier = sum(question.id in accepted_ids for question in questions)
        tally.extra["kept in earlier runs"] = tally.accepted_earlier
        tally.extra["rejected in earlier runs"] = sum(question.id in rejected_ids for question in questions)
    return waiting


def _write(attempts: list[Try], output: Path, tally: Tally) -> None:
    """Adds the trajectories of right attempts to the file, then the rejected questions to their file; counts all."""
    right = [attempt for attempt in attempts if not (attempt.failure or attempt.missing)]
    failed = [attempt for attempt in attempts if attempt.failure]
    trajectories = [Trajectory.of(attempt.question, attempt.steps, "teacher") for attempt in right]
    append_jsonl(output, [trajectory.to_json() for trajectory in trajectories])
    rejections = [{"id": attempt.question.id, "reason": attempt.failure} for attempt in failed]
    append_jsonl(rejections_of(output), rejections)
    for attempt in right:
        tally.keep_retrieved(attempt.question, attempt.steps)
    tally.rejected.update(attempt.failure for attempt in failed)
    for attempt in attempts:
        if attempt.missing:
            kind = attempt.missing.partition(":")[0]
            tally.rejected[f"no reply ({kind}), will be retried"] += 1
