"""OpenAI's own Python client against the server."""

import pytest

openai = pytest.importorskip("openai", reason="needs the extra test")


@pytest.fixture
def client(serving):
    running = serving()
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    client.answering = running.answering
    yield client
    client.close()


def asked(text):
    return [{"role": "user", "content": text}]


def test_a_stream_has_the_role_first_then_the_content_then_the_reason_then_the_usage(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="chat", messages=asked("one two"), **options))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant" and deltas[0].content == ""
    assert [d.content for d in deltas[1:]] == ["one", " two", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1


def test_what_is_written_on_the_way_is_reasoning(client):
    chunks = list(client.chat.completions.create(model="search", messages=asked("one two"), stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "one two"
    assert "".join(d.content or "" for d in deltas) == "one two" and chunks[-1].usage.completion_tokens == 2
    whole = client.chat.completions.create(model="search", messages=asked("one two"))
    assert whole.choices[0].message.content == whole.choices[0].message.reasoning_content == "one two"
    assert whole.choices[0].finish_reason == "stop" and whole.usage.prompt_tokens == 7


def test_messages_and_parameters_reach_the_model(client):
    messages = [
        {"role": "system", "content": "be brief"},
        *asked("one"),
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
    ]
    client.chat.completions.create(model="chat/rl", messages=messages, temperature=0.5, top_p=0.9, max_tokens=5, seed=3)
    (ask,) = client.answering.asked
    assert (ask.text, ask.mode, ask.adapter) == ("two\nthree", "chat", "rl")
    assert [tuple(m.values()) for m in ask.earlier] == [("system", "be brief"), ("user", "one"), ("assistant", "1")]
    assert (ask.temperature, ask.top_p, ask.max_tokens, ask.seed) == (0.5, 0.9, 5, 3)


def test_the_models_are_the_modes(client):
    names = [model.id for model in client.models.list()]
    assert names[:4] == ["auto", "chat", "reasoning", "search"] and "search/sft" in names
    assert client.models.retrieve("search/sft").id == "search/sft"
    with pytest.raises(openai.NotFoundError, match="does not exist; there are auto, chat"):
        client.chat.completions.create(model="gpt-5", messages=asked("x"))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"n": 2}, "does not support n"),
        ({"stop": ["x"]}, "does not support stop"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "does not support tools"),
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"max_tokens": 0}}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "last message must be of the user"),
    ],
)
def test_what_is_not_done_is_refused(client, more, told):
    with pytest.raises(openai.BadRequestError, match=told):
        client.chat.completions.create(**{"model": "chat", "messages": asked("x"), **more})


def test_a_failure_in_a_stream_is_an_error_of_the_client(client):
    with pytest.raises(openai.APIError, match="Something went wrong here"):
        list(client.chat.completions.create(model="chat", messages=asked("crash"), stream=True))
