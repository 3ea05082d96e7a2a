"""The work whose kernels bench.kernels counts: decoding, prefill, SFT and a GRPO round.

r3lite does all of it; transformers + peft do all but decoding in NF4 and the GRPO round. Each function in
bench.kernels.KINDS does one kind of work with the model in a folder, on a simulated card, and returns the counts of
that card. bench.by_layer splits the counts into layers and all else.
"""

import itertools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench import peers
from bench.contest import CAPTURED, OURS
from bench.contests import PROMPT, RL_EPISODES, RL_NEW, RL_PROMPT, Ours, rl_round
from bench.full_length import full_prompts, full_rows
from bench.stress.simulated_cuda import SimulatedCuda
from bench.stress.simulation.counts import Counts
from r3lite.assembly import supervised
from r3lite.core.invocation import resolve
from r3lite.datasets.sources import read_data
from r3lite.devices.precision import Precision, dtype_name
from r3lite.models.config_file import read_config
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.lora import cast_once
from r3lite.rollout.decoder import Decoder
from r3lite.settings import SftConfig

PEFT = "transformers + peft"
MERGED = "transformers, adapter merged"
MODEL = f"{OURS}, without head and sampling"
# Ends of the names of training work. They say whether the activations of the layers are stored, or recomputed in the
# backward pass.
STORED = ""
RECOMPUTED = ", layers recomputed"
# Tokens that are sampled in the two counts of `count_step`. All work but one decoding step is the same in both.
FEWER_TOKENS = 2
MORE_TOKENS = 3
TRAINING_PRODUCTS = 2  # in the loss, with the head's weight: forward, and for the gradient of the hidden states


@dataclass(frozen=True)
class Work:
    """A piece of work, and the contestant that does it."""

    name: str
    by: str
    logits: int = 0  # bytes of the logits of all tokens in fp32; 0 if the work computes no loss
    head: int = 0  # bytes of the head's weight that the loss reads: twice for each chunk of rows


Done = dict[Work, Counts]


def import_peers() -> None:
    """Imports the parts of transformers and peft that load late: importing them on the simulated card fails."""
    import peft
    import transformers

    assert peft.get_peft_model and transformers.Qwen2ForCausalLM


def count(card: SimulatedCuda, work: Callable, *arguments) -> Counts:
    """Does the work, and returns what the card counts meanwhile."""
    counts_before = card.so_far()
    work(*arguments)
    return card.so_far() - counts_before


def decode(card: SimulatedCuda, folder: str, precision: Precision, batches: tuple[int, ...]) -> Done:
    """Counts a decoding step after PROMPT tokens: from each row's newest token id to its next one, both on the host."""
    done: Done = {}
    ours = Ours(folder, precision)
    for batch in batches:
        name = f"decoding, batch {batch}"
        done[Work(name, OURS)] = count_step(card, lambda new, batch=batch: ours.decode(batch, new)())
        done[Work(name, MODEL)] = model_alone(card, ours, batch)
    for by in (PEFT, MERGED):
        for batch in batches:
            work = peers.generate(folder, full_prompts(batch, PROMPT), MORE_TOKENS, precision, merged=by == MERGED)
            done[Work(f"decoding, batch {batch}", by)] = count_step(card, work)
    return done


def decode_nf4(card: SimulatedCuda, folder: str, precision: Precision, batch: int) -> Done:
    """Counts a decoding step by r3lite alone, with the base in NF4 and in the run's precision."""
    done: Done = {}
    for nf4 in (True, False):
        ours = Ours(folder, precision, nf4)
        name = f"decoding, batch {batch}" + (", NF4" if nf4 else "")
        done[Work(name, OURS)] = count_step(card, lambda new, ours=ours: ours.decode(batch, new)())
    return done


def count_step(card: SimulatedCuda, sample: Callable[[int], None]) -> Counts:
    """Returns the counts of one decoding step; `sample(n)` samples n tokens in each row."""
    sample(1)  # warms up: a first call may do work that later ones do not repeat
    fewer = count(card, sample, FEWER_TOKENS)
    return count(card, sample, MORE_TOKENS) - fewer


