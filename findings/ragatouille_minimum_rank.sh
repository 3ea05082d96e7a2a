#!/usr/bin/env bash
# ragatouille 0.0.9.post2, Python 3.11: `hard_negative_minimum_rank` is ignored, and answers become hard negatives
#
# Valid input: 30 to 100 questions, with 5 passages that answer each of them and 5 others of its topic. As in most data,
# one of the five is labelled. Training data is made by `TrainingDataProcessor` and `SimpleMiner`, with the calls of
# `RAGTrainer.prepare_training_data(..., mine_hard_negatives=True)`. The model is a bag of words, in place of one from
# the hub; for each question it puts the five answers at the ranks 1 to 5.
#
# Expected: hard negatives are drawn from the ranks behind `hard_negative_minimum_rank`, by default 10, up to the tenth
# part of the collection, at most 110. So the miner documents it, and a maintainer explains (issue 100) that the first
# ranks are left out because they may be answers without a label. No answer is a negative then.
#
# Seen: they are drawn from rank 1 on, whatever the minimum is. The result of the index is a pair, the identifiers and
# the distances. The length of the pair, 2, is compared with the minimum, and so nothing is cut off. All questions draw
# the same ten places, as the random generator is seeded anew for each of them; here one of these is the place of an
# answer, so that nearly every question has an answer as a negative. There is no warning. If the miner gets a list of
# questions, it cuts the pair itself, and returns no negatives at all.
#
# Why it matters: the model is trained to rank right answers low, most of all with a small collection, where the tenth
# part is hardly more than what should be left out. To raise the minimum, the remedy one would try, has no effect.
#
# Output (size of the collection; minimum rank; ranks of the drawn negatives; ranks that the first question can draw
# from; part of negatives that should have been left out; part of questions with an answer as a negative):
#   passages  minimum   ranks drawn    of first    too near   answers
#       1000       10     4 to  99    1 to 100        0.10      0.99
#       1000       20     4 to  99    1 to 100        0.40      0.99
#        500       10     2 to  46    1 to  50        0.49      1.00
#        500       20     2 to  46    1 to  50        0.79      1.00
#        300       10     1 to  30    1 to  30        0.49      1.00
#        300       20     1 to  30    1 to  30        0.60      1.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
# voyager 2.1.0: newer ones do not take the lists of vectors that ragatouille gives them.
"$work/venv/bin/pip" install --quiet 'torch==2.13.0' numpy==2.4.6 transformers==5.3.0 sentence-transformers==5.3.0 \
  voyager==2.1.0 srsly==2.5.2 || exit 2
# Without its other dependencies: they are for ColBERT and its indexes, which are not used here.
"$work/venv/bin/pip" install --quiet --no-deps ragatouille==0.0.9.post2 || exit 2
HOME="$work" OMP_NUM_THREADS=1 TQDM_DISABLE=1 "$work/venv/bin/python" - <<'PY'
import contextlib
import importlib.util
import io
import random
import sys
import types
import warnings

import numpy as np

# These two packages import all of ColBERT when they are loaded; their modules below do not need it.
folder = importlib.util.find_spec("ragatouille").submodule_search_locations[0]
for name, path in (("ragatouille", folder), ("ragatouille.data", folder + "/data")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]

from ragatouille.data.training_data_processor import TrainingDataProcessor
from ragatouille.negative_miners import simpleminer
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import BoW

QUESTIONS, ANSWERS, NEGATIVES = 100, 5, 10
rng = np.random.default_rng(0)
general = [f"general{number}" for number in range(60)]
topics = [[f"topic{number}{letter}" for letter in "abcd"] for number in range(QUESTIONS)]
words = general + [word for topic in topics for word in topic]
# Weights that are all different, so that no two passages have the same similarity.
model = SentenceTransformer(modules=[BoW(words, {word: 1 + 0.1 * rng.random() for word in words})], device="cpu")
simpleminer.SentenceTransformer = lambda name: model


def text(of_topic):
    return " ".join(rng.permutation([*of_topic, *rng.choice(general, 10 - len(of_topic), replace=False)]))


def collection(questions):
    """Five answers and five other passages of the topic for each question, in a random order."""
    answers = [[text(topic) for _ in range(ANSWERS)] for topic in topics[:questions]]
    others = [text(rng.choice(topic, 1)) for topic in topics[:questions] for _ in range(5)]
    passages = [passage for row in answers for passage in row] + others
    assert len(set(passages)) == len(passages)
    return answers, list(rng.permutation(passages))


all_questions = [" ".join([*topic, *rng.choice(general, 2, replace=False)]) for topic in topics]
print("passages  minimum   ranks drawn    of first    too near   answers")
for size in (100, 50, 30):
    answers, passages = collection(size)
    questions = all_questions[:size]
    of_questions, of_passages = (model.encode(texts, normalize_embeddings=True) for texts in (questions, passages))
    ranks = [dict(zip(passages, row)) for row in (-of_questions @ of_passages.T).argsort().argsort() + 1]
    for row, right in zip(ranks, answers):
        assert sorted(row[passage] for passage in right) == list(range(1, ANSWERS + 1))
    for minimum in (10, 20):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            miner = simpleminer.SimpleMiner("en")
            miner.build_index(passages)
            data = TrainingDataProcessor(collection=passages, queries=questions, negative_miner=miner)
            random.seed(0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                data.process_raw_data(
                    raw_data=list(zip(questions, (right[0] for right in answers))),  # One answer is labelled.
                    data_type="pairs",
                    data_dir="",
                    export=False,
                    num_new_negatives=NEGATIVES,
                    hard_negative_minimum_rank=minimum,
                )
            lists = miner.mine_hard_negatives(questions)
        assert not caught, caught
        assert miner.min_rank == minimum and miner.max_rank == len(passages) // 10
        drawn = [(question, passages[negative]) for question, _, negative in data.training_triplets]
        assert len(drawn) == NEGATIVES * size
        of_drawn = [ranks[question][passage] for question, passage in drawn]
        near = np.mean([rank <= minimum for rank in of_drawn])
        wrong = np.mean([any((number, passage) in drawn for passage in answers[number]) for number in range(size)])
        # All that can be drawn for the first question.
        candidates = [ranks[0][passage] for passage in miner.mine_hard_negatives(questions[0])]
        label = f"{len(passages):8}{minimum:9}   {min(of_drawn):3} to {max(of_drawn):3}"
        print(f"{label}   {min(candidates):2} to {max(candidates):3}{near:12.2f}{wrong:10.2f}")
        assert min(of_drawn) <= ANSWERS and min(candidates) == 1, label
        assert near >= minimum / miner.max_rank / 2 and wrong > 0.5, label
        assert lists == [[]] * size, label
        # Places among all that could be drawn: one set for all questions but the first.
        places = set()
        for number, question in enumerate(questions[1:], start=1):
            possible = [passage for passage in miner.mine_hard_negatives(question) if passage != answers[number][0]]
            places.add(tuple(sorted(possible.index(passage) for other, passage in drawn if other == number)))
        assert len(places) <= 2, label
PY
