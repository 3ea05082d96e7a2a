"""Contestants: r3lite at each kind of work that bench.throughput times. The work of others is in bench.peers."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench import peers
from bench.contest import OURS, Contest
from bench.full_length import FullTurns, check_lengths, full_prompts, full_question
from bench.limits import products, sft_flops
from r3lite.core.episode import Question
from r3lite.core.grant import Grant, Memory
from r3lite.devices.precision import Precision, dtype_name
from r3lite.models.linear import linear
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms

PROMPT = 128  # tokens before those that are sampled, in decoding
RL_PROMPT, RL_NEW, RL_EPISODES = 216, 128, 8
DOCUMENTS = 512  # tokens kept free for the documents of a search
PASSAGES = 320  # of an encoding contest


class Ours:
    """r3lite's model with an adapter that is on."""

    def __init__(self, folder: str, precision: Precision, nf4: bool = False):
        from r3lite.models import lora, weights
        from r3lite.protocols.tokenizer import Tokenizer

        self.folder, self.precision, self.device = folder, precision, precision.device
        where = weights.resolve_folder(folder)
        self.tokenizer = Tokenizer.load(where)
        self.model = weights.load_model(where, precision.dtype, self.device, quantize=nf4)
        lora.add_adapter(self.model, "policy", 8, 16)
        lora.set_adapter(self.model, "policy")

    def decode(self, batch: int, new: int, prompt: int = PROMPT) -> Callable[[], None]:
        """Sampling of `new` tokens after `prompt` others, with the engine of the rollouts."""
        from r3lite.protocols.r3 import R3
        from r3lite.settings import LengthSettings

        lengths = LengthSettings(max_new_tokens=new, max_length=prompt + new + 1)
        layout = FullTurns(self.tokenizer, R3("{question}", "{documents}"), lengths)
        engine = Engine(self.model, layout, Sampler(), Grant(Memory(rollout_batch_size=batch)))

        @torch.no_grad()
        def work() -> None:
            self.model.eval()
            sequences = []
            for ids in full_prompts(batch, prompt):
                sequences.append(Sequence(Question("q", "q", ()), stream=Uniforms(0)))
                sequences[-1].observe(ids)
            with self.precision.autocast():
                engine.finish(sequences, lambda pairs: [], quiet=True)
            check_lengths(sequences, new)

        return work

    def sft(self, tokens: int, budget: str) -> Callable[[], None]:
        """One optimizer step on one row, with the memory settings that the planner chooses for the budget."""
        from r3lite.memory.plan import make_plan
        from r3lite.memory.workloads import sft_workload
        from r3lite.models import activation_checkpointing, lora
        from r3lite.models.logprobs import token_loss
        from r3lite.settings import MemorySettings, ModelSettings, SftConfig, SftSettings
        from r3lite.training import optim

        dtype = dtype_name(self.precision.dtype)
        model = ModelSettings(model=self.folder, device=self.device.type, dtype=dtype)
        workload = sft_workload(SftConfig(model=model, sft=SftSettings(max_length=tokens, batch_size=1)))
        memory = make_plan(workload, MemorySettings(vram_budget=budget, quantize="none")).memory
        parameters = lora.adapter_parameters(self.model, "policy")
        optimizer = optim.adamw([optim.ParameterGroup(parameters, 1e-4)], 0.0)
        ids = torch.tensor(full_prompts(1, tokens), device=self.device)  # [1, T]

        def mean_loss(rows: slice, logprobs: Tensor, _: None) -> tuple[Tensor, dict]:
            return -logprobs.sum() / (tokens - 1), {}

        def work() -> None:
            activation_checkpointing.enable(self.model, Grant(memory))
            self.model.train()
            with self.precision.autocast():
                hidden = self.model(ids)[0, :-1]  # [T-1, C]
                head = self.model.head_weight[: self.tokenizer.size]
                loss, _ = token_loss(hidden, head, ids[0, 1:], mean_loss, chunk=memory.loss_chunk)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return work

    def peak(self, tokens: int) -> Callable[[], float]:
        """The operations of `sft` that are of use (see limits.training_flops), at the speed of a large product."""
        return products(sft_flops(self.model, self.tokenizer.size, tokens), self.precision)

    def floor(self, batch: int, steps: int) -> Callable[[], None]:
        """The matrix products of so many decoding steps, and nothing else."""
        weights = [m.weight for m in self.model.modules() if isinstance(m, torch.nn.Linear)]
        weights.append(self.model.head_weight[: self.tokenizer.size])
        inputs = {w.shape[1]: torch.randn(batch, w.shape[1], device=self.device, dtype=w.dtype) for w in weights}

        @torch.no_grad()
        def work() -> None:
            for _ in range(steps):
                for weight in weights:
                    linear(inputs[weight.shape[1]], weight)

        return work


