"""Rewards for the text that the model wrote: its length, its script, its words.

Every function takes an episode and returns the reward of the last step. A penalty returns 0 or a negative number, so
it is used with a positive weight.
"""

import re
import unicodedata

from r3lite.core.answer_match import normalize, split_words
from r3lite.core.episode import Episode

CONNECTORS = (
    "because", "since", "therefore", "thus", "hence", "so", "then", "however", "but", "first", "next", "finally",
)  # fmt: skip
# Words that say nothing about a subject. Articles are not among them, because `normalize` removes those.
STOP_WORDS = {
    "and", "or", "of", "in", "on", "at", "to", "by", "for", "from", "with", "as", "is", "are", "was", "were", "be",
    "been", "it", "its", "this", "that", "these", "those", "he", "she", "his", "her", "they", "their", "who", "which",
    "what", "when", "where", "not",
}  # fmt: skip
# Chinese and Japanese texts mix several scripts, so these count as one, CJK. Letters that mark a long vowel or a
# repetition have names that begin with other words, such as IDEOGRAPHIC.
ONE_SCRIPT = dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC", "VERTICAL", "BOPOMOFO"), "CJK")
NO_SCRIPT = "MODIFIER"  # first word of the names of letters without a script, such as some apostrophes


def length_penalty(episode: Episode, most: int = 300) -> float:
    """Returns 0 up to `most` words, then a penalty that grows evenly to -1 at twice as many words or more."""
    excess = len(_written_text(episode).split()) - most
    share = max(excess / max(most, 1), 0.0)
    return -min(share, 1.0)


def language_penalty(episode: Episode) -> float:
    """Returns minus the share of letters whose script is neither in the question nor in its gold answers: 0 to -1.

    It distinguishes scripts, not languages: English and French have the same script.
    """
    reference = " ".join([episode.question.text, *episode.question.answers])
    scripts = set(map(_script, _letters(reference)))
    letters = _letters(_written_text(episode))
    if not letters:
        return 0.0
    foreign = sum(_script(letter) not in scripts for letter in letters)
    return -foreign / len(letters)


def keyword_overlap(episode: Episode) -> float:
    """Returns the share of a gold answer's keywords that occur in the analyses or the answer, from 0 to 1.

    If there are several gold answers, the largest share counts. Keywords are the words of the normalized gold answer
    without stop words, or all its words if all are stop words.
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
    """Returns how many different words of `words` occur in the analyses, divided by `most`; at most 1.

    Only whole words count; upper and lower case are not distinguished.
    """
    text = " ".join(step.analysis for step in episode.steps)
    count = sum(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None for word in words)
    return min(count / max(most, 1), 1.0)


def _written_text(episode: Episode) -> str:
    """Returns the text that the model wrote in all steps, without the headings of the step format."""
    texts: list[str] = []
    for step in episode.steps:
        texts += [step.analysis, *step.queries, step.verification, step.answer or ""]
    return " ".join(filter(None, texts))


def _letters(text: str) -> list[str]:
    """Returns the letters of a text that belong to a script, after compatibility normalization (NFKC).

    NFKC replaces letters of full or half width, superscripts and the like by plain letters.
    """
    letters = [character for character in unicodedata.normalize("NFKC", text) if character.isalpha()]
    return [letter for letter in letters if _script(letter) != NO_SCRIPT]


def _script(letter: str) -> str:
    """Returns the first word of the letter's name in Unicode, such as LATIN or CYRILLIC; CJK for ONE_SCRIPT."""
    script = unicodedata.name(letter, "").partition(" ")[0]
    return ONE_SCRIPT.get(script, script)
