"""A training run around its steps: run folder, checkpoints, optimizer, metrics, interruptions and the loop."""
