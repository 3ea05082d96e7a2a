"""Makes `checkpoints/tiny`: a small Qwen2 base, trained from scratch on invented encyclopedias.

    python checkpoints/make_tiny.py --seed 0

Owns the tokenizer's and the network's training, the measurement on held-out worlds and the files written; the text is
`tiny_text.py`'s. The weights saved along the way are those of the moment: a run cut short leaves a usable checkpoint.
"""

import argparse
import json
import pathlib
import random
import re
import sys
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # runs from a checkout without an install
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "data"))
from make_world import World
from tiny_text import END, PHRASES, SAID, SIZES, SPECIAL, STOP, chain_between, lesson, planning, sample

from r3lite.models.causal_lm import CausalLM, ModelConfig

CHAT = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(rng: random.Random, size: int) -> Tokenizer:
    """Byte-level BPE cut like Qwen2.5's; the special tokens are the last ids."""
    texts = ["".join(text for text, _ in sample(rng, 1.0)) for _ in range(4000)]
    texts = [re.sub(r"<\|\w+\|>", "\n", text) for text in texts] + [phrase + "\n" for phrase in PHRASES] * 200
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL), show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    assert tokenizer.get_vocab_size() == size
    return tokenizer


def encode(tokenizer: Tokenizer, parts: list[tuple[str, float]]) -> tuple[list[int], list[float]]:
    """Token ids and the loss weight of each; a token belongs to the part where it ends."""
    ends, position = [], 0
    for text, weight in parts:
        position += len(text)
        ends.append((position, weight))
    encoding, weights, part = tokenizer.encode("".join(text for text, _ in parts)), [], 0
    for _, end in encoding.offsets:
        while ends[part][0] < end:
            part += 1
        weights.append(ends[part][1])
    return encoding.ids, weights


