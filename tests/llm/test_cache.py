"""The cache of replies: what is served from it, what misses it and what is never in it."""

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.llm.client import Request
from tests.errors import raises
from tests.fake_gemini import text_reply
from tests.marks import ASK, MARK, ask, read_mark


def test_a_second_run_is_served_from_the_cache(gemini, client, tmp_path):
    gemini.script = [text_reply('{"mark": 0.25}')]
    client(tmp_path).generate(ASK)
    second = client(tmp_path)
    reply = second.generate(ASK)
    assert reply.cached and reply.value.mark == 0.25
    assert len(gemini.requests) == 1
    assert second.counts()["cache_hits"] == 1 and second.counts()["calls"] == 0 and second.counts()["cost"] == 0


def test_what_changes_a_reply_misses_the_cache(gemini, client, tmp_path):
    other_schema = MARK | {"title": "Other"}
    gemini.script = [text_reply('{"mark": 1}')]
    llm = client(tmp_path)
    requests = [ASK, ask("How bad?"), Request("How good?", schema=other_schema, read=read_mark), Request("How good?")]
    changes = ({"earlier": ("Hello.", "Hello!")}, {"nonce": "2"}, {"system": "s"})
    requests += [ask("How good?", **change) for change in changes]
    for request in requests:
        llm.generate(request)
    client(tmp_path, judge_model="gemini-x").generate(ASK)
    client(tmp_path, judge_temperature=0.0).generate(ASK)
    assert len(gemini.requests) == len(requests) + 2


def test_failures_are_not_cached(gemini, client, tmp_path):
    gemini.script = [text_reply("oops")]
    assert client(tmp_path).generate(ASK).failure == "malformed"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "{\\"ma',  # torn
        "",
        "[" * 100_000,
        '["mark"]',
        '{"text": 7}',
        '{"text": "no JSON"}',
        '{"text": "{\\"mark\\": \\"high\\"}"}',
        '{"text": "' + "[" * 5000 + '"}',
        None,  # a folder
    ],
)
def test_a_damaged_file_is_no_reply_and_is_named(gemini, client, tmp_path, capsys, content):
    gemini.script = [text_reply('{"mark": 1}')]
    client(tmp_path).generate(ASK)
    (file,) = tmp_path.iterdir()
    if content is None:
        file.unlink()
        (file / "x").mkdir(parents=True)
        with pytest.raises(R3LiteError, match="cannot be cached"):
            client(tmp_path).generate(ASK)
    else:
        file.write_text(content)
        assert client(tmp_path).generate(ASK).value.mark == 1
        assert client(tmp_path).generate(ASK).cached  # it was written anew
    assert len(gemini.requests) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1 and file.name in stderr


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_cache_that_cannot_be_a_folder_stops_before_anything_is_paid(client, tmp_path, name):
    (tmp_path / "file").write_text("")
    with raises(R3LiteError, "not-a-folder"):
        client(tmp_path / name)
