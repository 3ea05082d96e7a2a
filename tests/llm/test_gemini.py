"""The Gemini client: what it sends, what it makes of each reply, when it tries again and when it stops."""

import copy
import json
import logging

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.llm.client import Request
from tests.errors import raises
from tests.fake_gemini import KEY, error_reply, text_reply
from tests.marks import ASK, MARK, Mark, ask, read_mark


def test_structured_output(gemini, client):
    gemini.script = [text_reply('{"mark": 0.5}')]
    llm = client()
    reply = llm.generate(ask("How good?", system="Be fair.", max_output_tokens=99))
    assert (reply.value, reply.failure, reply.cached) == (Mark(mark=0.5), None, False)
    path, _, body = gemini.requests[0]
    assert path.endswith("/models/gemini-3.5-flash-lite:generateContent")
    config = body["generationConfig"]
    assert config["responseMimeType"] == "application/json" and config["responseSchema"]["required"] == ["mark"]
    assert config["maxOutputTokens"] == 99 + 512  # it may think a little
    assert not {"temperature", "topP", "topK", "top_p", "top_k"} & config.keys()
    assert body["systemInstruction"]["parts"][0]["text"] == "Be fair."
    assert llm.counts() == {
        "calls": 1,
        "cost": pytest.approx(100 * 0.30e-6 + 10 * 2.5e-6),
        "retries": 0,
        "cache_hits": 0,
        "input_tokens": 100,
        "output_tokens": 10,
        "failures": 0,
    }


def test_plain_text(gemini, client):
    gemini.script = [text_reply("Step 1:")]
    assert client().generate(Request("Go on.")).text == "Step 1:"
    config = gemini.requests[0][2]["generationConfig"]
    assert "responseSchema" not in config and "responseMimeType" not in config


def test_429_waits_as_long_as_it_is_told(gemini, client, clock):
    gemini.script = [error_reply(429, headers={"Retry-After": "7"}), text_reply('{"mark": 1}')]
    llm = client()
    assert llm.generate(ASK).value.mark == 1
    assert 7 <= sum(clock.slept) < 9
    assert llm.counts()["retries"] == 1 and llm.counts()["calls"] == 2 and llm.counts()["failures"] == 0


def test_429_with_the_wait_in_the_body(gemini, client, clock):
    details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "11s"}]
    gemini.script = [error_reply(429, details=details), text_reply('{"mark": 1}')]
    assert client().generate(ASK).value.mark == 1
    assert 11 <= sum(clock.slept) < 13


def test_503_backs_off_and_gives_up(gemini, client, clock):
    gemini.script = [error_reply(503, "overloaded", "UNAVAILABLE")]
    llm = client(judge_retries=3)
    reply = llm.generate(ASK)
    assert reply.failure == "server" and "overloaded" in reply.detail
    assert len(gemini.requests) == 4
    assert all(base * 0.5 <= s <= base * 1.5 for s, base in zip(clock.slept, (1, 2, 4), strict=True))
    assert llm.counts()["failures/server"] == 1


def test_a_wait_that_is_too_long_is_a_failure(gemini, client, clock):
    gemini.script = [error_reply(429, "quota of the day", headers={"Retry-After": "40000"})]
    assert client().generate(ASK).failure == "rate_limited"
    assert clock.slept == []


def test_a_timeout_is_a_failure(gemini, client):
    gemini.script = [text_reply("{}", delay=1.0)]
    assert client(judge_timeout=0.2, judge_retries=1).generate(ASK).failure == "timeout"
    assert len(gemini.requests) == 2


def test_a_timeout_then_a_reply(gemini, client):
    gemini.script = [text_reply("{}", delay=1.0), text_reply('{"mark": 1}')]
    assert client(judge_timeout=0.3).generate(ASK).value.mark == 1


def test_no_connection_is_a_failure(client):
    reply = client(judge_base_url="http://127.0.0.1:9", judge_retries=1).generate(ASK)
    assert reply.failure == "connection"


