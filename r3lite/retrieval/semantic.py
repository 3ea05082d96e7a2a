"""Semantic retrieval: the passages whose vectors are nearest to the query's."""

from r3lite.core.episode import Retrieve
from r3lite.retrieval.search import Search
from r3lite.retrieval.setup import Setup


def build(setup: Setup, top_k: int) -> Retrieve:
    return Search(setup.index, top_k, setup.own)
