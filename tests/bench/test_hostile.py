"""The judges of generated inputs notice what they are there for, and the generators repeat themselves."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("hypothesis", reason="needs the extra test")
pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("resource", reason="memory is read as on Linux")

from bench.stress import generated, hostile_files, hostile_requests
from bench.stress.generated import Example, Outcome, examples, judge_within_limits, refusal
from bench.stress.hostile_messages import ToTrainer, flaws_of, sound_sequence
from r3lite.core.errors import R3LiteError
from r3lite.core.records import parse


@pytest.fixture(scope="module")
def to_trainer(tmp_path_factory):
    attack = ToTrainer(tmp_path_factory.mktemp("replies"))
    yield attack
    attack.close()


def test_messages_to_a_trainer_are_the_same_each_time_and_hold(to_trainer):
    drawn = examples(to_trainer.strategy, 20)
    assert drawn == examples(to_trainer.strategy, 20) and len({example.name for example in drawn}) == 20
    outcomes = [judge_within_limits(to_trainer.judge, example) for example in drawn]
    assert [outcome.problem for outcome in outcomes] == [""] * 20
    assert {outcome.way for outcome in outcomes} == {generated.REFUSED, generated.ANSWERED}


def test_a_sound_reply_is_taken(to_trainer):
    for path, reply in (("/sample", to_trainer.episodes), ("/v1/completions", to_trainer.completion)):
        example = Example("sound", (path, 200, {}, json.dumps(reply).encode()))
        assert to_trainer.judge(example) == Outcome(generated.ANSWERED)


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        ({}, ""),
        ({"finish": "cut_off"}, "answers and finish"),
        ({"logprobs": []}, "log-probabilities"),
        ({"step_ends": [1]}, "step ends, an end that was not sampled, no end"),
    ],
)
def test_an_episode_that_could_not_be_is_noticed(to_trainer, change, flaw):
    sequence = replace(sound_sequence(to_trainer.layout), **change)
    assert flaws_of(sequence, to_trainer.layout) == flaw


def test_requests_and_files_are_drawn_the_same_each_time():
    header = hostile_files.GgufHeader(
        [hostile_files.Key("a", 4, 1), hostile_files.Key("b", hostile_files.LIST, (5, [1, 2]))],
        [hostile_files.TensorInfo("t", [32, 2], 0, 0)],
    )
    for strategy in (hostile_requests.Requests.strategy, hostile_files.changed_header(header).map(by_name)):
        drawn = examples(strategy, 20)
        assert drawn == examples(strategy, 20) and len(drawn) == 20


def by_name(drawn) -> Example:
    return Example(drawn[0], drawn[1].encoded())


REQUEST = hostile_requests.RawRequest("retrieve", b"", is_sound=False, may_answer=False, is_http=True, is_whole=True)


@pytest.mark.parametrize(
    ("reply", "change", "flaw"),
    [
        (b"", {}, ""),
        (b"", {"is_sound": True}, "a sound request was not answered"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", {}, "it was answered"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", {"may_answer": True}, ""),
        (b"HTTP/1.0 403 Forbidden\r\n\r\n", {}, ""),
        (b"HTTP/1.0 500 No\r\n\r\n", {}, "status 500"),
        (b"HTTP/1.0 503 No\r\n\r\n", {}, "status 503"),
        (b"{}", {}, "no reply of HTTP"),
        (b"{}", {"is_http": False}, ""),
    ],
)
def test_a_reply_that_should_not_be_is_noticed(reply, change, flaw):
    problem = hostile_requests.flaw_of(reply, replace(REQUEST, **change))
    assert problem.startswith(flaw) and bool(problem) == bool(flaw)


def test_exceptions_and_errors_that_do_not_name_their_file_are_noticed():
    def fail(example):
        raise KeyError("of ours")

    assert "KeyError" in judge_within_limits(fail, Example("x", None)).problem
    assert "does not name a.gguf" in refusal("it is damaged", "a.gguf").problem
    assert refusal("a.gguf is damaged", "a.gguf").problem == ""
    assert "characters" in refusal("a.gguf" + " " * 3000, "a.gguf").problem


def test_odd_values_are_what_json_dumps_does_not_write():
    codes = []
    for number, raw in enumerate(generated.RAW):
        text = generated.encoded({"a": f"@RAW{number}@"})
        assert raw.encode() in text
        with pytest.raises(R3LiteError) as error:
            parse(text)
        codes.append(error.value.code)
    numbers = ["not-a-json-number"] * 2 + ["json-number-too-large"] * 2 + ["json-digits"]
    assert codes == [*numbers, "surrogate", "json-too-deep", *["not-json"] * 3]
