"""Rewards: what an episode is paid for. Knows text and scores, no tokens and no tensors."""
