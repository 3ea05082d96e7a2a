"""Trained models for other programs: merged folders, GGUF files, and how to use them."""
