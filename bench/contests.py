"""The contestant r3lite: each kind of work that bench.throughput times. The work of its rivals is in bench.peers."""

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

PROMPT = 128  # tokens of the prompt in decoding
RL_PROMPT = 216  # tokens of the prompt in an RL round
RL_NEW = 128  # tokens that an RL round samples in each turn
RL_EPISODES = 8  # of an RL round
DOCUMENTS = 512  # tokens of an episode that are reserved for the documents of a search
PASSAGES = 320  # of the encoding contest
LORA_RANK = 8
LORA_ALPHA = 16
LEARNING_RATE = 1e-4
TOLERANCE = 1e-4  # the most by which two encoders may differ in a number of a vector


class Ours:
    """r3lite's model with an active LoRA adapter. Each method returns a function that does one kind of work once."""

    def __init__(self, folder: str, precision: Precision, nf4: bool = False):
        from r3lite.models import lora, weights
        from r3lite.protocols.tokenizer import Tokenizer

        self.folder = folder
        self.precision = precision
        self.device = precision.device
        resolved = weights.resolve_folder(folder)
        self.tokenizer = Tokenizer.load(resolved)
        self.model = weights.load_model(resolved, precision.dtype, self.device, quantize=nf4)
        lora.add_adapter(self.model, "policy", r=LORA_RANK, alpha=LORA_ALPHA)
        lora.set_adapter(self.model, "policy")

    def decode(self, batch: int, new: int, prompt: int = PROMPT) -> Callable[[], None]:
        """Samples `new` tokens after `prompt` tokens in each of `batch` rows, with the rollout engine."""
        from r3lite.protocols.r3 import R3
        from r3lite.settings import LengthSettings

        lengths = LengthSettings(max_new_tokens=new, max_length=prompt + new + 1)
        layout = FullTurns(self.tokenizer, R3("{question}", "{documents}"), lengths)
        engine = Engine(self.model, layout, Sampler(), grant=Grant(Memory(rollout_batch_size=batch)))

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
        """Takes an optimizer step on one row, with the memory settings that the planner chooses for the budget."""
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
        optimizer = optim.adamw([optim.ParameterGroup(parameters, LEARNING_RATE)], 0.0)
        ids = torch.tensor(full_prompts(1, tokens), device=self.device)  # [1, T]

        def mean_loss(rows: slice, logprobs: Tensor, _: None) -> tuple[Tensor, dict]:
            return -logprobs.sum() / (tokens - 1), {}

        def work() -> None:
            activation_checkpointing.enable(self.model, Grant(memory))
            self.model.train()
            with self.precision.autocast():
                hidden = self.model(ids)[0, :-1]  # [T-1, C]
                head = self.model.head_weight[: self.tokenizer.size]
                loss, _ = token_loss(hidden, head, ids[0, 1:], loss=mean_loss, chunk=memory.loss_chunk)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return work

    def peak(self, tokens: int) -> Callable[[], float]:
        """Does the useful operations of `sft` (see limits.training_flops) as large products; returns their seconds."""
        return products(sft_flops(self.model, self.tokenizer.size, tokens), self.precision)

    def floor(self, batch: int, steps: int) -> Callable[[], None]:
        """Does the matrix products of `steps` decoding steps of `batch` rows, and nothing else."""
        weights = [module.weight for module in self.model.modules() if isinstance(module, torch.nn.Linear)]
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
    """Builds what `ppo` uses for rounds of `episodes` episodes; returns a function that runs a round.

    The function may be called again, and with fewer episodes. It returns the seconds of the round's parts: rollout,
    scoring and update. All episodes are of one question, with one optimizer step on them, in one pass if memory allows
    it. An episode samples `new` tokens in each turn, and searches the sample world `searches` times before it answers.
    The rewards are 0 and 1 in turn, because equal rewards would leave nothing to learn.
    """
    from r3lite.assembly import rl_setup
    from r3lite.checks.sample import whole_card
    from r3lite.core.files import shipped
    from r3lite.core.invocation import resolve
    from r3lite.retrieval.retriever import build_retriever
    from r3lite.retrieval.setup import Setup
    from r3lite.rl.batch import Batch, Rollout
    from r3lite.settings import PpoConfig, RetrievalSettings

    length = prompt + new + searches * (new + DOCUMENTS)  # most tokens of an episode
    flags = f"--model {folder} --algorithm {algorithm} --quantize none --batch-size 1"
    flags += f" --device {precision.device.type} --dtype {dtype_name(precision.dtype)}"
    flags += f" --num-generations {episodes} --mini-batch-size {episodes}"
    flags += f" --max-new-tokens {new} --max-length {length}"
    with tempfile.TemporaryDirectory() as temporary:
        question_flags = full_question(folder, Path(temporary), prompt)
        config = resolve("ppo", PpoConfig(), [*flags.split(), *question_flags])
        # The plan must not subtract the memory that other contestants hold in this process.
        with whole_card(precision.device):
            engine, learner, _ = rl_setup.build_learning(config, [Question("1", "b", ("x",))])
    layout = FullTurns(engine.layout.tokenizer, engine.layout.protocol, engine.layout.lengths, searches=searches)
    engine = replace(engine, layout=layout)
    corpus = RetrievalSettings(corpus=str(shipped("data", "world", "corpus.jsonl")), encoder="hashing")
    retrieve = build_retriever(Setup(corpus, []))
    score = learner.reference_logprobs
    seconds: dict[str, float] = {}

    def timed_scoring(batch: Batch) -> Tensor:
        start = time.perf_counter()
        logprobs = score(batch)
        seconds["scoring"] = time.perf_counter() - start
        return logprobs

    learner.reference_logprobs = timed_scoring

    def work(count: int = episodes) -> dict[str, float]:
        questions = [Question("1", "b", ("x",))] * count
        seeds = list(map(str, range(count)))
        start = time.perf_counter()
        sampled = engine.run(questions, seeds, retrieve)
        seconds["rollout"] = time.perf_counter() - start
        check_lengths(sampled, (searches + 1) * new)
        rollouts = []
        for i, sequence in enumerate(sampled):
            reward = float(i % 2)
            rollouts.append(Rollout(sequence, [(sequence.step_ends[-1], reward)], 0))
        learner.learn(Batch.of(rollouts), seed="0")
        seconds["update"] = time.perf_counter() - start - seconds["rollout"] - seconds["scoring"]
        return seconds

    return work


