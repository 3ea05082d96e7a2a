#!/usr/bin/env bash
# chonkie 1.7.0, Python 3.11: TokenChunker returns decoded tokens as passages, with places that are not theirs
#
# Valid input: a text, and TokenChunker with the tokenizer of words that comes with it, or with an uncased WordPiece
# one, as E5 and other encoders have, made here from the text itself.
#
# Expected: it "splits text into fixed-size token chunks". A chunk is a piece of the text, and start_index and end_index
# are its place "in the original text". So it is with the tokenizer of characters, and for SentenceChunker with all.
#
# Seen: a chunk is what its tokens decode to, and its place is the sum of the lengths before. With WordPiece the
# passages are lower-case, without accents, with blanks around punctuation, and begin with "##" where a word was cut.
# With words the blank between two chunks is counted in neither, so each place is one character further off than the
# one before. With an overlap the places for words are right.
#
# Why it matters: one counts in tokens of the encoder to fill its window, and indexes what comes back. The encoder
# hardly notices, for it lowers case itself. But the model that reads the passages, and the comparison of an answer with
# them, get "jose saramago isn ' t". By the places, citations and the labels of relevant sentences are looked up.
#
# Output (chunks; those that are in the text; those that are at their place; the last one, and what is at its place):
#   characters                64  64  64  'haga. ' 'haga. '
#   words                     11  11   1  'was born in Azinhaga. ' 'there; he was born in '
#   words, overlap 2          14  14  14  'e was born in Azinhaga. ' 'e was born in Azinhaga. '
#   WordPiece                 40   1   0  '##inhaga.' ''
#   SentenceChunker, words    12  12  12  'e was born in Azinhaga. ' 'e was born in Azinhaga. '
#   same, WordPiece           12  12  12  'e was born in Azinhaga. ' 'e was born in Azinhaga. '
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet chonkie==1.7.0 chonkie-core==0.10.2 tokie==0.1.4 numpy==2.4.6 || exit 2
"$work/venv/bin/pip" install --quiet --no-deps tokenizers==0.23.3 || exit 2
"$work/venv/bin/python" - <<'PY'
from chonkie import SentenceChunker, TokenChunker
from chonkie.chunker.base import BaseChunker
from tokenizers import BertWordPieceTokenizer, Tokenizer

TEXT = "Zürich lies in Switzerland. José Saramago isn't from there; he was born in Azinhaga. " * 6

trained = BertWordPieceTokenizer(lowercase=True)
trained.train_from_iterator([TEXT], vocab_size=60, show_progress=False)
word_piece = Tokenizer.from_str(trained.to_str())


def measured(label: str, chunker: BaseChunker) -> tuple[int, int, int]:
    """The number of chunks, of those that are in the text, and of those that are at their place in it."""
    chunks = chunker.chunk(TEXT)
    within = sum(chunk.text in TEXT for chunk in chunks)
    placed = sum(TEXT[chunk.start_index : chunk.end_index] == chunk.text for chunk in chunks)
    last = chunks[-1]
    there = TEXT[last.start_index : last.end_index]
    print(f"{label:24} {len(chunks):3} {within:3} {placed:3}  {last.text[-24:]!r} {there[-24:]!r}")
    return len(chunks), within, placed


characters = measured("characters", TokenChunker("character", chunk_size=8))
words = measured("words", TokenChunker("word", chunk_size=8))
overlap = measured("words, overlap 2", TokenChunker("word", chunk_size=8, chunk_overlap=2))
pieces = measured("WordPiece", TokenChunker(word_piece, chunk_size=8))
sentences = measured("SentenceChunker, words", SentenceChunker("word", chunk_size=8))
sentences_pieces = measured("same, WordPiece", SentenceChunker(word_piece, chunk_size=16))

for right in (characters, overlap, sentences, sentences_pieces):
    assert right[0] == right[1] == right[2]
assert words[1] == words[0]
assert words[2] == 1
assert pieces[1] < pieces[0] / 2
assert pieces[2] < pieces[0] / 2
PY