def collate(rows: list[tuple[list[int], list[float]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, T] padded on the right, and weights [B, T] that are 0 there.

    T - 1 is a multiple of 32: bf16 attention on a CPU took 1.4 times as long at odd lengths.
    """
    width = (max(len(ids) for ids, _ in rows) + 30) // 32 * 32 + 1
    return (
        torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows]),
        torch.tensor([weights + [0.0] * (width - len(weights)) for _, weights in rows]),
    )


def batches(rng: random.Random, tokenizer: Tokenizer, total: int, budget: int):
    """Batches of about `budget` tokens until `total` tokens are used: fresh samples, sorted by length in pools."""
    used = 0
    while used < total:
        pool = sorted((encode(tokenizer, sample(rng, used / total)) for _ in range(384)), key=lambda row: len(row[0]))
        groups, group = [], []
        for row in pool:
            if group and len(row[0]) * (len(group) + 1) > budget:
                groups.append(group)
                group = []
            group.append(row)
        rng.shuffle(groups)
        for group in groups:
            used += sum(len(ids) for ids, _ in group)
            yield collate(group), used


def logits_and_targets(model: CausalLM, ids: torch.Tensor, weights: torch.Tensor):
    """Logits [N, V], target ids [N] and weights [N] of the tokens that have a weight."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(ids[:, :-1])
        keep = weights[:, 1:] > 0
        return F.linear(hidden[keep], model.head_weight).float(), ids[:, 1:][keep], weights[:, 1:][keep]


def initialize(model: CausalLM, generator: torch.Generator) -> None:
    """Normal weights, small where a branch joins the residual stream; and a pair of heads that starts out copying.

    Copying a name takes two heads that only pay together: one that carries what stood before a token, and one that
    looks for the current token among what was carried and takes what came next (arXiv 2209.11895). Random weights had
    not found the pair after 4 M tokens. So the pair is laid out here, roughly; all of it stays trainable.
    A key with a constant bias, at distance d from a query turned by n positions, scores sum_i c^2 cos(w_i (d - n)) with
    the rotary frequencies w_i: greatest at d = n, whatever the tokens are.
    """
    c = model.config
    for name, p in model.named_parameters():
        if p.dim() == 2:
            joins = name.endswith(("o_proj.weight", "down_proj.weight"))  # else noise drowns the embeddings' 0.05
            scale = 0.05 if "embed" in name else (0.02 if joins else 1.0) * p.shape[1] ** -0.5
            p.data.normal_(0, scale, generator=generator)
        elif name.endswith("bias"):
            p.data.zero_()
    D, half = c.head_dim, c.head_dim // 2
    basis = torch.linalg.qr(torch.randn(c.hidden_size, c.hidden_size, generator=generator)).Q
    token, carried = basis[:D], basis[D : 2 * D]  # [D, C]: what is read of a token, and where the one before is written
    frequencies = c.rope_theta ** (-torch.arange(half) / half)
    previous, lookup = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    previous.q_proj.weight.data[:D] *= 0.1
    previous.k_proj.weight.data[:D] *= 0.1
    previous.q_proj.bias.data[:D] = 4 * torch.cat((frequencies.cos(), -frequencies.sin()))
    previous.k_proj.bias.data[:half] = 4.0
    previous.v_proj.weight.data[:D] = token
    previous.o_proj.weight.data[:, :D] = 0.1 * carried.T
    far = (frequencies < 0.003).repeat(2)[:, None]  # only slow pairs can match a token hundreds of positions away
    lookup.q_proj.weight.data[:D] = 4 * token * far
    lookup.k_proj.weight.data[:D] = carried * far
    lookup.v_proj.weight.data[:D] = token
    lookup.o_proj.weight.data[:, :D] = 0.2 * token.T


def train(model: CausalLM, tokenizer: Tokenizer, options: argparse.Namespace, save) -> None:
    """Muon on the layers' matrices, AdamW on the rest; warm-up, constant, linear decay over the last 70 % of tokens.

    At 3 M tokens AdamW alone copied 28 % of the words that Muon copied 69 % of (second halves of names in a question).
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
    other_parameters = [p for name, p in named if p.dim() != 2 or "embed" in name]
    rates = (options.learning_rate * 2.5, options.learning_rate)
    optimizers = (
        torch.optim.Muon(matrices, lr=rates[0], weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(other_parameters, lr=rates[1], betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    )
    start, rng, mean, step = time.time(), random.Random(f"{options.seed}-pretraining"), None, 0
    for (ids, weights), used in batches(rng, tokenizer, options.tokens, options.batch_tokens):
        share = min(1.0, (step + 1) / 100, max(0.02, (1 - used / options.tokens) / 0.7))
        for optimizer, rate in zip(optimizers, rates):
            optimizer.param_groups[0]["lr"] = rate * share
        logits, targets, w = logits_and_targets(model, ids, weights)
        loss = (F.cross_entropy(logits, targets, reduction="none") * w).sum() / w.sum()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        step += 1
        if step % options.report_every == 0:
            figures = " ".join(f"{k} {v:.2f}" for k, v in measure(model, tokenizer, options.seed, 64).items())
            seconds = time.time() - start
            print(
                f"step {step}  {used / 1e6:.2f} M tokens  {seconds / 60:.1f} min  {used / seconds:.0f} tokens/s  "
                f"loss {mean:.3f}  {figures}",
                flush=True,
            )
            save()


@torch.no_grad()
def measure(model: CausalLM, tokenizer: Tokenizer, seed: int, count: int) -> dict[str, float]:
    """Exact match of whole answers on worlds kept from training, by layout: what greedy decoding would write."""
    tasks = {"copy_1": lambda w, r: lesson(w, r, 1), "copy_3": lambda w, r: lesson(w, r, 3)}
    for hops in (2, 3, 4):
        tasks[f"plan_{hops}"] = lambda w, r, n=hops: planning(w, r, w.chain(n))
        tasks[f"chain_{hops}"] = lambda w, r, n=hops: chain_between(w, r, w.chain(n), 2)
    tasks["comparison"] = lambda w, r: chain_between(w, r, w.comparison(), 2)
    figures = {}
    for name, make in tasks.items():
        rng, right, total = random.Random(f"{seed}-held-out-{name}"), 0, 0
        for _ in range(count // 16):
            rows = [encode(tokenizer, make(World(rng, "dev", SIZES), rng)) for _ in range(16)]
            ids, weights = collate(rows)
            with torch.autocast("cpu", torch.bfloat16):
                guess = F.linear(model(ids[:, :-1]), model.head_weight).argmax(-1)
            wrong = (guess != ids[:, 1:]) & (weights[:, 1:] == SAID)
            if name.startswith("copy"):  # every answer by itself: spans are separated by tokens without a full weight
                is_said = weights[:, 1:] == SAID
                span = (is_said & ~F.pad(is_said, (1, 0))[:, :-1]).cumsum(1)
                spans, failed = int(span.max(1).values.sum()), 0
                for row in range(len(rows)):
                    failed += span[row][wrong[row]].unique().numel()
                right, total = right + spans - failed, total + spans
            else:
                right, total = right + int((~wrong.any(1)).sum()), total + len(rows)
        figures[name] = right / total
    return figures


def write_checkpoint(folder: pathlib.Path, model: CausalLM, tokenizer: Tokenizer) -> None:
    """The files of a published Qwen2 checkpoint, weights in fp16; a reader never meets half a weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    c, ids = model.config, {token: tokenizer.token_to_id(token) for token in SPECIAL}
    config = dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        vocab_size=c.vocab_size,
        hidden_act="silu",
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_theta,
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        use_sliding_window=False,
        sliding_window=c.max_position_embeddings,
        max_window_layers=c.num_hidden_layers,
        bos_token_id=ids[END],
        eos_token_id=ids[STOP],
        torch_dtype="float16",
        use_cache=True,
    )
    generation = dict(bos_token_id=ids[END], eos_token_id=[ids[STOP], ids[END]], pad_token_id=ids[END], do_sample=False)
    added = {
        str(i): dict(content=token, lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
        for token, i in ids.items()
    }
    tokenizer_config = dict(
        tokenizer_class="Qwen2Tokenizer",
        bos_token=None,
        eos_token=STOP,
        pad_token=END,
        unk_token=None,
        add_prefix_space=False,
        clean_up_tokenization_spaces=False,
        model_max_length=c.max_position_embeddings,
        added_tokens_decoder=added,
        chat_template=CHAT,
    )
    for name, content in (
        ("config", config),
        ("generation_config", generation),
        ("tokenizer_config", tokenizer_config),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()}
    temporary = folder / "model.safetensors.part"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)  # safetensors makes files that only their owner may read
    temporary.replace(folder / "model.safetensors")


README = """# The tiny checkpoint

A base model of the Qwen2 architecture with {parameters:.2f} M parameters and a tokenizer of {vocabulary} tokens, made
from scratch on synthetic text by

    python checkpoints/make_tiny.py --seed {seed}

in {minutes:.0f} minutes on one CPU core that was shared with other work ({tokens:.0f} M tokens, bf16 autocast). It
knows the invented encyclopedias of `data/make_world.py`: reading articles, answering questions about them, taking a
nested question apart, and saying hop chains in plain sentences, also across several turns with articles in between. It
has never seen the step format that r3lite trains, only the single words of its headings (`checkpoints/tiny_text.py` is
all it read).
One pair of attention heads starts from a layout that copies instead of from noise (`initialize` in `make_tiny.py`).

Measured by the same command on worlds whose names it never saw (the share of whole answers, or of whole plain chains,
that greedy decoding gets right; 512 samples each, three articles a hop):

| what | right |
|---|---|
{table}

The base is a toy: it shows on a CPU, in minutes, what training changes. MIT licence, like the rest of the repository.
"""
LABELS = {
    "copy_1": "one fact, one article",
    "copy_3": "one fact, three articles",
    "comparison": "yes/no comparison, in turns",
    **{f"plan_{n}": f"taking a question of {n} hops apart" for n in (2, 3, 4)},
    **{f"chain_{n}": f"chain of {n} hops, in turns" for n in (2, 3, 4)},
}


def write_readme(
    folder: pathlib.Path, model: CausalLM, seed: int, tokens: float, minutes: float, figures: dict
) -> None:
    text = README.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        vocabulary=model.config.vocab_size,
        seed=seed,
        minutes=minutes,
        tokens=tokens / 1e6,
        table="\n".join(f"| {LABELS[k]} | {v:.2f} |" for k, v in figures.items()),
    )
    (folder / "README.md").write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny base from scratch on invented encyclopedias.")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=float, default=10e6, help="tokens to train on")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--report-every", type=int, default=150, help="steps between measurements, each also saved")
    parser.add_argument("--threads", type=int, default=1)
    sizes = "hidden size, MLP size, layers, heads, key/value heads"
    parser.add_argument("--size", type=int, nargs=5, default=(256, 512, 4, 4, 2), help=sizes)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = time.time()
    tokenizer = train_tokenizer(random.Random(f"{options.seed}-tokenizer"), 1024)
    model = CausalLM(ModelConfig(1024, *options.size, rope_theta=1e6, max_position_embeddings=4096))
    initialize(model, torch.Generator().manual_seed(options.seed))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    train(model, tokenizer, options, lambda: write_checkpoint(options.output, model, tokenizer))
    write_checkpoint(options.output, model, tokenizer)
    figures = measure(model, tokenizer, options.seed + 1, 512)
    minutes = (time.time() - start) / 60
    write_readme(options.output, model, options.seed, options.tokens, minutes, figures)
    print(json.dumps({"minutes": round(minutes, 1), **{k: round(v, 3) for k, v in figures.items()}}))


if __name__ == "__main__":
    main()