def encoding(folder: str, corpus: str, device: str) -> Contest:
    """Returns a contest that encodes the first PASSAGES passages of a corpus in fp32.

    The contestants are r3lite's encoder and sentence-transformers; their vectors must agree within TOLERANCE.
    """
    from r3lite.models.weights import resolve_folder
    from r3lite.retrieval.conventions import passage_text, style_of
    from r3lite.retrieval.corpus import read_corpus
    from r3lite.retrieval.encoder import BertEncoder

    documents = read_corpus(corpus)[:PASSAGES]
    encoder = BertEncoder(folder, style_of(folder), device)
    texts = [encoder.prefixes[1] + passage_text(document) for document in documents]
    theirs = peers.encode(str(resolve_folder(folder)), texts, encoder.settings["max_length"], device)
    ours = partial(encoder.encode_passages, documents, lambda n: None)
    assert abs(ours() - theirs()).max() < TOLERANCE, "the two encoders differ"
    tokens = sum(len(encoded.ids) for encoded in encoder.tokenizer.encode_batch(texts))
    facts = {"corpus": "/".join(Path(corpus).absolute().parts[-2:]), "mean_tokens": round(tokens / len(documents), 1)}
    work = {OURS: ours, "sentence-transformers": theirs}
    return Contest(f"encoding, {len(documents)} passages", tokens, work, facts=facts)
