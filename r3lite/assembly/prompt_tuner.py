"""The rounds of prompt optimisation (ProTeGi, arXiv 2305.03495), and what they start from: the first prompt and the
questions; used by tune_prompt.

`PromptTuner.run` reads as the algorithm: score the first prompt; then, round after round, try the beam's prompts, have
their failures criticized and the prompts edited, score the new ones, and keep the best.
"""

import random
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from r3lite.assembly.validation import draw_from
from r3lite.core.answer_match import answer_scores
from r3lite.core.config import UsageError
from r3lite.core.episode import Episode, Question, Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.core.files import folder_fingerprint, read_jsonl, write_jsonl, write_text
from r3lite.core.inherited import adapter_folder
from r3lite.datasets.qa import read_questions
from r3lite.evaluation.comparisons import compare
from r3lite.evaluation.folder import predictions_of
from r3lite.evaluation.scores import Marks, scores
from r3lite.llm.client import CachingClient
from r3lite.llm.replies import FAILURES, Reply, Request
from r3lite.protocols.base import Protocol
from r3lite.protocols.observations import ANSWER_ROOM
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.templates import prompt_file, read_prompt, unfit
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rollout.engine import Engine
from r3lite.settings import ProtocolSettings, TunePromptConfig
from r3lite.tuning.critic import Critic
from r3lite.tuning.history import Candidate, History, RoundResult, score_text

BEST = "best_prompt.txt"
CANDIDATES = "candidates"
SCORES_IN_HISTORY = ("em", "f1", "format_adherence", "mean_searches")
CONTINUE = "run the same command again; it continues from here."


@dataclass(frozen=True)
class Pool:
    """Questions, and what retrieves for them."""

    questions: list[Question]
    retrieve: Retrieve


def first_prompt(protocol: ProtocolSettings, which: str) -> str:
    """Returns the text of the prompt that is to be improved, as its file has it."""
    build_protocol(protocol)  # raises R3LiteError for a bad prompt file
    name = prompt_file(protocol, which)
    if name is None:
        raise UsageError(f"--improve {which}: --format {protocol.format} has no such prompt", code="prompt-absent")
    return read_prompt(name)


def read_pools(config: TunePromptConfig) -> tuple[Pool, Pool]:
    """Returns the questions of --data, and those of --eval-data that are drawn, each with what retrieves for them."""
    seed = config.common.seed
    skip_bad_rows = config.data.skip_bad_rows
    sampled = read_questions(config.data.data, config.data.limit, skip_bad_rows)
    scored = draw_from(
        config.tuning.eval_data,
        count=config.tuning.eval_questions,
        seed=seed,
        skip_bad_rows=skip_bad_rows,
        training_questions=sampled,
        warning="are also in --data, so critiques may quote them",
    )
    setup = Setup(
        config.retrieval,
        questions=sampled,
        seed=seed,
        skip_bad_rows=skip_bad_rows,
    )
    retrieve_sampled = build_retriever(setup)
    retrieve_scored = retrieve_sampled
    if config.retrieval.from_questions:
        retrieve_scored = build_retriever(Setup(config.retrieval, scored, seed))
    return Pool(sampled, retrieve_sampled), Pool(scored, retrieve_scored)


def origin(config: TunePromptConfig, prompt: str, *pools: Pool) -> str:
    """Returns a digest of what the scores of a run depend on besides its settings: files may change under their
    names."""
    adapter = config.model.adapter
    if adapter:
        adapter = folder_fingerprint(adapter_folder(adapter))
    questions = []
    for pool in pools:
        questions.append([(question.id, question.text, question.answers) for question in pool.questions])
    return f"{zlib.crc32(repr([prompt, adapter, questions]).encode()):08x}"


