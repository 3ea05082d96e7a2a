"""Gold trajectories of many questions: demonstrations by evidence or by sub-questions, and why others have none."""

import random
from pathlib import Path

from r3lite.core.episode import Document, Failure, Question, Retrieve, Search, retrieve_all
from r3lite.core.files import write_jsonl
from r3lite.datasets.collected import Tally
from r3lite.datasets.evidence import MISSED, demonstrate
from r3lite.datasets.gold import hasty, obstacle, planned_searches, queries, shown, verified, with_gold
from r3lite.datasets.teacher import WITHOUT_SEARCH
from r3lite.datasets.trajectories import Trajectory, check_steps
from r3lite.protocols.base import Protocol
from r3lite.settings import CollectConfig


def gold(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, output: Path
) -> Tally:
    """Writes a trajectory for every question with a decomposition whose hops the retriever finds."""
    tally, usable, written = Tally(len(questions)), [], []
    by_evidence = config.collect.demonstrations == "evidence" and protocol.searches and not protocol.plans
    for question in questions:
        reason = obstacle(question, config.lengths.max_hops, protocol.searches)
        if not (reason or by_evidence):
            steps = shown(question, [[hop.document] for hop in question.hops], protocol)
            idle = config.collect.without_search == "drop" and not any(step.searches for step in steps)
            reason = WITHOUT_SEARCH if idle else check_steps(steps, protocol)
        if reason:
            tally.rejected[reason] += 1
        else:
            usable.append(question)
    if by_evidence:
        for made in demonstrate(usable, retrieve, config.lengths):
            steps = verified(made.question, made.steps, protocol)
            if reason := made.rejected or check_steps(steps, protocol):
                tally.rejected[reason] += 1
                continue
            written.append(Trajectory.of(made.question, steps, "gold"))
            tally.keep_retrieved(made.question, steps)
    else:
        written = by_sub_questions(config, usable, protocol, retrieve, tally)
    write_jsonl(output, (t.to_json() for t in written))
    return tally


def by_sub_questions(
    config: CollectConfig, questions: list[Question], protocol: Protocol, retrieve: Retrieve, tally: Tally
) -> list[Trajectory]:
    """Trajectories whose queries are the sub-questions of the decompositions; for a protocol without search nothing is
    retrieved. A question of which a gold paragraph is not found is rejected, unless --insert-gold puts it there."""
    asked = planned_searches if protocol.plans else lambda question: list(map(Search, queries(question)))
    documents_of: list[list[list[Document]]] = [[] for _ in questions]  # by question and hop
    found, rejected = [0] * len(questions), {}
    for hop in range(max((len(q.hops) for q in questions), default=0) if protocol.searches else 0):
        # One batch for the first queries of all questions, then one for the second queries, ...
        asking = [i for i, q in enumerate(questions) if hop < len(q.hops)]
        answers = retrieve_all(retrieve, [(questions[i], asked(questions[i])[hop]) for i in asking])
        for i, outcome in zip(asking, answers, strict=True):
            if isinstance(outcome, Failure):
                rejected[i] = "the retriever failed"
                outcome = []
            seed = f"{config.common.seed}/{questions[i].id}/{hop}"
            documents, was_there = with_gold(questions[i], hop, outcome, config.retrieval.top_k, seed)
            documents_of[i].append(documents)
            found[i] += was_there
            if not (was_there or config.collect.insert_gold):
                rejected.setdefault(i, MISSED)
    written = []
    for i, (q, documents) in enumerate(zip(questions, documents_of, strict=True)):
        if i in rejected:
            tally.rejected[rejected[i]] += 1
            continue
        draw = random.Random(f"{config.common.seed}/{q.id}/hurried").random()
        asked = hasty(q) if draw < config.collect.hurried_share and len(q.hops) > 1 else q
        written.append(Trajectory.of(q, shown(asked, documents, protocol), "gold"))
        tally.keep(len(written[-1].steps), len(documents), found[i])
    return written
