"""Rewards for the text that was written: its length, its script, its words.

Every function takes an episode; what it returns is the reward of the last step. Penalties are 0 or below, and have
weights above 0.
"""

import re
import unicodedata

from r3lite.core.answer_match import normalize, split_words
from r3lite.core.episode import Episode

CONNECTORS = (
    "because", "since", "therefore", "thus", "hence", "so", "then", "however", "but", "first", "next", "finally",
)  # fmt: skip
# Words that say nothing about a subject. `normalize` removes articles.
STOP_WORDS = {
    "and", "or", "of", "in", "on", "at", "to", "by", "for", "from", "with", "as", "is", "are", "was", "were", "be",
    "been", "it", "its", "this", "that", "these", "those", "he", "she", "his", "her", "they", "their", "who", "which",
    "what", "when", "where", "not",
}  # fmt: skip
# Scripts that are written together count as one. The marks for a long vowel and for repetition are letters with names
# of their own.
ONE_SCRIPT = dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC", "VERTICAL", "BOPOMOFO"), "CJK")
NO_SCRIPT = "MODIFIER"  # such as the apostrophes that several scripts have


def length_penalty(episode: Episode, most: int = 300) -> float:
    """Returns 0 up to `most` words, then a penalty that grows evenly to -1 at twice as many words or more."""
    excess = len(_written_text(episode).split()) - most
    share = max(excess / max(most, 1), 0.0)
    return -min(share, 1.0)


def language_penalty(episode: Episode) -> float:
    """Returns minus the share of letters in another script than those of the question and its gold answers, 0 to -1.

    It distinguishes scripts, not languages: English and French are the same to it.
    """
    reference = " ".join([episode.question.text, *episode.question.answers])
    scripts = set(map(_script, _letters(reference)))
    letters = _letters(_written_text(episode))
    if not letters:
        return 0.0
    foreign = sum(_script(letter) not in scripts for letter in letters)
    return -foreign / len(letters)


def keyword_overlap(episode: Episode) -> float:
    """Returns the share of a gold answer's keywords that the analyses and the answer have, 0 to 1; the best gold answer
    counts.

    Keywords are the words of the normalized gold answer without stop words; all its words if all are stop words.
    """
    text = " ".join(f"{step.analysis} {step.answer or ''}" for step in episode.steps)
    words = set(split_words(normalize(text)))
    shares = []
    for gold in episode.question.answers:
        gold_words = set(split_words(normalize(gold)))
        keywords = gold_words - STOP_WORDS or gold_words
        if keywords:
            shares.append(len(keywords & words) / len(keywords))
    return max(shares, default=0.0)


def logical_connectors(
    episode: Episode,
    most: int = 3,
    words: tuple[str, ...] = CONNECTORS,
) -> float:
    """Returns how many different ones of `words` the analyses have, divided by `most`; at most 1.

    They are found as whole words, in any letter case.
    """
    text = " ".join(step.analysis for step in episode.steps)
    count = sum(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None for word in words)
    return min(count / max(most, 1), 1.0)


def _written_text(episode: Episode) -> str:
    """Returns all that the model wrote, without the words of its format."""
    texts: list[str] = []
    for step in episode.steps:
        texts += [step.analysis, *step.queries, step.verification, step.answer or ""]
    return " ".join(filter(None, texts))


def _letters(text: str) -> list[str]:
    """Returns the letters that belong to a script; those of full or half width, superscripts and the like are taken as
    plain ones."""
    letters = [character for character in unicodedata.normalize("NFKC", text) if character.isalpha()]
    return [letter for letter in letters if _script(letter) != NO_SCRIPT]


def _script(letter: str) -> str:
    """Returns the first word of the letter's name in Unicode, such as LATIN, CYRILLIC or CJK."""
    script = unicodedata.name(letter, "").partition(" ")[0]
    return ONE_SCRIPT.get(script, script)
