"""What a model speaks: chat markup, step formats and prompts. Text and token ids; no torch."""
