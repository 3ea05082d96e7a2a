"""How much data a run has: counted where the files are here, and nothing is downloaded."""

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.core.invocation import with_values
from r3lite.datasets.summary import Summary, summary_of_rl, summary_of_sft
from r3lite.settings import PpoConfig, SftConfig


@pytest.mark.parametrize(
    ("summary", "config", "noun"), [(summary_of_sft, SftConfig(), "rows"), (summary_of_rl, PpoConfig(), "questions")]
)
def test_what_is_not_here_is_named_and_not_downloaded(summary, config, noun):
    assert summary(config) == Summary()
    for data in ("gone.jsonl", "hotpotqa,train", "some/name,subset,train"):
        text = f"{data} is not here yet: its {noun} are not counted"
        assert summary(with_values(config, {"data": data})) == Summary(text=text)
    assert summary(with_values(config, {"sources": ["gone.jsonl=2"]})).text.startswith("gone.jsonl is not here yet")


def test_questions_to_leave_out_are_not_downloaded(tmp_path):
    write_jsonl(tmp_path / "q.jsonl", [{"question": "Who?", "answer": "Ann"}])
    values = {"data": str(tmp_path / "q.jsonl"), "exclude": ["hotpotqa,validation"]}
    text = "hotpotqa,validation is not here yet: its questions are not counted"
    assert summary_of_rl(with_values(PpoConfig(), values)) == Summary(text=text)


def test_rows_that_cannot_be_read_are_told_before_the_run(tmp_path):
    write_jsonl(tmp_path / "q.jsonl", [{"question": "Who?", "answer": "Ann"}])
    data = {"data": str(tmp_path / "q.jsonl")}
    with pytest.raises(R3LiteError, match="line 1"):
        summary_of_sft(with_values(SftConfig(), data))
    assert summary_of_rl(with_values(PpoConfig(), data)).text == "1 questions; 200 rounds of 8"
