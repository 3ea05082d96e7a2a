"""Servers that speak OpenAI's /chat/completions: what is sent, and what is made of each reply and error."""

import json
import logging

import pytest

from r3lite.core.config import UsageError
from r3lite.core.episode import ANSWERED, Document, Episode, Question, Step
from r3lite.core.errors import R3LiteError
from r3lite.llm.cache import digest
from r3lite.llm.client import Client, Request
from r3lite.llm.openai_compatible import closed
from r3lite.rewards.judge import build_judge, judge_prompt
from r3lite.settings import JudgeSettings
from tests.errors import raises
from tests.fake_gemini import error_reply
from tests.marks import ASK, ask

KEY = "sk-secret-0123456789"
STRICT = {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "response_format"}


def completion(text, finish="stop", tokens=(100, 10), **message):
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    return {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


def error_body(message, code=None, kind="invalid_request_error"):
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@pytest.fixture
def server(gemini, monkeypatch):
    """A server that answers by script, and refuses what OpenAI's own would."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("GOOGLE_API_KEY")

    class Server:
        requests, url = gemini.requests, f"{gemini.url}/v1"

        def says(self, *script, headers=None):
            queue = list(script)

            def answer(body):
                assert set(body) <= STRICT, f"unknown fields {set(body) - STRICT}"
                reply = error_reply(200)
                content = queue.pop(0) if len(queue) > 1 else queue[0]
                reply.status, reply.body = content if isinstance(content, tuple) else (200, content)
                reply.headers = headers or {}
                return reply

            gemini.script = answer

    return Server()


@pytest.fixture
def make_client(server, clock):
    def make(cache=None, **settings):
        settings = {"judge": "openai", "judge_model": "m", "judge_base_url": server.url, "judge_timeout": 20} | settings
        return Client(JudgeSettings(**settings), cache, clock=clock, sleep=clock.sleep)

    return make


def test_structured_output(server, make_client):
    server.says(completion('{"mark": 0.5}'))
    client = make_client(judge_input_price=2.0, judge_output_price=10.0, judge_temperature=0.0)
    request = ask("And now?", system="Be fair.", earlier=("How good?", "Fair."), max_output_tokens=99)
    assert client.generate(request).value.mark == 0.5
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert {k.lower(): v for k, v in headers.items()}["authorization"] == f"Bearer {KEY}"
    turns = [("system", "Be fair."), ("user", "How good?"), ("assistant", "Fair."), ("user", "And now?")]
    assert [(m["role"], m["content"]) for m in body["messages"]] == turns
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 99, 0.0)
    wanted = body["response_format"]["json_schema"]
    assert body["response_format"]["type"] == "json_schema" and wanted["strict"] is True
    assert wanted["schema"] == {**request.schema, "additionalProperties": False}
    counts = client.counts()
    assert (counts["input_tokens"], counts["output_tokens"]) == (100, 10)
    assert counts["cost"] == pytest.approx(100 * 2e-6 + 10 * 10e-6)


def test_plain_text_asks_for_no_form(server, make_client):
    server.says(completion("Step 1:"))
    assert make_client().generate(Request("Go on.")).text == "Step 1:"
    assert set(server.requests[0][2]) == {"model", "messages", "max_tokens"}


def test_every_object_of_a_schema_is_closed():
    schema = judge_prompt()[1]
    strict = closed(schema)
    assert strict["additionalProperties"] is False and strict["$defs"]["StepGrade"]["additionalProperties"] is False
    assert "additionalProperties" not in schema and strict["properties"] == schema["properties"]
    # A property may have the name of a keyword.
    odd = {"type": "object", "properties": {"type": {"type": "object", "properties": {}}}}
    assert closed(odd)["properties"]["type"] == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (completion('{"mark": 1', finish="length"), "cut"),
        (completion("", finish="content_filter"), "blocked"),
        (completion(None, refusal="I cannot say."), "blocked"),
        (completion(""), "empty"),
        (completion(None), "empty"),
        ({"choices": []}, "empty"),
        (completion('{"mark": 1'), "malformed"),
        (completion('{"mark": NaN}'), "malformed"),
        (completion('{"grade": 1}'), "schema"),
        (completion("[]"), "schema"),
        (b"<html>not a reply</html>", "malformed"),
        ({"choices": 5}, "malformed"),
        ({"choices": [{"message": "what?"}]}, "malformed"),
        ({"choices": [{"message": {"content": ["a"]}}]}, "malformed"),
        ("just text", "malformed"),
        ([], "malformed"),
        (b"[" * 200_000, "malformed"),
    ],
)
def test_replies_that_are_none(server, make_client, body, failure):
    server.says(body)
    client = make_client()
    reply = client.generate(ASK)
    assert (reply.failure, reply.value) == (failure, None)
    assert client.counts()[f"failures/{failure}"] == 1 and len(server.requests) == 1


def test_tokens_that_are_not_told_are_estimated(server, make_client):
    reply = completion("four words of text")
    del reply["usage"]
    server.says(reply)
    client = make_client()
    client.generate(Request("x" * 300))
    assert client.counts()["input_tokens"] == 100 and client.counts()["output_tokens"] == 6


def test_thoughts_are_not_the_reply(server, make_client):
    server.says(completion('\n<think>\nIs {"mark": 0} fair?</think>\n\n{"mark": 1}'))
    assert make_client(judge_thinking=True).generate(ASK).value.mark == 1
    assert server.requests[0][2]["max_tokens"] == ASK.max_output_tokens + 8192


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"mark": 1, "why": "like ```this```"}\n```',
        'My verdict:\n\n```\n{"mark": 1}\n```\nIt is fair.',
        'Is {"mark": 0} fair?\n</think>\n\n{"mark": 1}',
        '<think>```json\n{"mark": 0}\n```</think>```json {"mark": 1}```',
        '{"mark": 1, "why": "</think>"}',
    ],
)
def test_json_may_come_in_a_fenced_block_or_after_thoughts(server, make_client, tmp_path, text):
    """Such verdicts were malformed: a template that opens the thoughts leaves only their end in the reply."""
    server.says(completion(text))
    assert make_client(tmp_path).generate(ASK).value.mark == 1
    assert make_client(tmp_path).generate(ASK).cached and len(server.requests) == 1
    assert make_client().generate(Request("Go on.")).text.endswith(text[-12:])  # what is no JSON keeps its fence


def test_the_name_of_the_limit_that_a_server_wants_is_remembered(server, make_client, capsys):
    message = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )
    server.says((400, error_body(message, "unsupported_parameter")), completion('{"mark": 1}'))
    client = make_client()
    assert client.generate(ASK).value.mark == 1 and client.generate(ask("Another?")).value.mark == 1
    assert [sorted(set(body) & {"max_tokens", "max_completion_tokens"}) for _, _, body in server.requests] == [
        ["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"]
    ]  # fmt: skip
    assert client.counts()["failures"] == 0
    assert capsys.readouterr().err.count("m needs max_completion_tokens; continuing with it: 400") == 1


def test_a_server_that_wants_neither_name_has_refused(server, make_client):
    server.says((400, error_body("neither max_tokens nor max_completion_tokens")))
    assert make_client().generate(ASK).failure == "refused" and len(server.requests) == 2


def test_429_waits_as_long_as_it_is_told(server, make_client, clock):
    server.says(
        (429, error_body("slow down", "rate_limit_exceeded")), completion('{"mark": 1}'), headers={"Retry-After": "7"}
    )
    assert make_client().generate(ASK).value.mark == 1
    assert 7 <= sum(clock.slept) < 9


@pytest.mark.parametrize(
    ("status", "body", "code", "named"),
    [
        (401, error_body("Incorrect API key provided", "invalid_api_key"), "key-rejected", "401"),
        (403, {"error": "Forbidden"}, "key-rejected", "403 : Forbidden"),
        (404, error_body("The model `m` does not exist", "model_not_found"), "model-unusable", "m "),
        (404, {"object": "error", "message": "no such model", "code": 404}, "model-unusable", "404 : no such model"),
        (429, error_body("You exceeded your current quota", "insufficient_quota"), "credit-exhausted", "429"),
    ],
)
def test_what_fails_every_request_stops_at_once(server, make_client, clock, status, body, code, named):
    server.says((status, body))
    with raises(R3LiteError, code, named):
        make_client().generate(ASK)
    assert clock.slept == []


@pytest.mark.parametrize("body", [b"", b"gone", [], {"error": 5}, {"error": {"message": 5}}, "no"])
def test_errors_with_any_body(server, make_client, body):
    server.says((500, body))
    assert make_client(judge_retries=0).generate(ASK).failure == "server"


def test_a_server_of_ones_own_needs_no_key(server, make_client, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    server.says(completion('{"mark": 1}'))
    assert make_client().generate(ASK).value.mark == 1
    assert "authorization" not in {name.lower() for name in server.requests[0][1]}
    with raises(R3LiteError, "openai-key-missing"):
        make_client(judge_base_url=None)


def test_the_key_shows_nowhere(server, make_client, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    server.says(
        (503, error_body(f"not for {KEY}")),
        (400, error_body(f"nor {KEY}")),
        completion(f'{{"mark": 1, "key": "{KEY}"}}'),
    )
    client = make_client(tmp_path)
    refused, fine = client.generate(ASK), client.generate(ASK)
    assert refused.failure == "refused" and "***" in refused.detail and fine.value.mark == 1
    files = "".join(p.name + p.read_text() for p in tmp_path.rglob("*"))
    for text in (str(refused), str(fine), files, json.dumps(client.counts()), caplog.text):
        assert text and KEY not in text


@pytest.mark.parametrize("placeholder", ["x", "EMPTY", "none", "anything", "1"])
def test_a_placeholder_of_a_key_is_not_cut_out_of_replies(server, make_client, monkeypatch, placeholder):
    """Local servers ask for any key. With the key `none`, the answer `none` came back as `***`."""
    monkeypatch.setenv("OPENAI_API_KEY", placeholder)
    server.says(completion(f'{{"mark": 1, "reason": "{placeholder} exact none 1"}}'))
    assert f"{placeholder} exact none 1" in make_client().generate(ASK).text


def test_replies_of_two_services_are_not_mixed_up(server, make_client, tmp_path, monkeypatch):
    server.says(completion('{"mark": 1}'))
    assert not make_client(tmp_path).generate(ASK).cached and make_client(tmp_path).generate(ASK).cached
    monkeypatch.setenv("GOOGLE_API_KEY", "another")
    for judge, has_reply in (("openai", True), ("gemini", False)):
        client = make_client(tmp_path, judge=judge)
        record = client._cache.recall(digest(ASK.parts | client.circumstances), lambda record: record)
        assert (record is not None) == has_reply


def test_a_judge_judges_by_it(server, tmp_path):
    document = Document("d", "Rome", "Rome is in Italy.")
    steps = [Step.asking("Where?", "Rome", (document,)), Step("So.", answer="Italy")]
    episode = Episode(Question("q", "Where is Rome?", ("Italy",)), steps, ANSWERED)
    shares = [(0.9, 0.8, 1), (0, 0.5, 0.7)]
    grades = [{"step": i, "relevance": r, "rationality": q, "coherence": c} for i, (r, q, c) in enumerate(shares, 1)]
    server.says(completion(json.dumps({"answer_is_right": True, "steps": grades})))
    settings = JudgeSettings(judge="openai", judge_model="m", judge_base_url=server.url)
    judge = build_judge(settings, tmp_path, None, Client)
    (verdict,) = judge.verdicts([episode])
    assert verdict.correct and [s.coherence for s in verdict.steps] == [1.0, 0.7] and verdict.steps[0].relevance == 0.9
    assert [s.rationality for s in verdict.steps] == [0.8, 0.0]  # of a step that asks nothing it says nothing


def test_the_model_of_such_a_server_must_be_named():
    with raises(UsageError, "judge-model-missing"):
        JudgeSettings(judge="openai").check()
