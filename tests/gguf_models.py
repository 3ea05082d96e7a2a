"""Small models of each family with a tokenizer, as folders and as the GGUF files exported of them."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from r3lite.models.config_file import read_config
from r3lite.models.gguf_tokenizer import NORMALIZED, SPLITS
from r3lite.models.weights import load_model
from r3lite.protocols.tokenizer import Tokenizer as ChatTokenizer

SIZES = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 256, "sliding_window": 24,
          "vocab_size": 900}  # fmt: skip
KINDS = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 32},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 32, "tie_word_embeddings": False},
    "granite": {"model_type": "granite", "embedding_multiplier": 9.0, "attention_multiplier": 0.2,
                "residual_multiplier": 0.3, "logits_scaling": 7.0, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "pad_token_id": 0},
    "qwen35": {"model_type": "qwen3_5_text", "num_hidden_layers": 5, "full_attention_interval": 2, "head_dim": 32,
               "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
               "linear_value_head_dim": 16, "tie_word_embeddings": True},
    "gemma3": GEMMA3,
    "gemma3-linear": GEMMA3 | {"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}}},
}  # fmt: skip
TEXTS = [
    "Who directed Blue Harbor?",
    "x = 1\n\n  don't, I'LL 4234 ünïcødé 漢字 🙂\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "e\u0301 \t\t  a\u00a0b 3.14159 ½ 1234567",
]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GEMMA_ADDED = [*SPECIAL, "<unk>", "<think>", "\n\n"]
GEMMA_BYTES = slice(len(GEMMA_ADDED), len(GEMMA_ADDED) + 256)


def write_tokenizer(folder: Path, split: str = "qwen2", first: bool = False, bos: bool = False) -> None:
    """A BPE tokenizer that splits texts as llama.cpp's `split`, or as that of Gemma.

    A text begins with a token of its own if `bos`.
    """
    tokenizer = gemma_tokenizer() if split == "gemma" else byte_level_tokenizer(split, first)
    if bos:
        id = tokenizer.token_to_id(SPECIAL[0])
        tokenizer.post_processor = processors.TemplateProcessing(f"{SPECIAL[0]} $A", None, [(SPECIAL[0], id)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "chat_template": TEMPLATE}
    settings |= {"bos_token": SPECIAL[0]} if bos else {}
    settings |= {"unk_token": "<unk>"} if split == "gemma" else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def gemma_tokenizer() -> Tokenizer:
    """SentencePiece's BPE of at most 800 tokens. Its merges are those that transformers makes of scores."""
    from transformers.convert_slow_tokenizer import generate_merges

    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    trained.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    pieces = sorted(trained.get_vocab(), key=trained.token_to_id)
    first_tokens = [*GEMMA_ADDED, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*first_tokens, *(piece for piece in pieces if piece not in GEMMA_ADDED)]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, {piece: -float(id) for id, piece in enumerate(pieces)})
    bpe = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in GEMMA_ADDED[4:]])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in GEMMA_ADDED[:4]])
    return tokenizer


def byte_level_tokenizer(split: str, first: bool) -> Tokenizer:
    """390 tokens, of which the special ones are the first or last; its parts are as transformers writes them."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    kinds = {
        "Split": lambda value: {"type": "Split", "pattern": {"Regex": value}, "behavior": "Isolated", "invert": False},
        "Digits": lambda value: {"type": "Digits", "individual_digits": value},
        "ByteLevel": lambda value: {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                    "use_regex": value},
    }  # fmt: skip
    parts = [kinds[kind](value) for kind, value in SPLITS[split]]
    content = json.loads(tokenizer.to_str())
    content["pre_tokenizer"] = parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.ByteLevel()
    if split in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=390 if first else 387,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL if first else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def write_model(folder: Path, kind: str, split: str | None = None, **changes) -> Path:
    """A model of random weights by transformers, with a tokenizer."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**SIZES, **KINDS[kind], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():  # norms and biases begin as ones and zeros
        parameter.data.add_((0.3 if parameter.dim() == 1 else 0.05) * torch.randn_like(parameter))
        if parameter.dim() == 1:  # in bf16, as published: numbers to which 1 can be added without rounding
            parameter.data.copy_(parameter.bfloat16())
    if kind.startswith("gemma3"):  # whose tokens of single bytes write no UTF-8, which programs show in several ways
        model.get_input_embeddings().weight.data[GEMMA_BYTES] *= 0.1
    model.save_pretrained(folder)
    if split:
        write_tokenizer(folder, split)
    return folder


def write_gguf(source: Path, path: Path, weights: str = "fp32", tokenizer: ChatTokenizer | None = None) -> Path:
    from r3lite.exporting import gguf

    model = load_model(source, torch.float32, "cpu")
    assert model.config == read_config(source)
    gguf.write(model, source, tokenizer or ChatTokenizer.load(source), path, weights, "test")
    return path
