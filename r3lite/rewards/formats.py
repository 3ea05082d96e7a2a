"""Rewards for the form of what was written, whatever the format: an analysis, a query and an answer are what the tags
or headings of each format enclose. A block that is blank, or that cannot be distinguished from a second one, counts
as missing.

Every function takes an episode; what it returns is the reward of the last step.
"""

from r3lite.core.episode import ANSWERED, Episode


def strict_format(episode: Episode) -> float:
    """Returns 1 if the episode ends with an answer and no step has a fault, else 0."""
    has_fault = any(step.faults for step in episode.steps)
    return float(episode.finish == ANSWERED and not has_fault)


def approximate_format(episode: Episode) -> float:
    """Returns 1 if the episode ends with an answer, which could be read in spite of any faults, else 0."""
    return float(episode.finish == ANSWERED)


def tag_share(episode: Episode, query: bool = True, documents: bool = False) -> float:
    """Returns the share of these kinds of blocks that the episode has, 0 to 1: analysis, answer, queries (if `query`),
    documents (if `documents`).

    Documents come from the retriever: the episode has them if any were retrieved.
    """
    kinds = ["analysis", "answer"]
    if query:
        kinds.append("queries")
    if documents:
        kinds.append("documents")
    present = [kind for kind in kinds if any(getattr(step, kind) for step in episode.steps)]
    return len(present) / len(kinds)


def all_tags(episode: Episode, query: bool = True, documents: bool = False) -> float:
    """Returns 1 if the episode has blocks of all the kinds that `tag_share` counts, else 0.

    It is a reward of R-Search (arXiv 2506.08352), there with `documents`.
    """
    return float(tag_share(episode, query, documents) == 1.0)


def valid_plan(episode: Episode) -> float:
    """Returns 1 if the episode opens with a plan that could be run, else 0 (R-Search, arXiv 2506.08352).

    It is for `--format dag`, where each search of a plan names a kind of source.
    """
    if not episode.steps:
        return 0.0
    plan = episode.steps[0]
    return float(any(search.kind for search in plan.searches))
