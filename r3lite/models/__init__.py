"""Networks written by hand and what is attached to them: CausalLM, BERT, LoRA, caches, hooks, checkpoints' weights."""
