"""GRPO with retrieval in the loop, in one file: a tiny model learns to answer multi-hop questions of an invented world.

    python -m r3lite.quickstart --output runs/quickstart  # makes the adapter to start from: runs/quickstart/sft
    python examples/grpo_in_one_file.py runs/quickstart/sft runs/grpo-in-one-file

The network, its KV cache, its adapters and the tokenizer come from r3lite. All other code of the training is here. The
settings are those of `python -m r3lite.ppo --preset tiny --algorithm grpo`; README.md shows how to compare the two.
"""

import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from r3lite.core.answer_match import exact_match, f1
from r3lite.models import lora
from r3lite.models.causal_lm import CausalLM
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.packing import states_before
from r3lite.models.weights import fingerprint, load_model, resolve_folder
from r3lite.protocols.tokenizer import Tokenizer

WORLD = Path(__file__).parent.parent / "data" / "world"
QUESTIONS_PER_ROUND = 8
GROUP_SIZE = 8  # episodes of one question, which are compared with each other
GROUPS_PER_STEP = 4  # groups in one optimizer step
EPOCHS = 2  # passes over the episodes of a round
LEARNING_RATE = 3e-4  # in the first round; it falls along a cosine
FINAL_SHARE = 0.3  # share of LEARNING_RATE to which it falls
CLIP = 0.2  # the loss clips ratios of new to old probabilities to [1 - CLIP, 1 + CLIP]
NEGATIVE_SCALE = 0.2  # factor of negative advantages: at full weight they would destroy the abilities of a small model
TOP_K = 3  # passages for each query
MAX_SEARCHES = 5  # a search after these ends the episode without an answer
MAX_TURN_TOKENS = 96
ACTION = re.compile(r"^The (retrieval query|final answer): (.+)$", re.MULTILINE)  # each step must have exactly one


class Retriever:
    """Finds the passages whose TF-IDF vectors have the largest cosine with that of a query."""

    def __init__(self, passages: list[str]):
        self.passages = passages
        document_counts = Counter(word for passage in passages for word in set(re.findall(r"\w+", passage.lower())))
        self.columns = {word: column for column, word in enumerate(document_counts)}
        self.idf = torch.log((1 + len(passages)) / (1 + torch.tensor(list(document_counts.values())))) + 1
        self.vectors = torch.stack([self.vector(passage) for passage in passages])

    def vector(self, text: str) -> Tensor:
        columns = [self.columns[word] for word in re.findall(r"\w+", text.lower()) if word in self.columns]
        frequencies = torch.bincount(torch.tensor(columns, dtype=torch.long), minlength=len(self.columns))
        return torch.nn.functional.normalize(frequencies * self.idf, dim=0)

    def search(self, query: str) -> list[str]:
        return [self.passages[index] for index in (self.vectors @ self.vector(query)).topk(TOP_K).indices]


@dataclass
class Episode:
    """One attempt at a question: a growing sequence of tokens, of which the model writes some."""

    question: dict
    tokens: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)  # True for tokens of the model: only they are in the loss
    queries: list[str] = field(default_factory=list)
    answer: str = ""
    steps: int = 0
    well_formed_steps: int = 0
    is_over: bool = False

    def add(self, tokens: list[int], is_action: bool) -> None:
        self.tokens += tokens
        self.is_action += [is_action] * len(tokens)


def sample_episodes(model: CausalLM, tokenizer: Tokenizer, retriever: Retriever, batch: list[dict]) -> list[Episode]:
    """Samples an episode of each question in a batch. After each search, the model reads the passages and goes on."""
    episodes = [Episode(question) for question in batch]
    for episode in episodes:
        episode.add(tokenizer.open_chat(f"The question: {episode.question['question']}"), is_action=False)
    running = episodes
    while running:
        turns = sample_turns(model, tokenizer, [episode.tokens for episode in running])
        for episode, turn in zip(running, turns):
            episode.add(turn, is_action=True)
            episode.is_over = close_turn(episode, turn, tokenizer, retriever=retriever)
        running = [episode for episode in running if not episode.is_over]
    return episodes


@torch.no_grad()
def sample_turns(model: CausalLM, tokenizer: Tokenizer, rows: list[list[int]]) -> list[list[int]]:
    """Samples a turn of the model after each row of tokens: up to its stop token, but at most MAX_TURN_TOKENS."""
    cache = KVCache.of(model, len(rows))
    prefill = Prefill(cache, [(index, row[:-1]) for index, row in enumerate(rows)])
    model(prefill.tokens, prefill)
    tokens = torch.tensor([[row[-1]] for row in rows])  # [B, 1]
    turns: list[list[int]] = [[] for _ in rows]
    for _ in range(MAX_TURN_TOKENS):
        hidden = model(tokens, cache.decode(len(rows)))  # [B, 1, C]
        tokens = torch.multinomial(model.logits(hidden[:, 0]).softmax(-1), num_samples=1)
        for turn, token in zip(turns, tokens[:, 0].tolist()):
            if turn[-1:] != [tokenizer.stop_id]:
                turn.append(token)
        if all(turn[-1] == tokenizer.stop_id for turn in turns):
            break
    return turns


