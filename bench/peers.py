"""The work of the benches by other libraries: transformers, peft, TRL and sentence-transformers.

Most functions load a model and return a function that does the work once, so that loading is not timed.
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

MAX_STEPS = 1000  # of TRL's trainer in `grpo`: more steps than any bench takes
LORA_RANK = 8
LORA_ALPHA = 16
# The layers that have a LoRA adapter: all projections.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_model(folder: str, precision: Precision):
    """Returns a model of transformers with a new LoRA adapter of rank 8 on all projections."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=precision.dtype).to(precision.device)
    return get_peft_model(model, LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=TARGETS))


def with_folded_head(model):
    """Replaces the model's `generate` by one that multiplies all rows by the head in one product; returns the model.

    Generation multiplies the last hidden state of each row by the head. If the head is frozen, PyTorch does this row by
    row (bmm), which takes 4 s for 8 rows on two CPU cores. A comparison of decoding should not measure that. If the
    head requires a gradient, PyTorch multiplies all rows in one product. So the head requires one while the model
    generates, and is frozen again afterwards. No gradient is computed, because generation runs without autograd.
    """
    generate = model.generate
    head = model.get_output_embeddings()

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
    """Returns a function that samples `new` tokens after each prompt, or as many as its argument says.

    No sequence ends early. `merged`: the adapter is merged into the weights; otherwise it is computed beside them.
    """
    model = peft_model(folder, precision).eval()
    model = with_folded_head(model.merge_and_unload() if merged else model)
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts, device=precision.device)  # [B, T]
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0}

    @torch.no_grad()
    def work(new: int = new) -> None:
        lengths = {"min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        sequences = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **sampling, **lengths
        )  # [B, T + new]
        sampled_tokens = sequences.shape[1] - ids.shape[1]
        assert sampled_tokens == new, f"{new} tokens each were to be sampled, not {sampled_tokens}"

    return work


class Turns:
    """Decodes the turns of finished episodes again with transformers' `generate`, which is forced to the same tokens.

    Decoding is greedy, one episode at a time. The KV cache of an episode is reused from turn to turn. `adapter` is the
    folder of an adapter, which is merged into the weights, or None.
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
        """Decodes each turn of a transcript after the tokens that precede the turn.

        `lookup` is None, or turns on drafts by prompt lookup: the number of tokens in a draft, and the largest n-gram
        (in tokens) that is looked up in the text.
        """
        options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
        if lookup is not None:
            options |= {"prompt_lookup_num_tokens": lookup[0], "max_matching_ngram_size": lookup[1]}
        processors = _forcing_processors(transcript.tokens)
        cache = None
        for start, end in _turns(transcript.action_mask):
            ids = torch.tensor([transcript.tokens[:start]], device=self.model.device)  # [1, T]
            lengths = {"min_new_tokens": end - start, "max_new_tokens": end - start}
            mask = torch.ones_like(ids)
            result = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                logits_processor=processors,
                **options,
                **lengths,
            )
            assert result.sequences[0].tolist() == transcript.tokens[:end], "another turn was written"
            cache = result.past_key_values


def _forcing_processors(tokens: list[int]):
    """Returns a list of one logits processor, which gives the tokens of the episode probability 1."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Forced(LogitsProcessor):
        def __call__(self, input_ids, scores):
            forced_scores = torch.full_like(scores, -torch.inf)
            position = input_ids.shape[1]
            if position < len(tokens):
                forced_scores[:, tokens[position]] = 0
            else:  # a draft reaches beyond the end of the episode: any token will do
                forced_scores[:, 0] = 0
            return forced_scores

    return LogitsProcessorList([Forced()])


def _turns(action_mask: list[bool]) -> list[tuple[int, int]]:
    """Returns the start and end (exclusive) of each stretch of sampled tokens in an episode."""
    starts = [0]
    starts += [index for index in range(1, len(action_mask)) if action_mask[index] != action_mask[index - 1]]
    ends = [*starts[1:], len(action_mask)]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if action_mask[start]]


def prefill(folder: str, prompt: list[int], precision: Precision, merged: bool = False) -> Callable[[], None]:
    """Returns a function that runs the model on a prompt, fills a KV cache and computes the last token's logits."""
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
    """Returns two functions for one optimizer step on one row: with activation checkpointing, and without.

    Both train the same model. `fused`: with the loss of TRL's SFTTrainer, which computes the logits of a part of the
    vocabulary at a time.
    """
    model = peft_model(folder, precision).train()
    forward_options = {"use_cache": False}
    if fused:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model.get_base_model())
        forward_options = {"fused_lm_head": True}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.tensor(full_prompts(1, tokens), device=precision.device)  # [1, T]

    def work() -> None:
        with precision.autocast():
            loss = model(input_ids=ids, labels=ids, **forward_options).loss
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
    """Returns TRL's SFTTrainer with its defaults (chunked loss, activation checkpointing) and a LoRA adapter.

    Each step trains on one row of `tokens` tokens, and on all tokens of the row.
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
        peft_config=LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=TARGETS),
    )


def encode(folder: str, texts: list[str], longest: int, device: str) -> Callable[[], np.ndarray]:
    """Returns a function that encodes the texts with sentence-transformers into vectors [len(texts), d].

    Texts are cut off after `longest` tokens. sentence-transformers itself sorts them by length into batches.
    """
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device=device)
    model.max_seq_length = longest
    return lambda: model.encode(texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False)


def grpo_trainer(
    folder: str, prompt: int, new: int, episodes: int, rows: int, precision: Precision, steps: int, callbacks=()
):
    """Returns TRL's GRPOTrainer, whose loss includes the KL to the base.

    It samples groups of `episodes` completions, each of exactly `new` tokens after a prompt of `prompt` words " a". An
    optimizer step learns from `rows` completions in one pass, so a group takes `episodes / rows` steps. Training ends
    after `steps` optimizer steps.
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
        peft_config=LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=TARGETS),
        callbacks=list(callbacks),
    )
    with_folded_head(trainer.model)
    return trainer


def grpo(folder: str, prompt: int, new: int, episodes: int, precision: Precision) -> Callable[[], float]:
    """Returns a function that runs one more optimizer step of `grpo_trainer` on a whole group, and returns its seconds.

    The trainer runs in a thread of its own and waits before each step until the function is called, so that it can
    alternate with other contestants.
    """
    from transformers import TrainerCallback

    step_requests = Semaphore(0)
    step_results: SimpleQueue = SimpleQueue()  # the seconds of each step, or the error that ended the training

    class StepGate(TrainerCallback):
        def on_step_begin(self, *args, **kwargs) -> None:
            step_requests.acquire()
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs) -> None:
            if precision.device.type == "cuda":
                torch.cuda.synchronize()
            step_results.put(time.perf_counter() - self.start)

    trainer = grpo_trainer(
        folder,
        prompt=prompt,
        new=new,
        episodes=episodes,
        rows=episodes,
        precision=precision,
        steps=MAX_STEPS,
        callbacks=[StepGate()],
    )

    def train() -> None:
        try:
            trainer.train()
        except Exception as error:  # `work` raises it in the thread that waits for the step
            step_results.put(error)

    Thread(target=train, daemon=True).start()

    def work() -> float:
        step_requests.release()
        result = step_results.get()
        if isinstance(result, Exception):
            raise result
        return result

    return work
