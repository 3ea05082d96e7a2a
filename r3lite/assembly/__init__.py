"""What several commands share to put a run together."""
