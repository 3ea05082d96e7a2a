"""Retrieval: corpora, encoders, indexes, and the retrievers that rollouts call."""