@pytest.mark.parametrize(
    "body, failure",
    [
        ({"promptFeedback": {"blockReason": "SAFETY"}}, "blocked"),
        ({"candidates": [{"finishReason": "PROHIBITED_CONTENT"}]}, "blocked"),
        ({"candidates": []}, "empty"),
        ({"candidates": [{"content": {"parts": []}, "finishReason": "STOP"}]}, "empty"),
        ({"candidates": [{"content": {"parts": [{"text": '{"mark": 1'}]}, "finishReason": "MAX_TOKENS"}]}, "cut"),
        ({"candidates": [{"content": {"parts": [{"text": '{"mark": 1'}]}, "finishReason": "STOP"}]}, "malformed"),
        ({"candidates": [{"content": {"parts": [{"text": '{"grade": 1}'}]}, "finishReason": "STOP"}]}, "schema"),
        ({"candidates": [{"content": {"parts": [{"text": '{"mark": "good"}'}]}, "finishReason": "STOP"}]}, "schema"),
        ({"candidates": [{"content": {"parts": [{"text": "[]"}]}, "finishReason": "STOP"}]}, "schema"),
        (b"<html>not a reply</html>", "malformed"),
        ({"candidates": [{"content": "what?"}]}, "malformed"),
        ({"candidates": 5}, "malformed"),
        ("just text", "malformed"),
        ([], "malformed"),
        (b"[" * 200_000, "malformed"),
        (b'{"candidates": [{"index": ' + b"9" * 10_000 + b"}]}", "malformed"),
        ({"candidates": [{"content": {"parts": [{"text": "[" * 5000}]}}]}, "malformed"),
        ({"candidates": [{"content": {"parts": [{"text": '{"mark": NaN}'}]}}]}, "malformed"),
    ],
)
def test_replies_that_are_none(gemini, client, body, failure):
    answer = text_reply("")
    answer.body = body
    gemini.script = [answer]
    llm = client()
    reply = llm.generate(ASK)
    assert (reply.failure, reply.value) == (failure, None)
    assert llm.counts()[f"failures/{failure}"] == 1
    assert len(gemini.requests) == 1  # it would say the same again


def test_thoughts_are_not_the_reply(gemini, client):
    answer = text_reply('{"mark": 1}')
    answer.body["candidates"][0]["content"]["parts"].insert(0, {"text": "Hm.", "thought": True})
    answer.body["usageMetadata"]["thoughtsTokenCount"] = 5
    gemini.script = [answer]
    llm = client(judge_thinking=True)
    assert llm.generate(ASK).value.mark == 1
    assert llm.counts()["output_tokens"] == 15


@pytest.mark.parametrize(
    "model, thinks, level, room",
    [
        ("gemini-3.5-flash-lite", False, "MINIMAL", 512),
        ("gemini-3.5-flash-lite", True, "HIGH", 8192),
        ("gemini-flash-latest", False, "MINIMAL", 512),
        ("gemini-2.5-flash", False, 0, 0),
        ("models/gemini-2.5-pro", True, 8192, 8192),
    ],
)
def test_thinking_is_asked_for_as_the_model_knows_it(gemini, client, model, thinks, level, room):
    gemini.script = [text_reply("yes")]
    client(judge_model=model, judge_thinking=thinks).generate(Request("Is it?", max_output_tokens=100))
    config = gemini.requests[0][2]["generationConfig"]
    # The library spells the names now one way, now another.
    assert {key.replace("_", "").lower(): value for key, value in config["thinkingConfig"].items()} == {
        "thinkingbudget" if "2.5" in model else "thinkinglevel": level
    }
    assert config["maxOutputTokens"] == 100 + room


def test_a_temperature_is_sent_only_if_it_is_set(gemini, client):
    gemini.script = [text_reply("yes")]
    client(judge_temperature=0.0).generate(Request("Is it?"))
    assert gemini.requests[0][2]["generationConfig"]["temperature"] == 0.0


def test_earlier_turns_are_turns(gemini, client):
    gemini.script = [text_reply("yes")]
    client().generate(Request("And now?", earlier=("First?", "No.")))
    turns = [(c["role"], c["parts"][0]["text"]) for c in gemini.requests[0][2]["contents"]]
    assert turns == [("user", "First?"), ("model", "No."), ("user", "And now?")]


def test_a_model_that_must_think_is_remembered(gemini, client, capsys):
    message = "Budget 0 is invalid. This model only works in thinking mode."

    def script(body):
        if "thinkingConfig" in body["generationConfig"]:
            return error_reply(400, message, "INVALID_ARGUMENT")
        return text_reply('{"mark": 1}')

    gemini.script = script
    llm = client()
    assert llm.generate(ASK).value.mark == 1
    assert llm.generate(ask("Another?")).value.mark == 1
    assert len(gemini.requests) == 3
    assert llm.counts()["failures"] == 0
    assert capsys.readouterr().err.count("refuses a thinking level; continuing without one: 400") == 1


def test_one_bad_request_does_not_stop_the_run(gemini, client):
    gemini.script = [error_reply(400, "The input token count exceeds the maximum", "INVALID_ARGUMENT")]
    assert client().generate(ASK).failure == "refused"


@pytest.mark.parametrize("body", [b"", b"gone", [], [1, 2], {"error": "no"}, {"error": {"details": 5}}, "no", 5])
def test_errors_with_any_body(gemini, client, body):
    answer = error_reply(500)
    answer.body = body
    gemini.script = [answer]
    assert client(judge_retries=0).generate(ASK).failure == "server"


