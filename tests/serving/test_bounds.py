"""What is remembered of conversations, what a client may ask, and where an ask of mode auto goes."""

import random

import pytest

from r3lite.serving.asks import Refusal
from r3lite.serving.desk import CLIENTS, ClientRates, Conversations, Places
from r3lite.serving.routing import route


def texts(conversations, id, **options):
    return [message["content"] for message in conversations.messages(id, **options)]


def test_the_last_turns_of_the_last_conversations():
    memory = Conversations(max_turns=2, max_conversations=2, max_bytes=1000)
    for i in range(3):
        memory.add("a", f"q{i}", f"a{i}")
    assert texts(memory, "a") == ["q1", "a1", "q2", "a2"] and texts(memory, "a", all_but_last=True) == ["q1", "a1"]
    assert [m["role"] for m in memory.messages("a")] == ["user", "assistant"] * 2
    memory.add("b", "x", "y")
    memory.add("a", "q3", "a3")
    memory.add("c", "x", "y")  # b was silent longest
    assert texts(memory, "b") == [] and texts(memory, "a") == ["q2", "a2", "q3", "a3"]
    memory.add("a", "q3", "better", in_place_of_last=True)
    assert texts(memory, "a") == ["q2", "a2", "q3", "better"]


def test_bytes_are_bounded_whatever_is_said():
    rng = random.Random(0)
    memory = Conversations(max_turns=5, max_conversations=9, max_bytes=400)
    for _ in range(500):
        memory.add(str(rng.randrange(20)), "\u6771" * rng.randrange(60), "x" * rng.randrange(300), rng.random() < 0.2)
        text_bytes = sum(len(t.encode()) for id in list(memory._turns_of) for t in texts(memory, id))
        assert text_bytes == memory.text_bytes <= 400 and len(memory._turns_of) <= 9
    memory.add("long", "x" * 500, "")
    assert memory.text_bytes == 0 and texts(memory, "long") == []
    assert Conversations(max_turns=0, max_conversations=9, max_bytes=400).messages("a") == ()


def test_no_turns_at_all_are_remembered_if_none_shall_be():
    memory = Conversations(max_turns=0, max_conversations=9, max_bytes=400)
    memory.add("a", "x", "y")
    assert texts(memory, "a") == [] and memory.text_bytes == 0


def test_a_bucket_fills_up_as_time_passes():
    clock = [0.0]
    rates = ClientRates(60, lambda: clock[0])
    assert [rates.seconds_to_wait("a") for _ in range(60)] == [0.0] * 60 and rates.seconds_to_wait("a") == 1.0
    assert rates.seconds_to_wait("b") == 0.0
    clock[0] = 0.5
    assert rates.seconds_to_wait("a") == 0.5
    clock[0] = 1.0
    assert rates.seconds_to_wait("a") == 0.0 and rates.seconds_to_wait("a") == 1.0
    for i in range(CLIENTS + 5):
        rates.seconds_to_wait(f"client {i}")
    assert len(rates._buckets) == CLIENTS


def test_places_are_taken_and_freed():
    places = Places(limit=3, limit_of_client=2)
    for client, code in (("a", "too_many_at_once"), ("b", "overloaded")):
        while places.taken[client] < 2 and places.taken.total() < 3:
            places.take(client)
        with pytest.raises(Refusal) as refused:
            places.take(client)
        assert refused.value.code == code
    assert places.taken == {"a": 2, "b": 1}
    places.free("a")
    places.take("b")
    assert places.taken == {"a": 1, "b": 2}
    for client in ("a", "b", "b"):
        places.free(client)
    assert places.taken.total() == 0 and not places.taken


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("Hello!", "chat"),
        ("hi there", "chat"),
        ("Thanks, that helps.", "chat"),
        ("How are you?", "chat"),
        ("Write a poem about the sea", "chat"),
        ("Please translate this sentence: the house is red", "chat"),
        ("Could you summarize the text above?", "chat"),
        ("I had a bad day", "chat"),
        ("What is 17 * 23?", "reasoning"),
        ("Solve x^2 = 16 step by step", "reasoning"),
        ("If all cats are animals, is Tom an animal?", "reasoning"),
        ("Suppose it rains tomorrow. What happens to the match?", "reasoning"),
        ("How many apples are left if I eat 3 of 5?", "reasoning"),
        ("Who is married to the composer of Jelsan Janli?", "search"),
        ("Which company does the director of Tentor Trulgol work for?", "search"),
        ("when was the Eiffel tower built", "search"),
        ("Hello, who directed Psycho?", "search"),
        ("hello who directed Psycho", "search"),
        ("Please find the capital of France", "search"),
        ("Nice is in which country", "search"),
        ("OK, calculate the mean of them", "reasoning"),
        ("Okay, thanks, bye", "chat"),
        ("What is 12 - 5?", "reasoning"),
        ("What happened on 2001-09-11?", "search"),
        ("Who won the 2010-2011 Premier League?", "search"),
        ("How many people lived in Oslo in 1990?", "search"),
        ("Tell me about Ada Lovelace", "search"),
        ("Is Rome older than Paris?", "search"),
    ],
)
def test_where_an_ask_goes(text, mode):
    assert route(text, ("chat", "reasoning", "search")) == mode
    assert route(text, ("chat", "reasoning")) == ("reasoning" if mode == "search" else mode)
