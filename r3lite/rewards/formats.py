"""Rewards for the form of what was written, whatever the format: an analysis, a query and an answer are what the tags
or headings of each format enclose. A block that is blank, or that cannot be distinguished from a second one, is not
there.

Every function takes an episode; what it returns is the reward of the last step.
"""

from r3lite.core.episode import ANSWERED, Episode


def strict_format(episode: Episode) -> float:
    """1 if the episode ends with an answer and no step has a fault, else 0."""
    return float(episode.finish == ANSWERED and not any(step.faults for step in episode.steps))


def approximate_format(episode: Episode) -> float:
    """1 if the episode ends with an answer, which could be read in spite of any faults, else 0."""
    return float(episode.finish == ANSWERED)


def tag_share(episode: Episode, query: bool = True, documents: bool = False) -> float:
    """The share of the kinds of blocks that the episode has at all, 0 to 1: analysis, answer, `query`, `documents`.

    Documents are given by the retriever: they are there if any were retrieved.
    """
    wanted = ["analysis", "answer"] + ["queries"] * query + ["documents"] * documents
    return sum(any(getattr(step, kind) for step in episode.steps) for kind in wanted) / len(wanted)


def all_tags(episode: Episode, query: bool = True, documents: bool = False) -> float:
    """1 if the episode has blocks of all these kinds, else 0 (R-Search, arXiv 2506.08352, with `documents`)."""
    return float(tag_share(episode, query, documents) == 1.0)


def valid_plan(episode: Episode) -> float:
    """1 if the episode opens with a plan that could be run, else 0 (R-Search, arXiv 2506.08352); for `--format dag`."""
    return float(any(search.source for step in episode.steps[:1] for search in step.searches))
