"""The same work by others: transformers, with peft for training, TRL's GRPOTrainer, and sentence-transformers.

Each function prepares a piece of work and returns what does it once.
"""

import tempfile
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Semaphore, Thread

import numpy as np
import torch

from bench.full_length import full_prompts
from r3lite.devices.precision import Precision
from r3lite.protocols.transcript import Transcript

MANY = 1000  # steps, more than anyone asks for
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_model(folder: str, precision: Precision):
    """A base with LoRA r=8 on all projections."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=precision.dtype).to(precision.device)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))


def with_folded_head(model):
    """The model, which while it generates multiplies all rows by its head at once.

    PyTorch multiplies the last of many states by a frozen head row by row (bmm), which takes 4 s for 8 rows on two CPU
    cores. Whoever compares decoding does not want to measure that. By a head that requires a gradient it multiplies
    them in one product; no gradient is made, and the head is frozen again when a step of training follows.
    """
    generate, head = model.generate, model.get_output_embeddings()

    def folded(*arguments, **options):
        head.requires_grad_()
        try:
            return generate(*arguments, **options)
        finally:
            head.requires_grad_(False)

    model.generate = folded
    return model


def generate(
    folder: str,
    prompts: list[list[int]],
    new: int,
    precision: Precision,
    merged: bool = False,
) -> Callable[..., None]:
    """Sampling of `new` tokens after each prompt, or of as many as it is called with; none ends early.

    The adapter is on, or merged.
    """
    model = peft_model(folder, precision).eval()
    model = with_folded_head(model.merge_and_unload() if merged else model)
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts, device=precision.device)  # [B, T]
    how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0}

    @torch.no_grad()
    def work(new: int = new) -> None:
        lengths = {"min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how, **lengths)  # [B, T + new]
        sampled = made.shape[1] - ids.shape[1]
        assert sampled == new, f"{new} tokens each were to be sampled, not {sampled}"

    return work


class Turns:
    """Writes the turns of episodes with `generate`: greedily, one episode at a time, its cache kept from turn to turn.

    `adapter` is the folder of an adapter, which is merged, or None.
    """

    def __init__(self, folder: str, adapter: str | None, precision: Precision):
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=precision.dtype).to(precision.device)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None

    @torch.no_grad()
    def write(self, transcript: Transcript, lookup: tuple[int, int] | None) -> None:
        """Writes the turns of a transcript after what stands before them.

        `lookup`: the number of tokens that are drafted, and the largest number of tokens that are looked up; None: no
        drafts.
        """
        options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
        if lookup is not None:
            options |= {"prompt_lookup_num_tokens": lookup[0], "max_matching_ngram_size": lookup[1]}
        forced = _forced(transcript.tokens)
        cache = None
        for start, end in _turns(transcript.action_mask):
            ids = torch.tensor([transcript.tokens[:start]], device=self.model.device)  # [1, T]
            new = {"min_new_tokens": end - start, "max_new_tokens": end - start}
            mask = torch.ones_like(ids)
            result = self.model.generate(
                input_ids=ids, attention_mask=mask, past_key_values=cache, logits_processor=forced, **options, **new
            )
            assert result.sequences[0].tolist() == transcript.tokens[:end], "another turn was written"
            cache = result.past_key_values


def _forced(tokens: list[int]):
    """The logits processors that let a model write nothing but an episode."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Forced(LogitsProcessor):
        def __call__(self, input_ids, scores):
            only = torch.full_like(scores, -torch.inf)
            place = input_ids.shape[1]
            if place < len(tokens):  # drafts may reach beyond the end
                only[:, tokens[place]] = 0
            else:
                only[:, 0] = 0
            return only

    return LogitsProcessorList([Forced()])


def _turns(action_mask: list[bool]) -> list[tuple[int, int]]:
    """The start and end of each stretch of an episode that the model writes."""
    borders = [0, *(place for place in range(1, len(action_mask)) if action_mask[place] != action_mask[place - 1])]
    stretches = zip(borders, [*borders[1:], len(action_mask)], strict=True)
    return [(start, end) for start, end in stretches if action_mask[start]]


