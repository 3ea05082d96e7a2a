"""What surrounds the steps of a training run: run folder, checkpoints, optimizer, metrics, interruptions, the loop."""
