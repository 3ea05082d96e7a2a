"""Reinforcement learning: batches, advantages, losses, algorithms and the learner. Works on numbers; reads no text."""
