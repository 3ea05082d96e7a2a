"""The soak of workers: its links, and what it calls lost or doubled."""

import json
import socket
import threading

from bench.stress.worker_soak import EPISODES, SlowLink, flaws, is_complete

HELD = {
    "troubles": {"kill": 3},
    "rounds_wrong": 0,
    "rounds_differ": 0,
    "worker_mib": [300.0, 303.0],
    "trainer": {"why": [], "descriptors": [10, 11]},
}


def test_a_link_passes_on_until_it_is_cut():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer_backwards, args=(listening,), daemon=True).start()
        link = SlowLink(listening.getsockname()[1])
        host, _, port = link.url.removeprefix("http://").partition(":")
        assert not link.cut()
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"abc")
            assert connection.recv(10) == b"cba"
            assert link.cut() and connection.recv(10) == b""


def answer_backwards(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        while data := connection.recv(100):
            connection.sendall(data[::-1])


def test_a_round_has_each_question_as_often_as_it_should():
    episodes = [json.dumps({"id": id}) for id in "ab" for _ in range(EPISODES)]
    assert is_complete(episodes)
    assert (
        not is_complete(episodes[1:])
        and not is_complete([*episodes, episodes[0]])
        and not is_complete([*episodes[1:], episodes[-1]])
    )


def test_what_does_not_hold_is_said():
    assert flaws(HELD) == []
    assert flaws(HELD | {"trainer": {"why": ["it became slower", "rss_mib grew"]}}) == ["rss_mib grew"]
    assert flaws(HELD | {"trainer": {"why": [], "descriptors": [10, 13]}}) == ["descriptors grew"]
    assert flaws(HELD | {"worker_mib": [300.0, 330.0]}) == ["the memory of a worker grew"]
    assert flaws(HELD | {"rounds_wrong": 1}) == ["episodes are lost or doubled"]
    assert flaws(HELD | {"rounds_differ": 1}) == ["episodes are others than without trouble"]
    assert flaws(HELD | {"troubles": {}}) == ["no worker was killed"]
