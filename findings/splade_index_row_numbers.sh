#!/usr/bin/env bash
# splade-index 0.2.0, Python 3.11: with the default backend, return_as="doc_ids" returns row numbers
#
# Valid input: passages with integer ids of their own (`document_ids`), and questions; `retrieve(..., return_as=...)`.
# A stand-in for a SPLADE model maps words to weights, so that nothing has to be downloaded.
#
# Expected: "doc_ids" returns the ids that "tuple" returns beside documents and scores, as the docstring says.
#
# Seen: with backend="numba" it does. With backend="numpy", which is the default, it returns the rows of the passages in
# the list that was indexed. Here each of these numbers is the id of another passage.
#
# Why it matters: nothing is raised. Where ids are integers, as in MS MARCO or a database, the numbers look like ids and
# name other passages: recall is measured on those, and those are fetched. It does not show in examples without
# `document_ids`, where ids are the rows. Take `doc_ids` of the tuple.
#
# Output:
#   numpy  tuple [3, 2, 0, 1]  doc_ids [0, 1, 3, 2]  right: False
#   numba  tuple [3, 2, 0, 1]  doc_ids [3, 2, 0, 1]  right: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet 'torch==2.13.0' numpy==2.4.6 numba==0.68.1 tqdm==4.67.1 || exit 2
# Without its dependencies: sentence-transformers is only needed for a model.
"$work/venv/bin/pip" install --quiet --no-deps splade-index==0.2.0 || exit 2
"$work/venv/bin/python" -W ignore - <<'PY'
import torch
from splade_index import SPLADE

IDS = [3, 2, 1, 0]
PASSAGES = ["lake lake lake", "lake lake", "river", "lake river"]
WORDS = {"lake": 0, "river": 1}


class Words:
    """Gives each word of a text its count as weight."""

    class tokenizer:
        get_vocab = staticmethod(lambda: WORDS)

    def encode_document(self, texts, **_):
        rows = [[text.split().count(word) for word in WORDS] for text in texts]
        return torch.tensor(rows, dtype=torch.float32).to_sparse()

    def encode_query(self, texts, **_):
        return list(self.encode_document(texts))


for backend, right in (("numpy", False), ("numba", True)):
    index = SPLADE(backend=backend)
    index.index(Words(), PASSAGES, document_ids=IDS, show_progress=False)
    whole = index.retrieve(["lake"], k=4, show_progress=False)
    ids = index.retrieve(["lake"], k=4, return_as="doc_ids", show_progress=False)
    assert [PASSAGES[IDS.index(number)] for number in whole.doc_ids[0]] == list(whole.documents[0])
    equal = whole.doc_ids[0].tolist() == ids[0].tolist()
    print(f"{backend}  tuple {whole.doc_ids[0].tolist()}  doc_ids {ids[0].tolist()}  right: {equal}")
    assert equal == right
PY