def close_turn(episode: Episode, turn: list[int], tokenizer: Tokenizer, retriever: Retriever) -> bool:
    """Reads the step in a turn and adds its query's passages to the episode; returns whether the episode is over."""
    text = tokenizer.decode(turn)
    actions = ACTION.findall(text)
    episode.steps += 1
    if len(actions) != 1 or turn[-1] != tokenizer.stop_id:
        return True
    kind, content = actions[0]
    begins_well = text.startswith(f"Step {episode.steps}:\nThe problem analysis: ")
    episode.well_formed_steps += begins_well and content not in episode.queries
    if kind == "final answer":
        episode.answer = content
        return True
    episode.queries.append(content)
    passages = [f"[{rank}] {passage}" for rank, passage in enumerate(retriever.search(content), start=1)]
    observation = "\n".join(["The retrieval documents:", *passages, f"Step {episode.steps + 1}"])
    episode.add(tokenizer.user_turn(observation), is_action=False)
    return len(episode.queries) > MAX_SEARCHES


def reward(episode: Episode) -> float:
    """Returns the reward: 1 for an exact match, plus 0.2 times F1, plus 0.5 times the share of well-formed steps."""
    answers = [episode.question["answer"], *episode.question["answer_aliases"]]
    form = episode.well_formed_steps / episode.steps
    return exact_match(episode.answer, answers) + 0.2 * f1(episode.answer, answers) + 0.5 * form


def action_logprobs(model: CausalLM, group: list[Episode]) -> Tensor:
    """Returns the log-probabilities [N] of all tokens that the model wrote, one episode after the other."""
    rows = [episode.tokens for episode in group]
    hidden, actions = states_before(model, rows, [episode.is_action for episode in group])
    return model.logits(hidden).log_softmax(-1).gather(-1, actions[:, None])[:, 0]


def grpo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, lengths: Tensor) -> Tensor:
    """Returns GRPO's loss (arXiv 2402.03300): the mean over each episode's tokens, then over the group's episodes."""
    ratios = (logprobs - old_logprobs).exp()  # [N], one for each token that the model wrote
    token_advantages = advantages.repeat_interleave(lengths)  # from one per episode [G] to one per token [N]
    gains = torch.minimum(ratios * token_advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * token_advantages)
    return -(gains / lengths.repeat_interleave(lengths)).sum() / len(lengths)


def update(model: CausalLM, optimizer: torch.optim.Optimizer, groups: list[list[Episode]]) -> None:
    """Trains on the groups of a round. Advantages are relative to the group's mean reward, so no critic is needed."""
    batches = []
    for group in groups:
        old_logprobs = action_logprobs(model, group).detach()
        rewards = torch.tensor([reward(episode) for episode in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # 1e-4: else equal rewards give 0 / 0
        advantages = torch.where(advantages < 0, NEGATIVE_SCALE * advantages, advantages)
        lengths = torch.tensor([sum(episode.is_action) for episode in group])
        batches.append((group, old_logprobs, advantages, lengths))
    for _ in range(EPOCHS):
        for indices in torch.randperm(len(batches)).split(GROUPS_PER_STEP):
            for group, old_logprobs, advantages, lengths in [batches[index] for index in indices]:
                loss = grpo_loss(action_logprobs(model, group), old_logprobs, advantages=advantages, lengths=lengths)
                (loss / GROUPS_PER_STEP).backward()
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()


def train(adapter: str, output: str, rounds: int = 24, seed: int = 0) -> None:
    """Trains the adapter in the folder `adapter`, prints each round's mean reward, and writes to `output`/adapter."""
    torch.manual_seed(seed)
    questions = [json.loads(line) for line in (WORLD / "train.jsonl").read_text().splitlines()]
    articles = [json.loads(line) for line in (WORLD / "corpus.jsonl").read_text().splitlines()]
    retriever = Retriever([f"{article['title']}: {article['text']}" for article in articles])
    folder = resolve_folder("tiny")
    tokenizer = Tokenizer.load(folder)
    model = load_model(folder, torch.float32, "cpu")
    lora.load_adapter(model, "policy", adapter, trainable=True)
    lora.set_adapter(model, "policy")
    optimizer = torch.optim.AdamW(lora.adapter_parameters(model, "policy").values(), weight_decay=0.0)
    for round_index in range(rounds):
        indices = torch.randint(len(questions), (QUESTIONS_PER_ROUND,)).repeat_interleave(GROUP_SIZE)
        episodes = sample_episodes(model, tokenizer, retriever, batch=[questions[index] for index in indices])
        print(f"round {round_index + 1}: mean reward {sum(map(reward, episodes)) / len(episodes):.3f}", flush=True)
        cosine = 0.5 * (1 + math.cos(math.pi * round_index / rounds))  # falls from 1 towards 0
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
        update(model, optimizer, [episodes[i : i + GROUP_SIZE] for i in range(0, len(episodes), GROUP_SIZE)])
    lora.save_adapter(model, "policy", Path(output) / "adapter", base_model="tiny", fingerprint=fingerprint(folder))


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], rounds=int(sys.argv[3]) if len(sys.argv) > 3 else 24)
