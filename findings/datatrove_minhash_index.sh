#!/usr/bin/env bash
# datatrove 0.10.1, Python 3.11: MinHash against an index takes out one copy of each of its texts, and leaves others
#
# Valid input: an index of 20 texts, the questions of a test, made with `MinhashBuildIndex`; and a dataset of 60 other
# texts, each twice, and the 20 questions in one or more copies. `MinhashDedupBuckets` gets the folder of the index; the
# steps before and behind it, and all settings, are as usual.
#
# Expected: no question is left. The documentation of `index_folder` says that any matches of the dataset with
# signatures of the index are removed. By default, `only_dedup_in_index=True`, matches within the dataset are ignored,
# so that the other texts stay, both copies of them.
#
# Seen: of each question one copy is removed, and the rest of its copies stay in the dataset. In a sorted list of
# signatures a text is compared with the one before it only. The first copy stands behind the index, and matches; the
# second stands behind the first, which is of the dataset, and is ignored. Copies that differ by a word are removed if
# one of their 14 signatures is like the index and unlike all texts before; what is left grows with the copies. With
# `only_dedup_in_index=False` no equal copy is left, but the copies of the other texts go as well. There is no warning.
# To run all steps again on the result removes one copy more.
#
# Why it matters: to keep the questions of a benchmark out of the training data is what an index is for, and just the
# ones that are all over the web have copies. The statistics have 20 matches, one for each question, as if all was well.
#
# Output (copies of the questions left: by datatrove; all that have no signature like one of the index, by hand; by
# datatrove, run twice; with `only_dedup_in_index=False`; other texts left by default, and with False):
#   copies of the questions       default  by hand  twice  False       others  False
#   1 of each, equal                    0        0      0      0          120     60
#   2 of each, equal                   20        0      0      0          120     60
#   3 of each, equal                   40        0     20      0          120     60
#   5 of each, equal                   80        0     60      0          120     60
#   1 of each, a word less              0        0      0      0          120     60
#   2 of each, a word less              1        0      0      0          120     60
#   3 of each, a word less              9        2      3      2          120     60
#   5 of each, a word less             26        8      9      6          120     60
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet datatrove==0.10.1 numpy==2.4.6 tokenizers==0.23.3 regex==2026.11.19 \
  xxhash==3.8.2 || exit 2
HOME="$work" OMP_NUM_THREADS=1 TQDM_DISABLE=1 "$work/venv/bin/python" - "$work" <<'PY'
import sys
from pathlib import Path

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashBuildIndex, MinhashConfig
from datatrove.utils.word_tokenizers import WordTokenizer
from loguru import logger

QUESTIONS, OTHERS, WORDS = 20, 60, 50
work = Path(sys.argv[1])
config = MinhashConfig()
BUCKETS = config.num_buckets
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


def new_texts(count):
    return [" ".join(rng.choice(vocabulary, WORDS)) for _ in range(count)]


def one_word_less(text):
    words = text.split()
    del words[rng.integers(len(words))]
    return " ".join(words)


def documents(texts):
    return (Document(text=text, id=str(number)) for number, text in enumerate(texts))


def signatures(folder, texts):
    MinhashDedupSignature(str(folder), config, language=Spaces()).run(documents(texts))
    return str(folder)


def deduplicated(name, texts, **options):
    """The texts that are left, by the four steps of datatrove, and the number of matches with the index."""
    signed = signatures(work / name / "signatures", texts)
    pairs, removed = str(work / name / "pairs"), str(work / name / "removed")
    matches = set()
    for bucket in range(BUCKETS):
        step = MinhashDedupBuckets(signed, pairs, index_folder=index, config=config, **options)
        step.run(rank=bucket, world_size=BUCKETS)
        matches.add(step.stats["index_match"].total)
    MinhashDedupCluster(pairs, removed, config).run()
    return [document.text for document in MinhashDedupFilter(removed).run(documents(texts))], matches


def tuples(text):
    """The signatures of a text, one for each bucket."""
    step = MinhashDedupSignature(str(work / "unused"), config, language=Spaces())
    return [(bucket, *hashes) for bucket, hashes in enumerate(step.get_signature(step.get_shingles(text)))]


def by_hand(texts):
    return [text for text in texts if known.isdisjoint(tuples(text))]


questions, others = new_texts(QUESTIONS), new_texts(OTHERS)
index = str(work / "index")
signed_questions = signatures(work / "test", questions)
for bucket in range(BUCKETS):
    MinhashBuildIndex(signed_questions, index, "test", config).run(bucket=bucket, world_size=BUCKETS)
known = {row for text in questions for row in tuples(text)}
assert len(known) == BUCKETS * QUESTIONS  # No two questions have a signature in common.


def counts(texts):
    of_others = sum(text in others for text in texts)
    return len(texts) - of_others, of_others


print("copies of the questions       default  by hand  twice  False       others  False")
for kind, change in (("equal", lambda text: text), ("a word less", one_word_less)):
    for copies in (1, 2, 3, 5):
        texts = [change(text) for text in questions for _ in range(copies)] + others + others
        texts = [texts[place] for place in rng.permutation(len(texts))]
        name = f"{copies} of each, {kind}"
        default, matches = deduplicated(name, texts)
        # A second pass with nothing to remove would log that there is nothing.
        twice = default if copies == 1 else deduplicated(name + ", twice", default)[0]
        within, _ = deduplicated(name + ", within", texts, only_dedup_in_index=False)
        left, of_others = counts(default)
        hand, others_by_hand = counts(by_hand(texts))
        print(
            f"{name:28}{left:9}{hand:9}{counts(twice)[0]:7}{counts(within)[0]:7}{of_others:13}{counts(within)[1]:7}"
        )
        assert of_others == others_by_hand == 2 * OTHERS and counts(within)[1] == OTHERS, name
        assert counts(within)[0] <= hand <= left, name
        if kind == "equal":
            assert (left, hand, counts(twice)[0]) == ((copies - 1) * QUESTIONS, 0, max(copies - 2, 0) * QUESTIONS), name
            assert matches == {QUESTIONS}, name
        assert copies < 3 or left >= hand + 5, name
assert not warnings, warnings
PY