def model_alone(card: SimulatedCuda, ours: Ours, batch: int) -> Counts:
    """Counts a decoding step up to the hidden states, without CUDA graphs: a graph has one launch for all kernels."""
    with torch.no_grad(), cast_once(ours.model, ours.precision.dtype):
        cache = cache_of(ours, batch)
        cache.lengths = [PROMPT] * batch
        cache.reserve(PROMPT + 1)
        return count(card, Decoder(ours.model, cache), [1] * batch)


def cache_of(ours: Ours, rows: int) -> KVCache:
    """Returns an empty KV cache of `rows` rows."""
    return KVCache.of(ours.model, rows)


def prefill(card: SimulatedCuda, folder: str, precision: Precision, tokens: int) -> Done:
    """Counts a pass over a prompt, which fills the cache; transformers also computes the last token's logits."""
    name = f"prefill, {tokens:,} tokens"
    (prompt,) = full_prompts(1, tokens)
    ours = Ours(folder, precision)
    with torch.no_grad(), cast_once(ours.model, precision.dtype):
        cache = cache_of(ours, 1)

        def read() -> None:
            context = Prefill(cache, [(0, prompt)])
            ours.model(context.tokens, context)

        done = {Work(name, OURS): count(card, read)}
    for by in (PEFT, MERGED):
        done[Work(name, by)] = count(card, peers.prefill(folder, prompt, precision, merged=by == MERGED))
    return done


def training(card: SimulatedCuda, folder: str, precision: Precision, tokens: int) -> Done:
    """Counts an optimizer step on one row: the second step, in which the optimizer has its moments.

    r3lite's step is that of `python -m r3lite.sft`.
    """
    done: Done = {}
    config = read_config(folder)
    element = precision.dtype.itemsize
    name = f"SFT, {tokens:,} tokens"
    logits = torch.float32.itemsize * tokens * config.vocab_size
    flags_of = {
        STORED: "--recompute-layers 0",
        RECOMPUTED: f"--recompute-layers {config.num_hidden_layers}",
        CAPTURED: "--recompute-layers 0 --cuda-graphs",
    }
    for storage, flags in flags_of.items():
        ours = trainer(folder, precision, tokens=tokens, flags=flags)
        chunks = math.ceil(ours.rows[0].loss_tokens / ours.policy.grant.memory.loss_chunk)
        head = TRAINING_PRODUCTS * chunks * ours.vocabulary * config.hidden_size * element
        steps = map(ours.step, itertools.count(1))
        done[Work(name + storage, OURS, logits=logits, head=head)] = count_second(card, partial(next, steps))
    torch.cuda.set_per_process_memory_fraction(1.0)  # r3lite has set its budget; transformers needs more
    head = TRAINING_PRODUCTS * config.vocab_size * config.hidden_size * element
    for storage, work in zip((RECOMPUTED, STORED), peers.sft(folder, tokens, precision), strict=True):
        done[Work(name + storage, PEFT, logits=logits, head=head)] = count_second(card, work)
    return done


def trainer(folder: str, precision: Precision, tokens: int, flags: str) -> supervised.SFTTrainer:
    """Returns the trainer of `python -m r3lite.sft` with further flags, with one row of `tokens` tokens in a step."""
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data.jsonl"
        full_rows(folder, tokens, data)
        flags += f" --model {folder} --data {data} --device cuda --dtype {dtype_name(precision.dtype)} --quantize none"
        flags += f" --max-length {tokens} --batch-size 1 --gradient-accumulation 1 --max-steps 3 --validation-rows 0"
        config = resolve("sft", SftConfig(), flags.split())
        return supervised.build_trainer(config, *read_data(config))


def count_second(card: SimulatedCuda, work: Callable[[], object]) -> Counts:
    """Does the work twice, and returns the counts of the second time."""
    work()
    return count(card, work)


def grpo(card: SimulatedCuda, folder: str, precision: Precision) -> Done:
    """Counts the second round of GRPO: the episodes of one question, and an optimizer step on them."""
    name = f"a GRPO round, {RL_EPISODES} x ({RL_PROMPT} + {RL_NEW}) tokens"
    work = rl_round(folder, precision, algorithm="grpo", episodes=RL_EPISODES, prompt=RL_PROMPT, new=RL_NEW)
    return {Work(name, OURS): count_second(card, work)}