def rl_round(
    folder: str, precision: Precision, algorithm: str, episodes: int, prompt: int, new: int, searches: int = 0
) -> Callable[[int], dict[str, float]]:
    """A round of PPO or GRPO on what ppo runs for so many episodes; it may be run with fewer, and again.

    One question, one optimizer step, all episodes in one pass where memory allows it. An episode searches the sample
    world `searches` times, with what documents are found spliced in, and samples `new` tokens in each turn. Returns the
    seconds of its parts. Rewards are made up, 0 and 1 in turn, so that there is something to learn.
    """
    from r3lite.assembly import rl_setup
    from r3lite.checks.sample import whole_card
    from r3lite.core.files import shipped
    from r3lite.core.invocation import resolve
    from r3lite.retrieval.retriever import build_retriever
    from r3lite.retrieval.setup import Setup
    from r3lite.rl.batch import Batch, Rollout
    from r3lite.settings import PpoConfig, RetrievalSettings

    turns = prompt + new + searches * (new + DOCUMENTS)
    flags = f"--model {folder} --algorithm {algorithm} --quantize none --batch-size 1"
    flags += f" --device {precision.device.type} --dtype {dtype_name(precision.dtype)}"
    flags += f" --num-generations {episodes} --mini-batch-size {episodes}"
    flags += f" --max-new-tokens {new} --max-length {turns}"
    with tempfile.TemporaryDirectory() as where:
        question = full_question(folder, Path(where), prompt)
        config = resolve("ppo", PpoConfig(), [*flags.split(), *question])
        with whole_card(precision.device):  # others hold memory in this process, too
            engine, learner, _ = rl_setup.build_learning(config, [Question("1", "b", ("x",))])
    layout = FullTurns(engine.layout.tokenizer, engine.layout.protocol, engine.layout.lengths, searches=searches)
    engine = replace(engine, layout=layout)
    corpus = RetrievalSettings(corpus=str(shipped("data", "world", "corpus.jsonl")), encoder="hashing")
    retrieve, scoring, seconds = build_retriever(Setup(corpus, [])), learner.reference_logprobs, {}

    def timed_scoring(batch: Batch) -> Tensor:
        start = time.perf_counter()
        scored = scoring(batch)
        seconds["scoring"] = time.perf_counter() - start
        return scored

    learner.reference_logprobs = timed_scoring

    def work(count: int = episodes) -> dict[str, float]:
        questions, seeds = [Question("1", "b", ("x",))] * count, list(map(str, range(count)))
        start = time.perf_counter()
        sampled = engine.run(questions, seeds, retrieve)
        seconds["rollout"] = time.perf_counter() - start
        check_lengths(sampled, (searches + 1) * new)
        rewards = ([(s.step_ends[-1], float(i % 2))] for i, s in enumerate(sampled))
        rollouts = [Rollout(s, r, 0) for s, r in zip(sampled, rewards)]
        learner.learn(Batch.of(rollouts), seed="0")
        seconds["update"] = time.perf_counter() - start - seconds["rollout"] - seconds["scoring"]
        return seconds

    return work


def encoding(folder: str, corpus: str, device: str) -> Contest:
    """Vectors of a corpus's first passages, in fp32, by r3lite's encoder and by sentence-transformers."""
    from r3lite.models.weights import resolve_folder
    from r3lite.retrieval.conventions import passage_text, style_of
    from r3lite.retrieval.corpus import read_corpus
    from r3lite.retrieval.encoder import BertEncoder

    documents = read_corpus(corpus)[:PASSAGES]
    encoder = BertEncoder(folder, style_of(folder), device)
    texts = [encoder.prefixes[1] + passage_text(document) for document in documents]
    theirs = peers.encode(str(resolve_folder(folder)), texts, encoder.settings["max_length"], device)
    ours = partial(encoder.encode_passages, documents, lambda n: None)
    assert abs(ours() - theirs()).max() < 1e-4, "the two encoders differ"
    tokens = sum(len(e.ids) for e in encoder.tokenizer.encode_batch(texts))
    facts = {"corpus": "/".join(Path(corpus).absolute().parts[-2:]), "mean_tokens": round(tokens / len(documents), 1)}
    work = {OURS: ours, "sentence-transformers": theirs}
    return Contest(f"encoding, {len(documents)} passages", tokens, work, facts=facts)
