#!/usr/bin/env bash
# datatrove 0.10.1, Python 3.11: a Bloom filter of 65,536 bytes has two usable bits, and drops all but one document
#
# Valid input: 300 documents of 50 words, through `SingleBloomFilter`: 200 unlike ones, and 100 copies of them. For the
# size of the filter there are some round numbers of bytes, and two that are one less than a power of two. With seven
# hashes, each is enough for a chance of a false match of 0.4 % or less.
#
# Expected: the 200 documents are kept and the copies dropped. The documentation has `m_bytes` for the size in bytes, so
# that there are 8 * m_bytes bits, and the chance of a false match that datatrove works out and logs is for as many.
# Without `k`, the best number of hashes for that size and `expected_elements`: bits / elements * ln 2, here 32.
#
# Seen: a hash is brought into the range of the filter by a bitwise "and" with m_bytes, not by a remainder. The place it
# gets is made of the bits that m_bytes has as a number: with a power of two, place 0 or place m_bytes, so after one
# document every text "was seen". A million has seven such bits, and so 128 places. Only one less than a power of two
# comes close to what is meant, with an eighth of the stated size: with 65,535 bytes there are 2 false matches in 100,
# in place of one in a million. The logged chance does not tell: with a million bytes it is 1e-14, and 198 of 200 unlike
# documents are dropped. There is no warning.
# `k=None` takes the bytes for bits as well, the other way round: it gives 256, with a chance of 0.4. From a chance of
# 5 % on, a warning is logged.
#
# Why it matters: a filter of a round size deletes nearly all of a corpus, and says that they were duplicates.
#
# Output (chance of a false match by datatrove's formula; share of the 13-grams of 100 other documents that the filter
# takes for seen; documents kept; bits of the filter that are set):
#                                  chance    false  unlike  copies    bits
#   exact set of 13-grams               0        0     200       0
#   k=7, m_bytes=16383            4.1e-03  7.5e-01     199       0   15651
#   k=7, m_bytes=65535            1.1e-06  2.2e-02     200       0   36148
#   k=7, m_bytes=65536            1.1e-06  1.0e+00       1       0       2
#   k=7, m_bytes=100000           7.0e-08  1.0e+00       2       0      64
#   k=7, m_bytes=1000000          9.5e-15  1.0e+00       2       0     128
#   k=7, m_bytes=1048576          6.8e-15  1.0e+00       1       0       2
#   k=32, m_bytes=65535           2.5e-10
#   k=None (256), m_bytes=65535   3.8e-01
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet datatrove==0.10.1 numpy==2.4.6 tokenizers==0.23.3 regex==2026.11.19 \
  xxhash==3.8.2 || exit 2
OMP_NUM_THREADS=1 "$work/venv/bin/python" - "$work/filter" <<'PY'
import math
import sys

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.dedup.bloom_filter import BloomFilterConfig, SingleBloomFilter, get_false_positive_prob
from datatrove.utils.word_tokenizers import WordTokenizer
from loguru import logger

UNLIKE, COPIES, WORDS, N = 200, 100, 50, 13
ELEMENTS = (UNLIKE + COPIES) * (WORDS - N + 1)
warnings = []
logger.remove()
logger.add(lambda message: warnings.append(str(message)), level="WARNING")


class Spaces(WordTokenizer):
    """Words of letters only, between spaces: so that no other package is needed to split them."""

    def word_tokenize(self, text):
        return text.split()

    def sent_tokenize(self, text):
        return [text]

    def span_tokenize(self, text):
        return [(0, len(text))]


rng = np.random.default_rng(0)
vocabulary = ["".join(rng.choice(list("abcdefghij"), 6)) for _ in range(5000)]
texts = [" ".join(rng.choice(vocabulary, WORDS)) for _ in range(UNLIKE)]
texts += texts[:COPIES]
others = [" ".join(rng.choice(vocabulary, WORDS)) for _ in range(100)]


def counts(kept):
    return sum(number < UNLIKE for number in kept), sum(number >= UNLIKE for number in kept)


seen, kept = set(), []
for number, text in enumerate(texts):
    words = text.split()
    grams = [tuple(words[i : i + N]) for i in range(WORDS - N + 1)]
    if np.mean([gram in seen for gram in grams]) <= 0.8:
        kept.append(number)
    seen.update(grams)
print(f"{'':28}{'chance':>9}{'false':>9}  unlike  copies    bits")
print(f"{'exact set of 13-grams':28}{0:9}{0:9}{counts(kept)[0]:8}{counts(kept)[1]:8}")
assert counts(kept) == (UNLIKE, 0)

for size, at_most, places in (
    (16383, UNLIKE, 2**14),
    (65535, UNLIKE, 2**16),
    (65536, 1, 2),
    (100000, 2, 2**6),
    (1000000, 2, 2**7),
    (1048576, 1, 2),
):
    config = BloomFilterConfig(m_bytes=size, k=7, expected_elements=ELEMENTS)
    bloom = SingleBloomFilter(sys.argv[1], config, language=Spaces())
    documents = (Document(text=text, id=str(number)) for number, text in enumerate(texts))
    kept = [int(document.id) for document in bloom.run(documents)]
    chance = get_false_positive_prob(size, ELEMENTS, 7)
    assert math.isclose(chance, (1 - (1 - 1 / (8 * size)) ** (7 * ELEMENTS)) ** 7)
    bits = int(np.unpackbits(np.frombuffer(bloom.bit_vector, dtype=np.uint8)).sum())
    unlike, copies = counts(kept)
    false = np.mean([bloom.query(row) for text in others for row in bloom.get_indexes(bloom.get_shingles(text))])
    print(f"{f'k=7, m_bytes={size}':28}{chance:9.1e}{false:9.1e}{unlike:8}{copies:8}{bits:8}")
    assert len(bloom.bit_vector) == size and bloom.total_shingles == ELEMENTS and not warnings, warnings
    assert places == 2 ** bin(size).count("1") and bits <= places
    assert copies == 0 and unlike <= at_most and (size != 65535 or unlike == UNLIKE)
    assert false > 0.6 if size != 65535 else 0.001 < false < 0.1

best = math.ceil(8 * 65535 / ELEMENTS * math.log(2))
chosen = BloomFilterConfig(m_bytes=65535, expected_elements=ELEMENTS).k
for label, k in ((f"k={best}", best), (f"k=None ({chosen})", chosen)):
    print(f"{label + ', m_bytes=65535':28}{get_false_positive_prob(65535, ELEMENTS, k):9.1e}")
assert (best, chosen) == (32, 256)
PY
