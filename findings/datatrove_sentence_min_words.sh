#!/usr/bin/env bash
# datatrove 0.10.1, Python 3.11: with `min_words_to_remove_span`, a repeated passage is cut down to its first line
#
# Valid input: pairs of texts that have three lines in common and differ in all others, through the three steps of
# sentence deduplication: SentenceDedupSignature, SentenceFindDedups and SentenceDedupFilter, with n_sentences=3. Texts
# are split into lines (split_sentences=False) or into sentences, here the same: each line is one sentence.
#
# Expected: the first text stays as it is. In the second one the repeated lines are a span; by the name of the option,
# and by the code, which puts a span back if it has fewer words than that, the span is taken out if it has at least
# `min_words_to_remove_span` words, and else stays, all of it.
#
# Seen: only the first line of a span is remembered. So the words of that line are counted, not those of the span, and
# only that line is put back. A short passage is not spared: two of its three lines are lost. A long one is not taken
# out: its first line stays in each copy. Both are so with lines and with sentences. There is no warning.
#
# Why it matters: the option is there to leave short repetitions alone. With it, a question stays in the training data
# whose steps and answer are gone, and nothing shows that there was more. (Without the option, all three lines go.)
#
# Output (words of the three lines; the option; lines of the span that are left in the second text):
#                       min_words  expected   lines  sentences
#     3 + 6 + 3                 0         0       0          0
#     3 + 6 + 3                 3         0       0          0
#     3 + 6 + 3                 4         0       1          1
#     3 + 6 + 3                12         0       1          1
#     3 + 6 + 3                13         3       1          1
#     3 + 6 + 3               100         3       1          1
#     3 + 30 + 30              13         0       1          1
#     20 + 2 + 3               13         0       0          0
#   the second text with min_words=13:
#     Here is a page about pets.
#     Question: what purrs?
#     Thanks for your visit.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet datatrove==0.10.1 numpy==2.4.6 tokenizers==0.23.3 regex==2026.11.19 \
  xxhash==3.8.2 || exit 2
OMP_NUM_THREADS=1 TQDM_DISABLE=1 "$work/venv/bin/python" - "$work" <<'PY'
import re
import sys
import tempfile

from datatrove.data import Document
from datatrove.pipeline.dedup.sentence_dedup import (
    SentDedupConfig,
    SentenceDedupFilter,
    SentenceDedupSignature,
    SentenceFindDedups,
)
from datatrove.utils.word_tokenizers import WordTokenizer
from loguru import logger

warnings = []
logger.remove()
logger.add(lambda message: warnings.append(str(message)), level="WARNING")


class Simple(WordTokenizer):
    """Words between spaces, and sentences that end with "." or "?": so that no other package is needed."""

    def word_tokenize(self, text):
        return text.split()

    def sent_tokenize(self, text):
        return [text[start:end] for start, end in self.span_tokenize(text)]

    def span_tokenize(self, text):
        return [match.span() for match in re.finditer(r"[^\s.?][^.?]*[.?]", text)]


def deduplicated(texts, **options):
    folder = tempfile.mkdtemp(dir=sys.argv[1])
    config = SentDedupConfig(n_sentences=3, min_doc_words=0, min_num_sentences=0, **options)

    def documents():
        return (Document(text=text, id=str(number)) for number, text in enumerate(texts))

    tokenizer = Simple()
    SentenceDedupSignature(f"{folder}/signatures", config=config, language=tokenizer).run(documents())
    SentenceFindDedups(f"{folder}/signatures", f"{folder}/duplicates", config=config).run()
    filtered = SentenceDedupFilter(f"{folder}/duplicates", config=config, language=tokenizer)
    return [document.text for document in filtered.run(documents())]


def line(words):
    """A line of as many words that no other line has."""
    global used
    used += words
    return " ".join(f"w{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(used - words, used)) + "."


used = 0
pets = ["Question: what purrs?", "No dog does, but cats do.", "A cat purrs."]
first = "\n".join(["This page is about cats.", *pets, "Come back soon."])
second = "\n".join(["Here is a page about pets.", *pets, "Thanks for your visit."])
print(f"{'':20}min_words  expected   lines  sentences")
for span, minimum in (
    ([3, 6, 3], 0),
    ([3, 6, 3], 3),
    ([3, 6, 3], 4),
    ([3, 6, 3], 12),
    ([3, 6, 3], 13),
    ([3, 6, 3], 100),
    ([3, 30, 30], 13),
    ([20, 2, 3], 13),
):
    if span == [3, 6, 3]:
        texts, lines = [first, second], pets
    else:
        lines = [line(words) for words in span]
        texts = ["\n".join([line(5), *lines, line(5)]) for _ in range(2)]
    assert [len(text.split()) for text in lines] == span
    expected = 0 if sum(span) >= minimum else 3
    left = {}
    for split_sentences in (False, True):
        kept = deduplicated(texts, split_sentences=split_sentences, min_words_to_remove_span=minimum)
        assert kept[0] == texts[0]
        result = kept[1].splitlines()
        left[split_sentences] = len(result) - 2
        # The two lines of its own are there, and of the span only the first line, if that line has too few words.
        own = texts[1].splitlines()
        assert result == [own[0], *lines[: 1 if span[0] < minimum else 0], own[-1]], result
        if (span, minimum) == ([3, 6, 3], 13):
            shown = result
    label = " + ".join(map(str, span))
    print(f"  {label:18}{minimum:9}{expected:10}{left[False]:8}{left[True]:11}")
print("the second text with min_words=13:")
for text in shown:
    print(f"  {text}")
assert not warnings, warnings
PY
