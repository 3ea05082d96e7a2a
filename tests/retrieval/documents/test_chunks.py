"""Where texts are cut, by hand; budgets and overlaps of any text; time in proportion to its length."""

import random
import time

import pytest

from r3lite.retrieval.documents.chunks import chunks, count_tokens, sentences


def test_tokens_are_counted_as_is_said():
    assert count_tokens("") == 0
    assert count_tokens("The harbor, 1984.") == 1 + 2 + 1 + 1 + 1  # The, harbo r, comma, 1984, stop
    assert count_tokens("东京 is") == 3
    assert count_tokens(" " * 128) == 2


def test_sentences_are_cut_only_beyond_the_budget():
    text = "Dr. Lee came. He saw!  It\nrained\n\nWhy not? " + "again " * 5
    expected = ["Dr. Lee came.", "He saw!", "It\nrained", "Why not? again again again again again"]
    assert list(sentences(text, 64)) == expected
    assert list(sentences(text, 5)) == [*expected[:3], "Why not? again again", "again again again"]
    assert list(sentences(" \n ", 4)) == []


def test_the_count_is_near_that_of_wordpiece(minilm):
    from tokenizers import Tokenizer

    from r3lite.core.files import shipped

    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for path in (shipped("README.md"), shipped("pyproject.toml").parent / "r3lite" / "core" / "config.py"):
        text = path.read_text(encoding="utf-8")
        ratio = count_tokens(text) / len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert 0.95 < ratio < 1.1


def test_cuts_are_between_sentences_and_repeat_whole_ones():
    text = "Ann saw it. Dr. J. Dahl did, e.g. in May. Who? Bob (a boy). He ran."
    assert list(chunks(text, 100, 10)) == [text]
    assert list(chunks(text, 18, 6)) == [
        "Ann saw it. Dr. J. Dahl did, e.g. in May.",
        "Who? Bob (a boy). He ran.",
    ]
    assert list(chunks("One a. Two b. Three c. Four d.", 6, 3)) == [
        "One a. Two b.",
        "Two b. Three c.",
        "Three c. Four d.",
    ]
    assert list(chunks("One a. Two b. Three c. Four d.", 6, 0)) == ["One a. Two b.", "Three c. Four d."]


def test_a_long_sentence_is_cut_at_lines_then_words_then_anywhere():
    assert list(chunks("def f():\n    return 1\n    # more", 7, 0)) == ["def f():", "    return 1\n    # more"]
    assert list(chunks("aa bb cc dd ee", 2, 0)) == ["aa bb", "cc dd", "ee"]
    assert list(chunks("x" * 23, 2, 0)) == ["x" * 10, "x" * 10, "xxx"]


@pytest.mark.parametrize("seed", range(20))
def test_any_text_is_there_whole_and_no_chunk_is_over_the_budget(seed):
    draw = random.Random(seed)
    words = ["a", "Harbor", "x" * 40, ".", "!", "\n", "\n\n", "  ", "Dr.", "日本", ". ", "? ", '"']
    text = " ".join(draw.choice(words) for _ in range(draw.randint(1, 400)))
    budget = draw.randint(16, 40)
    for overlap in (0, draw.randint(1, budget // 2)):
        passages = list(chunks(text, budget, overlap))
        assert all(count_tokens(chunk) <= budget for chunk in passages)
        at, letters = 0, "".join(text.split())  # each chunk begins no later than the last one ended
        for chunk in ("".join(chunk.split()) for chunk in passages):
            start = at if overlap == 0 else max(s for s in range(at + 1) if letters.startswith(chunk, s))
            assert letters.startswith(chunk, start)
            at = start + len(chunk)
        assert at == len(letters)


@pytest.mark.parametrize("blanks", ["\n", " ", " \n", "\r\n", "\t"])
def test_blanks_make_no_chunk_long_and_none_empty(blanks):
    passages = list(chunks("Start" + blanks * 80_000 + "end.", 120, 0))
    assert [chunk.strip() for chunk in passages] == ["Start", "end."]
    assert all(count_tokens(chunk) <= 120 for chunk in passages)


@pytest.mark.parametrize("piece", ["x", " ", ".", '."', ". ", "\n \n", "word ", "A. "])
def test_a_huge_line_takes_no_time_to_speak_of(piece):
    start = time.perf_counter()
    passages = list(chunks(piece * 100_000, 128, 24))
    assert time.perf_counter() - start < 20
    assert all(len(chunk) < 128 * 64 for chunk in passages)
    assert bool(passages) == bool(piece.strip())