@dataclass
class PromptTuner:
    """The rounds of a run, from where its history stands."""

    config: TunePromptConfig
    output: Path
    history: History
    engine: Engine
    client: CachingClient
    sampled: Pool  # the questions of --data
    scored: Pool  # those of --eval-data
    capped: str = ""  # the cap that forbids more calls, once it is reached

    def __post_init__(self):
        self.critic = Critic(self.config.tuning.improve, self.engine.layout.protocol)

    def run(self) -> None:
        """Takes the remaining rounds, as far as the caps on calls allow; writes the best prompt after each."""
        total = self.config.tuning.rounds
        for number in range(len(self.history.rounds), total + 1):
            title = f"round {number} of {total}"
            if number:
                self.branch_out(number, title)
            for candidate in self.history.waiting:
                self.score(candidate, title)
            if not self.capped:
                self.close(number)
            write_text(self.output / BEST, f"{self.history.best.prompt}\n")
            if self.capped:
                return

    def notes(self) -> list[str]:
        """Returns what is to be said of the critic, in lines."""
        counts = self.client.counts()
        parts = [f"{counts['calls']} requests", f"{counts['cache_hits']} replies from the cache"]
        if counts["failures"]:
            parts.append(f"{counts['failures']} failed")
        if "cost" in counts:
            parts.append(f"{counts['cost']:.4f} US dollars")
        lines = [f"critic: {', '.join(parts)}"]
        if self.capped:
            remedy = "run the same command with a higher limit to continue"
            lines.append(f"stopped before the end: {self.capped}; {remedy}")
        return lines

    def branch_out(self, number: int, title: str) -> None:
        """Tries the prompts of the beam, has them criticized and edited, and adds the new prompts to the history."""
        tuning = self.config.tuning
        for parent, branches in self.history.open_branches(number, tuning.beam, tuning.branch):
            name = f"{title}, prompt {parent.id}"
            failures = self.failures(parent, number, name)
            if not failures:
                print(f"{name}: no failures, so no critique", file=sys.stderr)
                continue
            critiques = self.criticize(
                parent,
                failures=failures,
                number=number,
                branches=branches,
                title=name,
            )
            edits = self.edit(
                parent,
                critiques=critiques,
                number=number,
                title=name,
            )
            for branch, critique in critiques.items():
                edit = edits.get(branch, critique)
                if edit.failure == "capped":  # another run asks again
                    continue
                candidate = Candidate(
                    id=0,
                    prompt=edit.value or "",
                    round=number,
                    parent=parent.id,
                    branch=branch,
                    critique=critique.value or "",
                )
                self.add(candidate, edit)
            if self.capped:
                return

    def failures(self, parent: Candidate, number: int, title: str) -> list[Episode]:
        """Answers this round's questions with the prompt of `parent`; returns the episodes without a right answer."""
        draw = random.Random(f"{self.config.common.seed}/tune/{number}")
        questions = self.sampled.questions
        drawn = draw.sample(questions, min(self.config.tuning.sampled_questions, len(questions)))
        episodes = self.answers(
            parent,
            pool=replace(self.sampled, questions=drawn),
            stream=f"{number}/",
            title=f"{title}: tried",
        )
        return [episode for episode in episodes if answer_scores(episode)[0] < 1]

    def criticize(
        self, parent: Candidate, failures: list[Episode], number: int, branches: list[int], title: str
    ) -> dict[int, Reply]:
        """Returns the critique of each branch."""
        requests = []
        for branch in branches:
            request = self.critique_request(
                parent,
                failures=failures,
                number=number,
                branch=branch,
            )
            requests.append(request)
        return dict(zip(branches, self.ask(requests, f"{title}: critiques"), strict=True))

    def critique_request(self, parent: Candidate, failures: list[Episode], number: int, branch: int) -> Request:
        """Returns the request for a critique of some of the failures, drawn for this branch."""
        tuning = self.config.tuning
        draw = random.Random(f"{self.config.common.seed}/critique/{number}/{parent.id}/{branch}")
        drawn = draw.sample(failures, min(tuning.shown_failures, len(failures)))
        return self.critic.critique(
            parent.prompt,
            failures=drawn,
            number=branch,
            of=tuning.branch,
            nonce=f"{number}/{branch}",
        )

    def edit(self, parent: Candidate, critiques: dict[int, Reply], number: int, title: str) -> dict[int, Reply]:
        """Returns the edited prompt of each branch whose critique can be used."""
        requests = {}
        for branch, critique in critiques.items():
            if not critique.failure:
                requests[branch] = self.critic.edit(parent.prompt, critique.value, f"{number}/{branch}")
        replies = self.ask(list(requests.values()), f"{title}: edits")
        return dict(zip(requests, replies, strict=True))

    def ask(self, requests: list[Request], title: str) -> list[Reply]:
        """Returns the critic's replies. Raises R3LiteError if none of them can be used and no cap is the reason."""
        replies = self.client.generate_all(requests, title) if requests else []
        failed = [reply for reply in replies if reply.failure]
        capped = [reply.detail for reply in failed if reply.failure == "capped"]
        if capped:
            self.capped = capped[0]
        elif failed and len(failed) == len(replies):
            reason = ": ".join(filter(None, (FAILURES[failed[0].failure], failed[0].detail)))
            cause = f"none of the critic's {len(replies)} replies can be used; the first: {reason}"
            raise R3LiteError(cause, f"Fix the cause, and {CONTINUE}", code="critic-useless")
        return replies

    def add(self, candidate: Candidate, edit: Reply) -> None:
        """Adds a new prompt to the history under the next number; an unusable prompt is marked there as rejected."""
        id = len(self.history.candidates)
        fault = FAILURES[edit.failure] if edit.failure else self.fault_of(candidate.prompt, id)
        if fault:
            print(f"rejected: prompt {id}, from prompt {candidate.parent}: {fault}", file=sys.stderr)
        self.history.add(replace(candidate, id=id, rejected=fault or ""))

    def fault_of(self, prompt: str, id: int) -> str | None:
        """Returns why a new prompt, whose number would be `id`, is not scored; None if it is to be scored."""
        problem = unfit(prompt, self.history.candidates[0].prompt)
        if problem:
            return problem
        duplicate = self.history.same_as(prompt)
        if duplicate:
            return f"it is the same as prompt {duplicate.id}"
        layout = replace(self.engine.layout, protocol=self.with_prompt(prompt, id))
        questions = [*self.sampled.questions, *self.scored.questions]
        longest = max(len(layout.prompt(question.text)) for question in questions)
        if longest + ANSWER_ROOM > self.config.lengths.max_length:
            return f"with a question it has {longest} tokens, so an answer does not fit in --max-length"
        return None

    def with_prompt(self, prompt: str, id: int) -> Protocol:
        """Returns the protocol with a prompt; writes the prompt to the file of its number."""
        path = self.output / CANDIDATES / f"{id}.txt"
        write_text(path, f"{prompt}\n")
        return build_protocol(replace(self.config.protocol, **{self.config.tuning.improve: str(path)}))

    def answers(self, candidate: Candidate, pool: Pool, stream: str, title: str) -> list[Episode]:
        """Returns the episodes of a pool's questions, answered with the prompt of a candidate.

        `stream` becomes a part of each episode's seed. Raises R3LiteError if the retriever failed in an episode.
        """
        layout = replace(self.engine.layout, protocol=self.with_prompt(candidate.prompt, candidate.id))
        engine = replace(self.engine, layout=layout)
        sequences = engine.run(
            pool.questions,
            seeds=[f"{self.config.common.seed}/{stream}{i}" for i in range(len(pool.questions))],
            retrieve=pool.retrieve,
            progress=title,
        )
        episodes = [sequence.episode() for sequence in sequences]
        failed = [episode.failure for episode in episodes if episode.failure]
        if failed:
            cause = f"the retriever failed on {len(failed)} questions: {failed[0]}"
            raise R3LiteError(cause, f"Fix the cause, and {CONTINUE}", code="retriever-failed")
        return episodes

    def score(self, candidate: Candidate, title: str) -> None:
        """Scores a prompt by its episodes, which are written to a file as `evaluate` writes its own.

        If the file exists already, an earlier run was killed before the score was in the history. Then no episode is
        sampled, and the file is read.
        """
        name = f"{title}, prompt {candidate.id}"
        file = self.predictions_of(candidate)
        if not file.exists():
            episodes = self.answers(
                candidate,
                pool=self.scored,
                stream="",
                title=f"{name}: scored",
            )
            write_jsonl(file, (episode.to_json() | Marks.of(episode).to_json() for episode in episodes))
        means = scores(self.marks_of(candidate), self.config.common.seed)
        recorded = {}
        for score in SCORES_IN_HISTORY:
            if means[score]["value"] is not None:
                recorded[score] = means[score]
        self.history.score(candidate, recorded)
        metric = self.config.tuning.metric
        best = self.history.best
        message = (
            f"{metric} {score_text(means[metric])}; best so far: prompt {best.id}, {score_text(best.scores[metric])}"
        )
        print(f"{name}: {message}", file=sys.stderr)

    def close(self, number: int) -> None:
        """Ends a round: records how much the best prompt gains over that of the round before, by paired bootstrap."""
        previous_best = self.history.rounds[-1].best if number else 0
        best = self.history.best.id
        comparison = compare(
            self.marks_of(self.history.candidates[previous_best]),
            self.marks_of(self.history.candidates[best]),
            self.config.common.seed,
        )
        gain = comparison[self.config.tuning.metric]
        self.history.close(
            RoundResult(
                number=number,
                best=best,
                gained=gain["difference"],
                low=gain["low"],
                high=gain["high"],
                p=gain["p"],
            )
        )

    def marks_of(self, candidate: Candidate) -> list[Marks]:
        """Returns the marks of each question with a prompt, as its file has them."""
        lines = read_jsonl(self.predictions_of(candidate), "Pass another --output.")
        return [marks for _, marks in predictions_of(lines).values()]

    def predictions_of(self, candidate: Candidate) -> Path:
        """Returns the file of the episodes with a prompt."""
        return self.output / CANDIDATES / f"{candidate.id}.predictions.jsonl"
