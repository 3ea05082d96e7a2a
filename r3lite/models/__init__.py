"""Networks written by hand and what is attached to them: Qwen2, BERT, LoRA, caches, hooks, checkpoints' weights."""
