"""The text that the tiny base is pretrained on: samples and their curriculum.

Owns the layouts: lists of (text, loss weight), whose texts are encoded as one string. Every sample comes from a fresh
small world, whose name words are disjoint from those of `data/world`: what has to be learned is to find a fact in a
text and to copy it, not the facts. Articles are read aloud, asked about, and chained in plain sentences, also where the
articles come only after the question that they answer. The step format of R3 is never shown: the words of its headings
occur in glossary lines only, one by one, so that their embeddings are trained (a LoRA adapter cannot teach tokens that
a frozen, tied embedding has never used).
"""

import random
import re

from make_world import World

SIZES = {"film": 2, "book": 1, "person": 6, "company": 2, "town": 3, "country": 2}
END, TURN, STOP = SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PHRASES = [
    "The problem analysis:",
    "The retrieval query:",
    "The retrieval documents:",
    "The final answer:",
    "The question:",
    "Question:",
    "I need to find out:",
    "Next I need to find out:",
    "That answers the question.",
    "No further retrieval is possible.",
    "Answer the question step by step.",
    "Write one step at a time.",
    "Go on with the next step.",
    "When you know the answer, give it in as few words as possible.",
    "Each step has a problem analysis, and then either a retrieval query or the final answer.",
    "The documents that a query finds will be given to you.",
] + [f"Step {n}:" for n in range(1, 10)]
GLOSSARY = (
    '{a} wrote the words "{x}" and "{y}" on a wall in {b}.',
    'In {b} people say "{x}" where others say "{y}"',
    'The letters of "{x}" were painted by {a}.',
    '"{x}" is a song, and "{y}" is another.',
    '{a} was asked to read aloud: "{x}"\nThen {b} read: "{y}"',
)
HEARD, ASKED, SAID = 0.1, 0.3, 1.0  # loss weights: articles and questions; free choices of words; answers
FOUND = ("Here is what was found:", "Articles:", "The library has this:", "Read this:", "From the encyclopedia:")
FIRST = ("First:", "To begin:", "I ask:", "Let me look up:")
NEXT = ("Then:", "Next:", "Now I ask:", "After that:")
WAIT = ("", "", "\nLet me see.", "\nI will read what is found.")
LAST = ("So the answer is", "Therefore the answer is", "This gives the answer:", "Answer:")


def turn(role: str, *parts: tuple[str, float]) -> list[tuple[str, float]]:
    """One chat turn; whoever speaks as the assistant is also taught to end it."""
    return [(f"{TURN}{role}\n", 0.0), *parts, (STOP, SAID if role == "assistant" else 0.0), ("\n", 0.0)]


def numbered_articles(articles: list[dict], rng: random.Random) -> list[tuple[str, float]]:
    """Numbered articles. Where a title comes back in its text, it can be copied, so it counts more."""
    parts = [(rng.choice(FOUND), 0.0)]
    for n, article in enumerate(articles, 1):
        parts.append((f"\n[{n}]", 0.0))
        parts.append((f" {article['title']}:", HEARD))
        pieces = re.split(rf"( ?{article['title']})", " " + article["text"])
        parts += [(piece, ASKED if article["title"] in piece else HEARD) for piece in pieces if piece]
    return parts


def hop_answer(hop) -> tuple[str, float]:
    return f"{hop.question} {hop.answer.name}.", SAID


def around(world: World, rng: random.Random, subjects: list, extra: int) -> list[dict]:
    """The subjects' articles and `extra` others, first those that mention a subject, as a search would find them."""
    gold = [s.article for s in subjects]
    other_articles = [a for a in world.articles() if a not in gold]
    rng.shuffle(other_articles)
    if rng.random() < 0.7:
        other_articles.sort(key=lambda a: not any(s.name in a["text"] for s in subjects))
    picked = gold + other_articles[:extra]
    rng.shuffle(picked)
    return picked


def reading(world: World, rng: random.Random, count: int) -> list[tuple[str, float]]:
    return [*numbered_articles(rng.sample(world.articles(), count), rng), (END, HEARD)]


def recital(world: World, rng: random.Random) -> list[tuple[str, float]]:
    """Names, and the same in another order: the shortest text that rewards copying what followed a word before."""
    names = [e.name for e in rng.sample(world.order, rng.randint(4, 9))]
    reordered = rng.sample(names, len(names))
    return (
        [("Names:", 0.0)]
        + [(f" {name},", 0.0) for name in names]
        + [("\nAgain:", 0.0)]
        + [(f" {name},", SAID) for name in reordered]
        + [(END, 0.0)]
    )


def lesson(world: World, rng: random.Random, count: int) -> list[tuple[str, float]]:
    """Articles, then questions about any of their facts, each answered after being said again."""
    subjects = rng.sample(world.order, count)
    parts = turn("user", *numbered_articles([s.article for s in subjects], rng))
    hops = [world.hop(s, name) for s in subjects for name in s.facts]
    for hop in rng.sample(hops, min(len(hops), 5)):
        parts += turn("user", (hop.question, 0.0)) + turn("assistant", hop_answer(hop))
    return parts


