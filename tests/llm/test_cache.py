"""The cache of replies: what is served from it, what misses it and what is never in it."""

from r3lite.llm.gemini import Request
from tests.marks import ASK, MARK, ask, read_mark


def test_a_second_run_is_served_from_the_cache(gemini, client, said, tmp_path):
    gemini.script = [said('{"mark": 0.25}')]
    client(tmp_path).generate(ASK)
    second = client(tmp_path)
    reply = second.generate(ASK)
    assert reply.cached and reply.value.mark == 0.25
    assert len(gemini.requests) == 1
    assert second.counts()["cache_hits"] == 1 and second.counts()["calls"] == 0 and second.counts()["cost"] == 0


def test_what_changes_a_reply_misses_the_cache(gemini, client, said, tmp_path):
    other = MARK | {"title": "Other"}
    gemini.script = [said('{"mark": 1}')]
    asked = client(tmp_path)
    requests = [ASK, ask("How bad?"), Request("How good?", schema=other, read=read_mark), Request("How good?")]
    changes = ({"temperature": 1.0}, {"nonce": "2"}, {"system": "s"})
    requests += [ask("How good?", **change) for change in changes]
    for request in requests:
        asked.generate(request)
    client(tmp_path, judge_model="gemini-x").generate(ASK)
    assert len(gemini.requests) == len(requests) + 1


def test_failures_are_not_cached_and_a_broken_file_is_no_reply(gemini, client, said, tmp_path):
    gemini.script = [said("oops"), said('{"mark": 1}'), said('{"mark": 0}')]
    asked = client(tmp_path)
    assert asked.generate(ASK).failure == "malformed"
    assert list(tmp_path.iterdir()) == []
    assert asked.generate(ASK).value.mark == 1
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:10])
    assert asked.generate(ASK).value.mark == 0
