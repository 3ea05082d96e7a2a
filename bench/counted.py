"""The work that bench.kernels counts: decoding, prefill, SFT, a GRPO round, by r3lite and by transformers + peft.

Each function does work of one kind on a model folder, on the simulated card that it is called within, and returns what
the card did. What of it a layer did, the caller learns from models of one and of two layers: see bench.by_layer.
"""

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench import peers
from bench.contest import OURS
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

PEFT, MERGED = "transformers + peft", "transformers, adapter merged"
MODEL = f"{OURS}, without head and sampling"
KEPT, RECOMPUTED = "", ", layers recomputed"
SAMPLED = 2, 3  # tokens: what comes before and after is the same, and so the difference is one step


@dataclass(frozen=True)
class Work:
    """What was done, and by whom."""

    name: str
    by: str
    logits: int = 0  # bytes of fp32 logits of all tokens, if there is a loss of them
    head: int = 0  # bytes of the head's weight that the products of the loss read, once for each chunk of rows


Done = dict[Work, Counts]


def import_peers() -> None:
    """Imports what transformers and peft load late: on the simulated card their annotations of graphs fail."""
    import peft
    import transformers

    assert peft.get_peft_model and transformers.Qwen2ForCausalLM


def counted(card: SimulatedCuda, work: Callable, *arguments) -> Counts:
    """What the card does meanwhile."""
    before = card.so_far()
    work(*arguments)
    return card.so_far() - before


def decode(card: SimulatedCuda, folder: str, precision: Precision, batches: tuple[int, ...]) -> Done:
    """One more token for each row, after PROMPT others: from the newest ones' ids on the host to the next ones'."""
    done: Done = {}
    ours = Ours(folder, precision)
    for batch in batches:
        name = f"decoding, batch {batch}"
        done[Work(name, OURS)] = a_step(card, lambda new, batch=batch: ours.decode(batch, new)())
        done[Work(name, MODEL)] = model_alone(card, ours, batch)
    for by in (PEFT, MERGED):
        for batch in batches:
            work = peers.generate(folder, full_prompts(batch, PROMPT), max(SAMPLED), precision, merged=by == MERGED)
            done[Work(f"decoding, batch {batch}", by)] = a_step(card, work)
    return done


def decode_nf4(card: SimulatedCuda, folder: str, precision: Precision, batch: int) -> Done:
    """The same by r3lite with the base in NF4, and in the run's precision."""
    done: Done = {}
    for nf4 in (True, False):
        ours = Ours(folder, precision, nf4)
        name = f"decoding, batch {batch}" + (", NF4" if nf4 else "")
        done[Work(name, OURS)] = a_step(card, lambda new, ours=ours: ours.decode(batch, new)())
    return done


def a_step(card: SimulatedCuda, sample: Callable[[int], None]) -> Counts:
    """What one step more takes, of a function that samples so many tokens, once it has run before."""
    sample(1)
    fewer, more = (counted(card, sample, new) for new in SAMPLED)
    return more - fewer


def model_alone(card: SimulatedCuda, ours: Ours, batch: int) -> Counts:
    """A decoding step up to the hidden states, without CUDA graphs, which hide what the host would launch."""
    with torch.no_grad(), cast_once(ours.model, ours.precision.dtype):
        cache = cache_of(ours, batch)
        cache.lengths = [PROMPT] * batch
        cache.reserve(PROMPT + 1)
        return counted(card, Decoder(ours.model, cache), [1] * batch)


def cache_of(ours: Ours, rows: int) -> KVCache:
    return KVCache.of(ours.model, rows)


def prefill(card: SimulatedCuda, folder: str, precision: Precision, tokens: int) -> Done:
    """A pass over a prompt, which fills the cache; transformers also gives the logits of its last token."""
    name, (prompt,) = f"prefill, {tokens:,} tokens", full_prompts(1, tokens)
    ours = Ours(folder, precision)
    with torch.no_grad(), cast_once(ours.model, precision.dtype):
        cache = cache_of(ours, 1)

        def read() -> None:
            context = Prefill(cache, [(0, prompt)])
            ours.model(context.tokens, context)

        done = {Work(name, OURS): counted(card, read)}
    for by in (PEFT, MERGED):
        done[Work(name, by)] = counted(card, peers.prefill(folder, prompt, precision, merged=by == MERGED))
    return done


def training(card: SimulatedCuda, folder: str, precision: Precision, tokens: int) -> Done:
    """An optimizer step on one row, by the steps of the command itself; the second one, when the moments are there."""
    done: Done = {}
    config, element = read_config(folder), precision.dtype.itemsize
    name, logits = f"SFT, {tokens:,} tokens", 4 * tokens * config.vocab_size
    for how, recomputed in ((KEPT, 0), (RECOMPUTED, config.num_hidden_layers)):
        ours = trainer(folder, precision, tokens, recomputed)
        chunks = -(-ours.rows[0].loss_tokens // ours.policy.grant.memory.loss_chunk)
        head = 2 * chunks * ours.vocabulary * config.hidden_size * element
        steps = map(ours.step, itertools.count(1))
        done[Work(name + how, OURS, logits, head)] = second(card, partial(next, steps))
    torch.cuda.set_per_process_memory_fraction(1.0)  # r3lite keeps to its budget; transformers needs more
    head = 2 * config.vocab_size * config.hidden_size * element
    for how, work in zip((RECOMPUTED, KEPT), peers.sft(folder, tokens, precision), strict=True):
        done[Work(name + how, PEFT, logits, head)] = second(card, work)
    return done


def trainer(folder: str, precision: Precision, tokens: int, recomputed: int) -> supervised.SFTTrainer:
    """That of `python -m r3lite.sft` with rows of so many tokens, one in a step."""
    with tempfile.TemporaryDirectory() as where:
        data = Path(where) / "data.jsonl"
        full_rows(folder, tokens, data)
        flags = f"--model {folder} --data {data} --device cuda --dtype {dtype_name(precision.dtype)} --quantize none"
        flags += f" --max-length {tokens} --batch-size 1 --gradient-accumulation 1 --max-steps 3 --validation-rows 0"
        flags += f" --recompute-layers {recomputed}"
        config = resolve("sft", SftConfig(), flags.split())
        return supervised.build_trainer(config, *read_data(config))


def second(card: SimulatedCuda, work: Callable[[], object]) -> Counts:
    work()
    return counted(card, work)


def grpo(card: SimulatedCuda, folder: str, precision: Precision) -> Done:
    """A round: the episodes of one question, and an optimizer step on them."""
    name = f"a GRPO round, {RL_EPISODES} x ({RL_PROMPT} + {RL_NEW}) tokens"
    work = rl_round(folder, precision, "grpo", RL_EPISODES, RL_PROMPT, RL_NEW)
    return {Work(name, OURS): second(card, work)}
