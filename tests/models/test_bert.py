"""BERT against transformers, and what its loader accepts and refuses."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3lite.core.errors import R3LiteError
from r3lite.models.bert import load_bert, load_bert_scorer
from tests.errors import raises


@pytest.fixture
def folder(tmp_path):
    """A small BERT with every weight random, as transformers writes it: with its pooler."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = BertModel(BertConfig(**sizes, intermediate_size=80, max_position_embeddings=40)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.3)
    model.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, change):
    path = folder / "model.safetensors"
    save_file({k: v.clone() for k, v in change(load_file(path)).items()}, path, {"format": "pt"})


@torch.no_grad()
def test_hidden_states_equal_those_of_transformers_with_padding(folder):
    from transformers import BertModel

    ids = torch.randint(1, 100, (3, 17), generator=torch.Generator().manual_seed(1))
    real = torch.arange(17) < torch.tensor([17, 5, 1])[:, None]
    theirs = BertModel.from_pretrained(folder).eval()(ids, attention_mask=real.long()).last_hidden_state
    ours = load_bert(folder)
    assert (ours(ids, real) - theirs)[real].abs().max() < 1e-5
    # Padding changes nothing: a row alone, without a mask, is the row in the batch.
    assert (ours(ids[1:2, :5]) - ours(ids, real)[1:2, :5]).abs().max() < 1e-5


@pytest.mark.parametrize("padding", [1, 4])
@torch.no_grad()
def test_roberta_counts_positions_from_the_place_after_padding(tmp_path, padding):
    from transformers import RobertaConfig, RobertaModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = RobertaConfig(**sizes, intermediate_size=80, max_position_embeddings=40, pad_token_id=padding)
    theirs = RobertaModel(config).eval()
    theirs.save_pretrained(tmp_path)
    change_weights(tmp_path, lambda tensors: {f"roberta.{k}": v for k, v in tensors.items()})
    ids = torch.randint(10, 100, (2, 39 - padding))  # as many as there are positions
    ids[1, 20:] = padding
    real = ids != padding
    ours = load_bert(tmp_path)(ids, real)
    expected = theirs(ids, real.long()).last_hidden_state
    assert (ours - expected)[real].abs().max() < 1e-5
    with raises(R3LiteError, "bert-unsupported", "model_type", "roberta", "bert"):
        load_bert_scorer(tmp_path)


@torch.no_grad()
def test_other_spellings_of_checkpoints(folder):
    """Names with the prefix `bert.`, norms named gamma and beta, position numbers and pretraining heads."""
    ids = torch.arange(1, 9)[None]
    expected = load_bert(folder)(ids)

    def respell(tensors):
        def name(key):
            key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            return f"bert.{key}"

        extra = {"bert.embeddings.position_ids": torch.arange(40)[None], "cls.predictions.bias": torch.zeros(100)}
        return {name(k): v for k, v in tensors.items()} | extra

    change_weights(folder, respell)
    assert torch.equal(load_bert(folder)(ids), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "modernbert"}, "model_type is 'modernbert'; only 'bert' and 'roberta' and 'xlm-roberta'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"hidden_size": 47}, "not a multiple"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers is 10000000"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"max_position_embeddings": 2}, "max_position_embeddings is 2"),
        ({"layer_norm_eps": "1e-12"}, "layer_norm_eps is '1e-12'"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ({"model_type": ["bert"]}, r"model_type is \['bert'\]"),
        ({"hidden_act": {}}, r"hidden_act is \{\}"),
    ],
)
def test_unsupported_configs_are_refused(folder, changes, words):
    change_config(folder, **changes)
    with pytest.raises(R3LiteError, match=words):
        load_bert(folder)


def test_weights_that_do_not_fit_are_refused_by_name(folder):
    name = "encoder.layer.1.output.dense.weight"
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}  # not the file's memory
    for changed, words in (
        ({k: v for k, v in tensors.items() if k != name}, f"{name} is missing"),
        (tensors | {"encoder.layer.3.output.dense.bias": torch.zeros(48)}, "layer.3.output.dense.bias is unexpected"),
        (tensors | {name: torch.zeros(2, 2)}, rf"{name} has shape \[2, 2\]"),
        (tensors | {name: torch.zeros(48, 80, dtype=torch.int64)}, rf"{name} is of type torch\.int64"),
    ):
        change_weights(folder, lambda _, changed=changed: changed)
        with pytest.raises(R3LiteError, match=words):
            load_bert(folder)
    (folder / "model.safetensors").write_bytes(b"cut off")
    with raises(R3LiteError, "tensors-unreadable"):
        load_bert(folder)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with raises(R3LiteError, "not-a-file", "pipe"):
        load_bert(folder)
    (folder / "model.safetensors").unlink()
    with raises(R3LiteError, "weights-absent"):
        load_bert(folder)


def test_nothing_can_be_trained_and_weights_outlive_their_file(folder):
    model = load_bert(folder)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    size = (folder / "model.safetensors").stat().st_size
    (folder / "model.safetensors").write_bytes(bytes(size))
    assert not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


@pytest.fixture
def scorer_folder(tmp_path):
    """A small cross-encoder with every weight random, as transformers writes it."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_labels": 1}
    model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=80, max_position_embeddings=40)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.3)
    model.save_pretrained(tmp_path / "scorer")
    return tmp_path / "scorer"


@torch.no_grad()
def test_logits_of_pairs_equal_those_of_transformers_with_padding(scorer_folder):
    from transformers import BertForSequenceClassification

    ids = torch.randint(1, 100, (3, 17), generator=torch.Generator().manual_seed(1))
    real = torch.arange(17) < torch.tensor([17, 9, 4])[:, None]
    segments = ((torch.arange(17) >= torch.tensor([6, 3, 2])[:, None]) & real).long()
    theirs = BertForSequenceClassification.from_pretrained(scorer_folder).eval()
    expected = theirs(ids, attention_mask=real.long(), token_type_ids=segments).logits[:, 0]
    ours = load_bert_scorer(scorer_folder)
    assert (ours(ids, real, segments) - expected).abs().max() < 1e-4
    assert (ours(ids, real, torch.zeros_like(segments)) - expected).abs().max() > 1e-2  # the second text is marked
    assert not any(p.requires_grad for p in ours.parameters())


def test_a_classifier_of_several_classes_or_none_is_no_scorer(scorer_folder, folder):
    with pytest.raises(R3LiteError, match=r"classifier\.weight is missing, and 1 more"):
        load_bert_scorer(folder)
    change_weights(scorer_folder, lambda t: t | {"classifier.weight": torch.zeros(2, 48)})
    with pytest.raises(R3LiteError, match=r"classifier\.weight has shape \[2, 48\], not \[1, 48\]"):
        load_bert_scorer(scorer_folder)
    with pytest.raises(R3LiteError, match=r"classifier\.\w+ is unexpected"):
        load_bert(scorer_folder)
