"""The same work by others: transformers, with peft for training, and TRL's GRPOTrainer. Each function prepares a piece
of work and returns what does it once."""

import tempfile
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Semaphore, Thread

import numpy as np
import torch

MANY = 1000  # steps, more than anyone asks for
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_model(folder: str, device: str):
    """A base in bf16 with LoRA r=8 on all projections."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))


def generate(folder: str, prompts: list[list[int]], new: int, device: str) -> Callable[[], None]:
    """Sampling of `new` tokens after each prompt, none of which ends early."""
    model = peft_model(folder, device).eval()
    # PyTorch multiplies a frozen head with the last of many states by copying it for every row, which takes 4 s for 8
    # rows on two CPU cores. Whoever compares decoding does not want to measure that.
    model.get_output_embeddings().requires_grad_()
    ids = torch.tensor(prompts, device=device)  # [B, T]
    how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0}
    how |= {"min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}

    @torch.no_grad()
    def work() -> None:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)

    return work


def sft(folder: str, tokens: int, device: str) -> Callable[[], None]:
    """One optimizer step on one row, with activation checkpointing."""
    model = peft_model(folder, device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, 150_000, (1, tokens), device=device)  # [1, T]

    def work() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return work


def encode(folder: str, texts: list[str], longest: int, device: str) -> Callable[[], np.ndarray]:
    """Sentence vectors of texts as model cards show it: batches in the order of the file, padded, masked mean."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).to(device).eval()

    @torch.inference_mode()
    def work() -> np.ndarray:
        vectors = []
        for start in range(0, len(texts), 32):
            batch = texts[start : start + 32]
            inputs = tokenizer(batch, padding=True, truncation=True, max_length=longest, return_tensors="pt").to(device)
            hidden = model(**inputs).last_hidden_state  # [B, T, C]
            real = inputs["attention_mask"][..., None]  # [B, T, 1]
            mean = (hidden * real).sum(1) / real.sum(1)
            vectors.append(torch.nn.functional.normalize(mean, dim=-1).cpu().numpy())
        return np.concatenate(vectors)

    return work


def grpo_trainer(folder: str, prompt: int, new: int, episodes: int, device: str, steps: int, callbacks=()):
    """TRL's trainer of a group of `episodes` completions of `new` tokens a step, KL to the base included."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=episodes, num_generations=episodes, max_steps=steps,
        max_completion_length=new, beta=0.001, bf16=True, gradient_checkpointing=True, report_to=[],
        use_cpu=device == "cpu", logging_strategy="no", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [" a" * prompt] * episodes}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS),
        callbacks=list(callbacks),
    )


def grpo(folder: str, prompt: int, new: int, episodes: int, device: str) -> Callable[[], float]:
    """One more step of `grpo_trainer`; returns its seconds.

    Training runs in a thread that waits before each step until it is asked for, so that others may take turns with it.
    """
    from transformers import TrainerCallback

    asked, done = Semaphore(0), SimpleQueue()

    class Turns(TrainerCallback):
        def on_step_begin(self, *args, **kwargs) -> None:
            asked.acquire()
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            done.put(time.perf_counter() - self.began)

    trainer = grpo_trainer(folder, prompt, new, episodes, device, MANY, [Turns()])

    def train() -> None:
        try:
            trainer.train()
        except Exception as error:  # whoever waits for the step is told
            done.put(error)

    Thread(target=train, daemon=True).start()

    def work() -> float:
        asked.release()
        seconds = done.get()
        if isinstance(seconds, Exception):
            raise seconds
        return seconds

    return work
