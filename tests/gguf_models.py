"""Small models of each family with a byte-level tokenizer, as folders and as the GGUF files exported of them."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

from r3lite.models.config_file import read_config
from r3lite.models.gguf_tokenizer import SPLITS
from r3lite.models.weights import load_model
from r3lite.protocols.tokenizer import Tokenizer as ChatTokenizer

SIZES = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
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


def write_tokenizer(folder: Path, split: str = "qwen2", first: bool = False, bos: bool = False) -> None:
    """A BPE tokenizer of 390 tokens that splits texts as llama.cpp's `split`; the special tokens are the first or last.

    Its parts are published ones' as transformers writes them.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
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
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    from tokenizers.pre_tokenizers import ByteLevel

    trainer = trainers.BpeTrainer(
        vocab_size=390 if first else 387,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=special if first else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if bos:
        id = tokenizer.token_to_id(special[0])
        tokenizer.post_processor = processors.TemplateProcessing(f"{special[0]} $A", None, [(special[0], id)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": special[2], "pad_token": special[0], "chat_template": TEMPLATE}
    settings |= {"bos_token": special[0]} if bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_model(folder: Path, kind: str, split: str | None = None, **changes) -> Path:
    """A model of random weights by transformers, with a tokenizer."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**SIZES, **KINDS[kind], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():  # norms and biases begin as ones and zeros
        parameter.data.add_((0.3 if parameter.dim() == 1 else 0.05) * torch.randn_like(parameter))
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
