"""Rewards of an episode. Knows text and scores, and no tensors; only rounds.py, which makes metrics, reads tokens."""
