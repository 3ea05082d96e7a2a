"""The machinery of a training run: precision, optimizer, checkpoints, metrics and the loop around a step."""
