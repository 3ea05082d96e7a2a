"""Benches that sample episodes take the settings of `evaluate`, and sample the same with and without what they time."""

import json

import pytest
import torch

from bench import drafts, episodes, options, sharing
from r3lite.core.errors import UsageError
from tests.errors import raises

SHORT = ["--max-new-tokens", "12", "--max-hops", "1", "--questions", "2", "--pairs", "1"]


@pytest.mark.parametrize(
    ("bench", "flags", "less", "more"),
    [(drafts, ["--batches", "2", "--temperatures", "1"], None, "tokens_a_pass"),
     (sharing, ["--group", "2"], "decoded", "decoded_own_rows")],
    ids=["drafts", "sharing"],
)  # fmt: skip
def test_both_sides_of_a_bench_sample_the_same_episodes(tmp_path, bench, flags, less, more):
    """One of them with drafts that are accepted, or with fewer rows."""
    bench.main([*SHORT, *flags, "--results", str(tmp_path), "--note", "a test"])
    [path] = tmp_path.glob("*.json")
    [run] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    [record] = run["records"]
    assert record["model"] == "tiny" and run["precision"] == "fp32"
    assert record["equal_episodes"] == record["episodes"] >= 2
    assert record[more] > (record[less] if less else 1)


def test_other_flags_are_settings_of_evaluate(tmp_path):
    data = tmp_path / "own.jsonl"
    rows = [{"id": f"{i}", "question": f"Who wrote {i}?", "answers": ["Ada"]} for i in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    arguments = ["--preset", "hotpotqa", "--data", str(data), "--dtype", "bf16", "--pairs", "2", "--model-name", "A"]
    flags, config = episodes.parse(episodes.parser(None), "test.jsonl", arguments)
    assert (flags.pairs, flags.model_name, config.lengths.max_hops) == (2, "A", 4)
    assert config.retrieval.corpus is None
    assert options.precision(config.model).dtype == torch.bfloat16

    flags, config = episodes.parse(episodes.parser(None), "test.jsonl", [])
    assert (flags.model_name, config.retrieval.corpus.endswith("corpus.jsonl")) == ("tiny", True)


def test_a_flag_that_neither_has_is_refused():
    with raises(UsageError, "unknown-argument", "--qestions"):
        episodes.parse(episodes.parser(None), "test.jsonl", ["--qestions", "2"])


def test_drafts_of_no_tokens_are_refused(capsys):
    with pytest.raises(SystemExit):
        drafts.main(["--draft-tokens", "0"])
    assert "--draft-tokens 0 leaves nothing to compare" in capsys.readouterr().err
