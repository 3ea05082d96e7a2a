"""Trajectories sampled from a teacher, a remote model, and checked as they are written.

The teacher is given what a student is given: the same prompts, and the documents that its own queries retrieve. It is
never given the answer.
"""

from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from r3lite.core.answer_match import is_right
from r3lite.core.episode import Failure, Question, Retrieve, Step, retrieve_all
from r3lite.core.errors import R3LiteError
from r3lite.core.files import append_jsonl
from r3lite.datasets.collected import Earlier, Tally, ids, rejections_of
from r3lite.datasets.trajectories import Trajectory
from r3lite.llm.client import Client
from r3lite.llm.replies import Reply, Request
from r3lite.protocols.base import Protocol
from r3lite.settings import CollectConfig

# Failures of a reply that asking again would not mend: they come from the question, not from network or account.
FINAL = ("blocked", "cut", "empty")
WITHOUT_SEARCH = "answered without a search"
# Attempts must differ, and newer models take no temperature. The text must not show in what the teacher writes.
OTHER_WAY = (
    "This is attempt {number} of {all} at this question. Take a way of your own: other queries, in other words or "
    "another order, than those that come to mind first. Do not write about attempts."
)


@dataclass
class Try:
    """One attempt of the teacher at a question: its steps so far, and how it failed if it did."""

    question: Question
    steps: list[Step] = field(default_factory=list)
    failure: str | None = None  # what is wrong with the teacher's reply
    missing: str | None = None  # why there is no reply, or no document; another run asks again

    @property
    def goes_on(self) -> bool:
        return not (self.failure or self.missing or (self.steps and self.steps[-1].answer is not None))


@dataclass(frozen=True)
class Teacher:
    """Samples trajectories step by step, many questions at a time."""

    config: CollectConfig
    client: Client
    protocol: Protocol
    retrieve: Retrieve

    def gather(self, questions: list[Question], output: Path, earlier: Earlier, size: int) -> Tally:
        """Adds to the file the teacher's right answers in well-formed steps, a block of `size` questions at a time.

        Continues an earlier run: questions that are in the file, and those whose replies were rejected (named in
        `<output>.rejected.jsonl`), are not asked again. Questions that got no reply are.
        """
        before, tally = {"kept": ids(earlier.kept), "rejected": ids(earlier.rejected)}, Tally(len(questions))
        waiting = [q for q in questions if not any(q.id in known for known in before.values())]
        if len(waiting) < len(questions):
            counts = {name: sum(q.id in known for q in questions) for name, known in before.items()}
            tally.extra |= {f"{name} in earlier runs": count for name, count in counts.items()}
            tally.kept_earlier = counts["kept"]
        bar = tqdm(total=len(waiting), desc="teacher", unit="question", disable=None)
        for start in range(0, len(waiting), size):
            block = waiting[start : start + size]
            last = {q.id: Try(q, failure="not tried") for q in block}
            for number in range(self.config.collect.attempts):
                failed = [t.question for t in last.values() if t.failure]
                last |= {t.question.id: t for t in self.attempt(failed, number)}
            right = [t for t in last.values() if not (t.failure or t.missing)]
            wrong = [t for t in last.values() if t.failure]
            append_jsonl(output, [Trajectory.of(t.question, t.steps, "teacher").to_json() for t in right])
            append_jsonl(rejections_of(output), [{"id": t.question.id, "reason": t.failure} for t in wrong])
            for this in right:
                tally.keep_retrieved(this.question, this.steps)
            tally.rejected.update(t.failure for t in wrong)
            missing = [t.missing for t in last.values() if t.missing]
            tally.rejected.update(f"no reply ({m.partition(':')[0]}), will be retried" for m in missing)
            bar.update(len(block))
            if capped := next((m for m in missing if m.startswith("capped")), None):
                tally.extra["stopped"] = capped.partition(": ")[2]
                tally.extra["questions left"] = len(waiting) - start - len(block) + len(missing)
                break
            if len(missing) == len(last):
                raise R3LiteError(f"the teacher does not reply: {missing[0]}", "Run the command again to continue.")
        bar.close()
        counts = self.client.counts()
        tally.extra |= {"requests": counts["calls"], "replies from the cache": counts["cache_hits"]}
        unknown = "unknown: pass --judge-input-price and --judge-output-price"
        tally.extra["US dollars"] = f"{counts['cost']:.4f}" if "cost" in counts else unknown
        return tally

    def attempt(self, questions: list[Question], number: int) -> list[Try]:
        """The results of attempt `number` (from 0) at each question; every round of requests asks for one step each."""
        tries = [Try(q) for q in questions]
        while live := [t for t in tries if t.goes_on]:
            requests = [self.request(t, number) for t in live]
            for this, reply in zip(live, self.client.generate_all(requests), strict=True):
                self.add_step(this, reply)
            searching = [t for t in live if t.goes_on]
            asked = [(t.question, search) for t in searching for search in t.steps[-1].searches]
            found = iter(retrieve_all(self.retrieve, asked))
            for this in searching:
                outcomes = [next(found) for _ in this.steps[-1].queries]
                if failed := next((o for o in outcomes if isinstance(o, Failure)), None):
                    this.missing = f"retriever: {failed.reason}"
                else:
                    this.steps[-1] = this.steps[-1].with_documents(outcomes)
        return tries

    def request(self, this: Try, number: int) -> Request:
        """The episode so far, as the chat that a student sees, and the demand for the next step.

        The teacher's steps are its own turns, so that no text in a document or a question can pass for one.
        """
        question = self.protocol.quoted(this.question.text)
        turns, user = [shot["content"] for shot in self.protocol.shots], [self.protocol.opening(question)]
        for k, step in enumerate(this.steps, 1):
            turns += ["\n\n".join(user), self.protocol.render(step, k)]
            user = [self.protocol.observation(question, this.steps[:k])]
        if len(this.steps) == self.config.lengths.max_hops:
            user.append(self.protocol.answer_request)
        if number:
            user.append(OTHER_WAY.format(number=number + 1, all=self.config.collect.attempts))
        user.append(self.protocol.step_request(len(this.steps) + 1))
        nonce = f"{self.config.common.seed}/{number}"
        return Request("\n\n".join(user), self.protocol.system, tuple(turns), nonce=nonce)

    def add_step(self, this: Try, reply: Reply) -> None:
        """Adds the step of a reply, or records why the attempt fails."""
        if reply.failure in FINAL:
            this.failure = f"reply {reply.failure}"
            return
        if reply.failure:
            this.missing = f"{reply.failure}: {reply.detail}"
            return
        step = self.protocol.parse(self.protocol.first_turn(reply.text), this.steps)
        if step.faults:
            this.failure = f"malformed step ({step.faults[0]})"
        elif step.searches and len(this.steps) == self.config.lengths.max_hops:
            this.failure = f"no answer after {self.config.lengths.max_hops} queries"
        else:
            this.steps.append(step)
            if step.answer is not None and not is_right(this.question, step.answer, self.config.collect.min_f1):
                this.failure = "wrong answer"
            elif step.answer is not None and len(this.steps) == 1 and self.config.collect.without_search == "drop":
                this.failure = WITHOUT_SEARCH
