"""Rollouts: sampling episodes with retrieval in the loop, one growing token sequence each."""
