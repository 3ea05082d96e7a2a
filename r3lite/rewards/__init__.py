"""Rewards of an episode. Knows text and scores, no tokens and no tensors."""
