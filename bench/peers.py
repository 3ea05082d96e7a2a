"""One training step of other trainers, on the shapes that r3lite is measured on: transformers + peft, and TRL."""

import tempfile

import torch

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT, GENERATIONS = 216, 8  # of a GRPO step


def peft_model(folder: str, device: str):
    """A base in bf16 with LoRA r=8 on all projections, and activation checkpointing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def sft_step(folder: str, tokens: int, device: str) -> None:
    """Two steps of transformers + peft on one row: in the second the optimizer's moments are there."""
    model = peft_model(folder, device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, 150_000, (1, tokens), device=device)
    for _ in range(2):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def grpo_step(folder: str, tokens: int, device: str) -> None:
    """One step of TRL's GRPOTrainer: a group of 8 completions of so many tokens after a prompt of 216."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, per_device_train_batch_size=GENERATIONS, num_generations=GENERATIONS, max_steps=1,
            max_completion_length=tokens, beta=0.001, bf16=True, gradient_checkpointing=True, report_to=[],
            use_cpu=device == "cpu", logging_strategy="no", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [" a" * PROMPT] * GENERATIONS}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS),
        )
        trainer.train()


STEPS = {"peft": sft_step, "trl": grpo_step}
