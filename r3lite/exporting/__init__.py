"""Trained models for other programs: merged folders, GGUF files, and what tells their users how to use them."""