@pytest.mark.parametrize("name", ["GOOGLE_API_KEY", "GEMINI_API_KEY"])
def test_the_key_comes_from_either_variable(gemini, client, monkeypatch, name):
    monkeypatch.delenv("GOOGLE_API_KEY")
    monkeypatch.setenv(name, "another-key")
    gemini.script = [text_reply('{"mark": 1}')]
    client().generate(ASK)
    headers = {k.lower(): v for k, v in gemini.requests[0][1].items()}
    assert headers["x-goog-api-key"] == "another-key"


def test_a_missing_key_stops_at_once(client, monkeypatch):
    monkeypatch.delenv("GOOGLE_API_KEY")
    with raises(R3LiteError, "gemini-key-missing"):
        client()


def test_a_key_that_cannot_be_sent_is_refused_unshown(client, monkeypatch):
    """The error of a header that cannot be sent would show it."""
    monkeypatch.setenv("GOOGLE_API_KEY", "secret\nkey")
    with raises(R3LiteError, "key-malformed") as error:
        client()
    assert "secret" not in str(error.value)


def test_a_key_in_a_reply_is_kept_nowhere(gemini, client, tmp_path):
    gemini.script = [text_reply(f"The key is {KEY}.")]
    assert client(tmp_path).generate(Request("Which?")).text == "The key is ***."
    files = "".join(p.read_text() for p in tmp_path.iterdir())
    assert "The key is ***." in files and KEY not in files


def test_an_address_that_cannot_be_reached_by_any_request_stops_at_once(client):
    with raises(R3LiteError, "bad-address"):
        client(judge_base_url="http://\u2603\ufe0f\u2764.x").generate(ASK)


@pytest.mark.parametrize(
    "status, message, code",
    [
        (400, "API key not valid. Please pass a valid API key.", "key-rejected"),
        (401, "bad credentials", "key-rejected"),
        (403, "permission denied", "key-rejected"),
        (404, "models/gemini-x is not found", "model-unusable"),
    ],
)
def test_what_fails_every_request_stops_at_once(gemini, client, clock, status, message, code):
    gemini.script = [error_reply(status, message)]
    with raises(R3LiteError, code):
        client().generate_all([ASK, ask("b")])
    assert clock.slept == []


def test_the_key_shows_nowhere(gemini, client, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    gemini.script = [
        error_reply(503, f"not for {KEY}"),
        error_reply(400, f"nor {KEY}"),
        text_reply('{"mark": 1}'),
    ]
    llm = client(tmp_path)
    refused = llm.generate(ASK)
    assert refused.failure == "refused" and "***" in refused.detail
    llm.generate(ASK)
    gemini.script = [error_reply(403, f"{KEY} is not a key")]
    with pytest.raises(R3LiteError) as error:
        llm.generate(Request("x"))
    files = "".join(p.name + p.read_text() for p in tmp_path.rglob("*"))
    for text in (str(refused), str(error.value), files, json.dumps(llm.counts()), caplog.text):
        assert text and KEY not in text


def test_a_value_that_the_caller_refuses_is_a_failure(gemini, client, tmp_path):
    def read(data):
        raise ValueError("7 is too much")

    gemini.script = [text_reply('{"mark": 7}')]
    reply = client(tmp_path).generate(Request("How good?", schema=MARK, read=read))
    assert (reply.failure, reply.detail) == ("schema", "7 is too much") and list(tmp_path.iterdir()) == []


def test_a_schema_is_left_as_it_is(gemini, client):
    """The library writes into the dictionary that it is given: the next request would have had another digest."""
    gemini.script = [text_reply('{"mark": 1}')]
    schema = {"$defs": {"M": copy.deepcopy(MARK)}, "type": "array", "items": {"$ref": "#/$defs/M"}}
    original = copy.deepcopy(schema)
    client().generate(Request("How good?", schema=schema, read=read_mark))
    assert schema == original


def test_many_at_once_come_back_in_order(gemini, client):
    def script(body):
        number = int(body["contents"][0]["parts"][0]["text"])
        return text_reply(json.dumps({"mark": number}), delay=0.1)

    gemini.script = script
    requests = [ask(str(i)) for i in range(12)]
    llm = client(judge_concurrency=4)
    replies = llm.generate_all(requests)
    assert [r.value.mark for r in replies] == list(range(12))
    assert 2 <= gemini.at_once <= 4


def test_equal_requests_are_sent_once(gemini, client):
    gemini.script = [text_reply('{"mark": 1}')]
    replies = client().generate_all([ASK, ASK, ASK, ask("How good?", nonce="2")])
    assert [r.value.mark for r in replies] == [1] * 4
    assert len(gemini.requests) == 2
