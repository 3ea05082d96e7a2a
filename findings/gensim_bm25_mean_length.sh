#!/usr/bin/env bash
# gensim 4.4.0, Python 3.11: a BM25 model that is made from a corpus takes distinct words for the mean length
#
# Valid input: a bag-of-words corpus, given as `corpus` to OkapiBM25Model, LuceneBM25Model and AtireBM25Model, beside
# the Dictionary of the same texts, given as `dictionary`. The documentation offers both for the same statistics.
#
# Expected: BM25 as the papers that the three classes name. Lengths, and so their mean, are counted in tokens. Both ways
# give the same weights, since both arguments tell the same counts.
#
# Seen: with `dictionary`, the weights are those of the formula. With `corpus`, the mean length is the mean number of
# distinct words, while the length of a passage is still the number of its tokens. The longer the texts, the smaller is
# the mean beside the lengths: here 32 in place of 102. Most passages then count as far too long: all weights shrink,
# those of long passages most. For more than a third of 500 random questions another passage comes first.
#
# Why it matters: nothing is raised, and the scores look like scores. k1 and b tuned with the one way mean something
# else with the other, and a comparison with another package measures this mean. It does not show in short texts without
# repeated words, which tests have. Give `dictionary`.
#
# Output:
#   mean length in tokens 102.33, in distinct words 31.96
#   OkapiBM25Model   dictionary  mean 102.33   weights 1.00 to 1.00 of the right ones   first passage right: 500 of 500
#   OkapiBM25Model   corpus      mean  31.96   weights 0.43 to 0.95 of the right ones   first passage right: 310 of 500
#   LuceneBM25Model  dictionary  mean 102.33   weights 1.00 to 1.00 of the right ones   first passage right: 500 of 500
#   LuceneBM25Model  corpus      mean  31.96   weights 0.43 to 0.95 of the right ones   first passage right: 326 of 500
#   AtireBM25Model   dictionary  mean 102.33   weights 1.00 to 1.00 of the right ones   first passage right: 500 of 500
#   AtireBM25Model   corpus      mean  31.96   weights 0.43 to 0.95 of the right ones   first passage right: 327 of 500
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet gensim==4.4.0 scipy==1.17.1 numpy==2.4.6 || exit 2
"$work/venv/bin/python" - <<'PY'
from math import log

import numpy as np
from gensim.corpora import Dictionary
from gensim.models import AtireBM25Model, LuceneBM25Model, OkapiBM25Model

K1, B = 1.5, 0.75

random = np.random.default_rng(0)
words = [f"w{number}" for number in range(60)]
weights = 1 / np.arange(1, 61)
weights /= weights.sum()
texts = [random.choice(words, size=size, p=weights).tolist() for size in random.integers(2, 200, size=100)]
dictionary = Dictionary(texts)
corpus = [dictionary.doc2bow(text) for text in texts]
MEAN = sum(map(len, texts)) / len(texts)
IDF = {
    OkapiBM25Model: lambda having: log((len(texts) - having + 0.5) / (having + 0.5)),
    LuceneBM25Model: lambda having: log(1 + (len(texts) - having + 0.5) / (having + 0.5)),
    AtireBM25Model: lambda having: log(len(texts) / having),
}


def by_hand(variant: type, word: str, text: list[str]) -> float:
    count, having = text.count(word), sum(word in other for other in texts)
    share = count / (count + K1 * (1 - B + B * len(text) / MEAN))
    return IDF[variant](having) * share * (1 if variant is LuceneBM25Model else K1 + 1)


def by_gensim(model) -> list[dict[str, float]]:
    return [{dictionary[number]: weight for number, weight in model[bag]} for bag in corpus]


def first(bags: list[dict[str, float]], question: list[str]) -> int:
    scores = [sum(bag.get(word, 0) for word in question) for bag in bags]
    return int(np.argmax(np.round(scores, 9)))


distinct = sum(len(set(text)) for text in texts) / len(texts)
print(f"mean length in tokens {MEAN:.2f}, in distinct words {distinct:.2f}")
# A question has three of the words that fewer than half of the texts have, so that no idf is negative.
rare = [word for word in words if 0 < sum(word in text for text in texts) < len(texts) / 2]
questions = [random.choice(rare, size=3, replace=False).tolist() for _ in range(500)]
for variant in IDF:
    right = [{word: by_hand(variant, word, text) for word in rare if word in text} for text in texts]
    for name, statistics in (("dictionary", {"dictionary": dictionary}), ("corpus", {"corpus": corpus})):
        model = variant(**statistics, k1=K1, b=B)
        seen = by_gensim(model)
        ratios = [seen[place][word] / weight for place, bag in enumerate(right) for word, weight in bag.items()]
        equal = sum(first(seen, question) == first(right, question) for question in questions)
        print(
            f"{variant.__name__:15}  {name:10}  mean {model.avgdl:6.2f}   "
            f"weights {min(ratios):.2f} to {max(ratios):.2f} of the right ones   "
            f"first passage right: {equal} of {len(questions)}"
        )
        if name == "dictionary":
            assert np.isclose(model.avgdl, MEAN) and np.allclose(ratios, 1) and equal == len(questions)
        else:
            assert np.isclose(model.avgdl, distinct) and max(ratios) < 1 and equal < 350
PY
