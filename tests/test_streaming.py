"""Commands with --stream-layers: what the model computes is what it computes without, to the bit."""

import pytest
import torch

from r3lite import ask, evaluate
from r3lite.models.streaming import LayerStream
from r3lite.rollout.engine import Engine

SHORT = ["--max-new-tokens", "12", "--retriever", "none"]


def run_evaluate(toy, output) -> int:
    return evaluate.main([*toy, *SHORT, "--output", str(output)])


def run_ask(toy, output) -> int:
    dropped_flags = ("--data", "--output", "--encoder", "--top-k", "--max-new-tokens")
    places = [i for i, word in enumerate(toy) if word in dropped_flags]
    flags = [word for i, word in enumerate(toy) if i not in places and i - 1 not in places]
    return ask.main([*flags, *SHORT, "--question", "Where does Ada live?"])


@pytest.mark.parametrize("command", [run_evaluate, run_ask])
def test_answers_are_the_same(toy, small_model, write_folder, tmp_path, monkeypatch, capsys, command):
    """Of a first start, which quantizes the weights, and of one that reads them from the cache."""
    write_folder(small_model(vocab_size=272, hidden_size=128, intermediate_size=192), tmp_path / "model")
    logits, copies, sample, copy = [], [], Engine._sample, LayerStream._copy
    monkeypatch.setattr(Engine, "_sample", lambda *args: logits.append(args[1].clone()) or sample(*args))
    monkeypatch.setattr(LayerStream, "_copy", lambda *args: copies.append(args[1]) or copy(*args))
    cache = ["--nf4-cache", str(tmp_path / "cache")]
    runs, outputs, copied = [], [], []
    for name, flags in enumerate((["--stream-layers"], ["--quantize", "nf4"], ["--stream-layers"])):
        logits.clear(), copies.clear(), capsys.readouterr()
        assert command([*toy, *cache, *flags], tmp_path / str(name)) == 0
        runs.append(list(logits)), copied.append(len(copies)), outputs.append(capsys.readouterr().out)
    assert copied[0] == copied[2] > 12 and not copied[1] and len(list((tmp_path / "cache").iterdir())) == 1
    for run in runs[::2]:
        assert len(run) == len(runs[1]) >= 12
        assert all(torch.equal(streamed, resident) for streamed, resident in zip(run, runs[1], strict=True))
    if command is run_evaluate:
        outputs = [(tmp_path / str(name) / "predictions.jsonl").read_bytes() for name in range(3)]
    assert outputs[0] == outputs[1] == outputs[2] and outputs[0]