def prefill(folder: str, prompt: list[int], precision: Precision, merged: bool = False) -> Callable[[], None]:
    """A pass over a prompt that fills a cache and gives the logits of its last token."""
    model = peft_model(folder, precision).eval()
    model = model.merge_and_unload() if merged else model
    ids = torch.tensor([prompt], device=precision.device)  # [1, T]

    @torch.no_grad()
    def work() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return work


def sft(
    folder: str, tokens: int, precision: Precision, fused: bool = False
) -> tuple[Callable[[], None], Callable[[], None]]:
    """One optimizer step on one row of one model: with activation checkpointing, and without.

    `fused`: with the loss of TRL's SFTTrainer, which makes the logits of a part of the vocabulary at a time.
    """
    model = peft_model(folder, precision).train()
    how = {"use_cache": False}
    if fused:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model.get_base_model())
        how = {"fused_lm_head": True}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.tensor(full_prompts(1, tokens), device=precision.device)  # [1, T]

    def work() -> None:
        with precision.autocast():
            loss = model(input_ids=ids, labels=ids, **how).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def recomputing() -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        work()

    def keeping() -> None:
        model.gradient_checkpointing_disable()
        work()

    return recomputing, keeping


def sft_trainer(folder: str, tokens: int, precision: Precision, steps: int):
    """TRL's SFTTrainer with its defaults (chunked loss, activation checkpointing) on rows of `tokens` tokens, and LoRA.

    A step is of one row, all of whose tokens are trained on.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=1, max_steps=steps, max_length=tokens,
        bf16=precision.dtype == torch.bfloat16, fp16=precision.dtype == torch.float16,
        use_cpu=precision.device.type == "cpu", report_to=[], logging_strategy="no", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=precision.dtype),
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": full_prompts(steps, tokens)}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS),
    )


def encode(folder: str, texts: list[str], longest: int, device: str) -> Callable[[], np.ndarray]:
    """Sentence vectors of texts by sentence-transformers, which takes them in the order of their lengths."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device=device)
    model.max_seq_length = longest
    return lambda: model.encode(texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False)


def grpo_trainer(
    folder: str, prompt: int, new: int, episodes: int, rows: int, precision: Precision, steps: int, callbacks=()
):
    """TRL's trainer of groups of `episodes` completions of `new` tokens, KL to the base included.

    An optimizer step learns from `rows` of them, in one pass: a group takes episodes / rows steps. None ends early.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=rows, steps_per_generation=episodes // rows,
        num_generations=episodes, max_steps=steps, max_completion_length=new, beta=0.001,
        bf16=precision.dtype == torch.bfloat16, fp16=precision.dtype == torch.float16, gradient_checkpointing=True,
        generation_kwargs={"min_new_tokens": new}, use_cpu=precision.device.type == "cpu", report_to=[],
        logging_strategy="no", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip

    def reward(completions: list[str], completion_ids: list[list[int]], **_) -> list[float]:
        lengths = [len(ids) for ids in completion_ids]
        assert lengths == [new] * episodes, f"{new} tokens each were to be sampled, not {lengths}"
        return [float(len(set(completion))) for completion in completions]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=precision.dtype),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [" a" * prompt] * episodes}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS),
        callbacks=list(callbacks),
    )
    with_folded_head(trainer.model)
    return trainer


def grpo(folder: str, prompt: int, new: int, episodes: int, precision: Precision) -> Callable[[], float]:
    """One more step of `grpo_trainer` on a whole group; returns its seconds.

    Training runs in a thread that waits before each step until it is asked for, so that others may take turns with it.
    """
    from transformers import TrainerCallback

    asked, done = Semaphore(0), SimpleQueue()

    class Turns(TrainerCallback):
        def on_step_begin(self, *args, **kwargs) -> None:
            asked.acquire()
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs) -> None:
            if precision.device.type == "cuda":
                torch.cuda.synchronize()
            done.put(time.perf_counter() - self.began)

    trainer = grpo_trainer(folder, prompt, new, episodes, episodes, precision, MANY, [Turns()])

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