def catechism(world: World, rng: random.Random, count: int) -> list[tuple[str, float]]:
    """Articles, then all that can be asked about them in one turn: the most answers to learn from per token read."""
    subjects = rng.sample(world.order, count)
    hops = [world.hop(s, name) for s in subjects for name in s.facts]
    answers = [
        part for h in rng.sample(hops, len(hops)) for part in ((f" {h.question}", HEARD), (f" {h.answer.name}.", SAID))
    ]
    return turn("user", *numbered_articles([s.article for s in subjects], rng)) + turn(
        "assistant", ("Here is all of it:", HEARD), *answers
    )


def planning(world: World, rng: random.Random, chain) -> list[tuple[str, float]]:
    """A question and the questions that it is made of, or the first of them."""
    if rng.random() < 0.4:
        return turn("user", (chain.question, 0.0)) + turn(
            "assistant", (rng.choice(FIRST), 0.0), (f" {chain.hops[0].question}", SAID)
        )
    gap = rng.choice(" \n")
    return turn("user", (f"What has to be asked for this?\n{chain.question}", 0.0)) + turn(
        "assistant", (gap.join(h.reference for h in chain.hops), SAID)
    )


def verdict(chain, rng: random.Random) -> list[tuple[str, float]]:
    return [(" " + rng.choice(LAST), ASKED), (f" {chain.answer}.", SAID)]


def chain_after(world: World, rng: random.Random, chain, extra: int) -> list[tuple[str, float]]:
    """All articles and the question in one turn, then the hops as plain sentences, then the answer."""
    articles = numbered_articles(around(world, rng, [h.subject for h in chain.hops], extra), rng)
    question = [(chain.question, 0.0)]
    first, second = (articles, question) if rng.random() < 0.5 else (question, articles)
    reasoning = [part for h in chain.hops for part in ((" ", 0.0), hop_answer(h))][1:]
    return turn("user", *first, ("\n", 0.0), *second) + turn("assistant", *reasoning, *verdict(chain, rng))


def chain_between(world: World, rng: random.Random, chain, extra: int) -> list[tuple[str, float]]:
    """The question first; the articles of each hop come only after it has been asked."""
    parts = turn("user", (chain.question, 0.0))
    reply = [(rng.choice(FIRST), ASKED)]
    for hop in chain.hops:
        parts += turn("assistant", *reply, (f" {hop.question}", SAID), (rng.choice(WAIT), ASKED))
        parts += turn("user", *numbered_articles(around(world, rng, [hop.subject], extra), rng))
        reply = [hop_answer(hop), (" " + rng.choice(NEXT), ASKED)]
    return parts + turn("assistant", hop_answer(chain.hops[-1]), *verdict(chain, rng))


def glossary(world: World, rng: random.Random) -> list[tuple[str, float]]:
    lines = []
    for _ in range(4):
        x, y = rng.sample(PHRASES, 2)
        a, b = rng.choice(world.entities["person"]).name, rng.choice(world.entities["town"]).name
        lines.append(rng.choice(GLOSSARY).format(x=x, y=y, a=a, b=b))
    return [("\n".join(lines), ASKED), (END, HEARD)]


def sample(rng: random.Random, progress: float, kind: str | None = None) -> list[tuple[str, float]]:
    """One sample of the curriculum: one or two articles and questions; then three; then chains, up to four hops."""
    world = World(rng, "pretraining", SIZES)
    stage = 0 if progress < 0.06 else 1 if progress < 0.25 else 2
    kinds = ("recital", "reading", "lesson", "catechism", "planning", "chain_after", "chain_between", "glossary")
    shares = ((15, 5, 15, 63, 0, 0, 0, 2), (3, 2, 10, 54, 15, 10, 0, 6), (1, 1, 6, 40, 16, 6, 25, 5))[stage]
    kind = kind or rng.choices(kinds, shares)[0]
    hops = rng.choices((1, 2, 3, 4), (5, 60, 22, 13) if stage == 2 else (20, 70, 10, 0))[0]
    chain = world.comparison() if rng.random() < 0.08 else world.chain(hops)
    if kind == "recital":
        return recital(world, rng)
    if kind == "reading":
        return reading(world, rng, rng.randint(1, 2))
    if kind == "lesson":
        return lesson(world, rng, rng.randint(*((1, 2), (2, 3), (2, 4))[stage]))
    if kind == "catechism":
        return catechism(world, rng, rng.randint(*((1, 2), (2, 3), (2, 4))[stage]))
    if kind == "planning":
        return planning(world, rng, chain)
    if kind == "glossary":
        return glossary(world, rng)
    if kind == "chain_after":
        return chain_after(world, rng, chain, rng.randint(0, stage))
    return chain_between(world, rng, chain, rng.randint(1, 2))
