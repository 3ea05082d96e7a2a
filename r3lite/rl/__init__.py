"""Reinforcement learning: batches, advantages and losses. Handed numbers; knows no judge and no text."""
