"""Retrieval: corpora, encoders, indexes, and the function that a rollout is handed."""
