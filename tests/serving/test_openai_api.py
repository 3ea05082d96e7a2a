"""OpenAI's own Python client against the server."""

import json

import pytest

openai = pytest.importorskip("openai", reason="needs the extra test")
pytest.importorskip("fastapi", reason="needs the extra serve")
from r3lite.serving.asks import ServedAnswer  # noqa: E402
from r3lite.serving.openai_api import HARMLESS, NEUTRAL, ChatReply  # noqa: E402


@pytest.fixture
def client(serving):
    running = serving()
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    client.answering = running.answering
    yield client
    client.close()


def user_turn(text):
    return [{"role": "user", "content": text}]


def test_a_stream_has_the_role_first_then_the_content_then_the_reason_then_the_usage(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="chat", messages=user_turn("one two"), **options))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant" and deltas[0].content == ""
    assert [d.content for d in deltas[1:]] == ["one", " two", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1


def test_an_answer_behind_a_thought_that_was_streamed_comes_once():
    """The thought had no beginning and was streamed as text; the answer was then streamed a second time."""
    reply = ChatReply({}, "chat", with_usage=False)
    answer = ServedAnswer("Ada", "", [], [], [], "answered", None, False, 7, 3, mode="chat", adapter="rl")
    events = [{"type": "text", "answer": "Hm."}, {"type": "text", "answer": "Hm.\n</think>\n\nAda"}, answer]
    chunks = [json.loads(chunk) for event in events for chunk in reply.chunks(event) if chunk != "[DONE]"]
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(contents) == "Hm.\n</think>\n\nAda"


def test_what_is_written_on_the_way_is_reasoning(client):
    chunks = list(client.chat.completions.create(model="search", messages=user_turn("one two"), stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "one two"
    assert "".join(d.content or "" for d in deltas) == "one two" and chunks[-1].usage.completion_tokens == 2
    completion = client.chat.completions.create(model="search", messages=user_turn("one two"))
    assert completion.choices[0].message.content == completion.choices[0].message.reasoning_content == "one two"
    assert completion.choices[0].finish_reason == "stop" and completion.usage.prompt_tokens == 7


def test_messages_and_parameters_reach_the_model(client):
    messages = [
        {"role": "system", "content": "be brief"},
        *user_turn("one"),
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
    ]
    client.chat.completions.create(
        model="chat/rl", messages=messages, temperature=0.5, top_p=0.9, max_tokens=5, seed=3, extra_body={"top_k": 7}
    )
    (ask,) = client.answering.asks
    assert (ask.text, ask.mode, ask.adapter) == ("two\nthree", "chat", "rl")
    assert [tuple(m.values()) for m in ask.earlier] == [("system", "be brief"), ("user", "one"), ("assistant", "1")]
    assert (ask.temperature, ask.top_p, ask.top_k, ask.max_tokens, ask.seed) == (0.5, 0.9, 7, 5, 3)


def test_roles_that_a_chat_template_refuses_are_not_called_a_long_question(client):
    with pytest.raises(openai.BadRequestError, match="chat template refuses messages of these roles") as refused:
        client.chat.completions.create(model="chat", messages=[*user_turn("one"), *user_turn("two")])
    assert refused.value.code == "invalid_request" and "secret" not in str(refused.value)


def test_the_models_are_the_modes(client):
    names = [model.id for model in client.models.list()]
    assert names[:4] == ["auto", "chat", "reasoning", "search"] and "search/sft" in names
    assert client.models.retrieve("search/sft").id == "search/sft"
    with pytest.raises(openai.NotFoundError, match="does not exist; choose from auto, chat"):
        client.chat.completions.create(model="gpt-5", messages=user_turn("x"))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n": 2}, "does not support n"),
        ({"stop": ["x"]}, "does not support stop"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "does not support tools"),
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"max_tokens": 0}}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "pass one of them"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            r"messages\.0\.content\.0\.type: Input should be 'text'",
        ),
        (
            {"messages": [*user_turn("x"), {"role": "user", "content": 5}]},
            r"messages\.1\.content: Input should be a valid",
        ),
        (
            {"messages": [*user_turn("x"), {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            r"messages\.1\.tool_calls",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}]}, "content.0.cache"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "last message must have the role user"),
    ],
)
def test_what_is_not_done_is_refused(client, parameters, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**{"model": "chat", "messages": user_turn("x"), **parameters})


# What vLLM, SGLang and OpenAI take beside what is served here.
FOREIGN = {
    "repetition_penalty": 1.2, "guided_json": {}, "structured_outputs": {"json": {}}, "stop_token_ids": [5],
    "min_p": 0.1, "tool_choice": "required", "logprobs": True, "top_logprobs": 2, "reasoning_effort": "high",
    "response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": False}, "n": 0, "best": "",
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_known_to_be_harmless_is_refused_by_its_name(client, name):
    """They were ignored: the answer came with status 200, and was drawn without them."""
    with pytest.raises(openai.BadRequestError, match=f"does not support {name}"):
        client.chat.completions.create(model="chat", messages=user_turn("x"), extra_body={name: FOREIGN[name]})
    assert client.answering.asks == []


def test_what_changes_no_answer_is_taken(client):
    body = {name: values[0] for name, values in NEUTRAL.items()} | {name: "x" for name in HARMLESS}
    body |= dict.fromkeys(FOREIGN.keys() - NEUTRAL.keys())  # null is as good as absent
    earlier = [*user_turn("one"), {"role": "assistant", "content": "1", "reasoning_content": "x", "refusal": None}]
    client.chat.completions.create(
        model="chat", messages=[*earlier, *user_turn("two")], extra_body=body | {"top_k": -1}
    )
    assert client.answering.asks[0].top_k == -1


def test_a_failure_in_a_stream_is_an_error_of_the_client(client):
    with pytest.raises(openai.APIError, match="Internal error"):
        list(client.chat.completions.create(model="chat", messages=user_turn("crash"), stream=True))
