"""Commands with --stream-layers: what the model computes is what it computes without, to the bit."""

import pytest
import torch

from r3lite import ask, evaluate
from r3lite.models.streaming import LayerStream
from r3lite.rollout.engine import Engine

SHORT = ["--max-new-tokens", "12", "--retriever", "none"]


def evaluated(toy, output) -> int:
    return evaluate.main([*toy, *SHORT, "--output", str(output)])


def asked(toy, output) -> int:
    own = ("--data", "--output", "--encoder", "--top-k", "--max-new-tokens")
    places = [i for i, word in enumerate(toy) if word in own]
    kept = [word for i, word in enumerate(toy) if i not in places and i - 1 not in places]
    return ask.main([*kept, *SHORT, "--question", "Where does Ada live?"])


@pytest.mark.parametrize("command", [evaluated, asked])
def test_answers_are_the_same(toy, small_model, write_folder, tmp_path, monkeypatch, capsys, command):
    """Of a first start, which quantizes the weights, and of one that reads them from the cache."""
    write_folder(small_model(vocab_size=272, hidden_size=128, intermediate_size=192), tmp_path / "model")
    logits, copies, sample, copy = [], [], Engine._sample, LayerStream._copy
    monkeypatch.setattr(Engine, "_sample", lambda *given: logits.append(given[1].clone()) or sample(*given))
    monkeypatch.setattr(LayerStream, "_copy", lambda *given: copies.append(given[1]) or copy(*given))
    cache = ["--nf4-cache", str(tmp_path / "cache")]
    runs, shown, copied = [], [], []
    for name, flags in enumerate((["--stream-layers"], ["--quantize", "nf4"], ["--stream-layers"])):
        logits.clear(), copies.clear(), capsys.readouterr()
        assert command([*toy, *cache, *flags], tmp_path / str(name)) == 0
        runs.append(list(logits)), copied.append(len(copies)), shown.append(capsys.readouterr().out)
    assert copied[0] == copied[2] > 12 and not copied[1] and len(list((tmp_path / "cache").iterdir())) == 1
    for run in runs[::2]:
        assert len(run) == len(runs[1]) >= 12
        assert all(torch.equal(one, other) for one, other in zip(run, runs[1], strict=True))
    if command is evaluated:
        shown = [(tmp_path / str(name) / "predictions.jsonl").read_bytes() for name in range(3)]
    assert shown[0] == shown[1] == shown[2] and shown[0]
