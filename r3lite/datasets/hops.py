"""Sub-questions: MuSiQue's made readable; those that HotpotQA and 2WikiMultiHopQA lack made by rule, without a teacher.

A sub-question may use only what is known by then: the question, and the answers of earlier hops. Nothing else from
the gold paragraphs may leak into it, or a model would learn to ask for what it cannot know.
"""

import html
import re

from r3lite.core.answer_match import SENTENCE, in_a_row, split_words
from r3lite.core.episode import Document, Hop, Question

PERSONS = re.compile(
    "performer|composer|author|director|producer|screenwriter|lyricist|founder|creator|editor|architect|cast member|"
    "father|mother|spouse|husband|wife|sibling|child|son|daughter|grandchild|uncle|aunt|stepfather|stepmother|"
    "(paternal|maternal) grand(father|mother)|(father|mother|sibling)-in-law|head of (state|government)|"
    "chief executive officer|doctoral advisor|winner|head coach",
    re.IGNORECASE,
)
# Wikidata relations that are not nouns; `of what` follows from the others by `relation_question`.
PHRASES = {
    "located in the administrative territorial entity": "In which administrative territorial entity is {x} located?",
    "contains administrative territorial entity": "Which administrative territorial entity does {x} contain?",
    "shares border with": "What does {x} share a border with?",
    "located in or next to body of water": "Which body of water is {x} located in or next to?",
    "located on terrain feature": "On which terrain feature is {x} located?",
    "mouth of the watercourse": "Where is the mouth of {x}?",
    "licensed to broadcast to": "Where is {x} licensed to broadcast to?",
    "applies to jurisdiction": "Which jurisdiction does {x} apply to?",
    "educated at": "Where was {x} educated?",
    "member of political party": "Which political party is {x} a member of?",
    "member of sports team": "Which sports team is {x} a member of?",
    "member of": "What is {x} a member of?",
    "present in work": "In which work is {x} present?",
    "position played on team / speciality": "Which position does {x} play?",
    "conflict": "In which conflict did {x} take part?",
    "location": "Where is {x}?",
    "location of formation": "Where was {x} formed?",
    "residence": "Where does {x} live?",
    "instance of": "What is {x} an instance of?",
    "capital of": "What is {x} the capital of?",
    "follows": "What does {x} follow?",
    "crosses": "What does {x} cross?",
    "lyrics by": "Who wrote the lyrics of {x}?",
    "has part": "What is a part of {x}?",
    "publication date": "When was {x} published?",
    "inception": "When was {x} founded?",
    "date of birth": "When was {x} born?",
    "date of death": "When did {x} die?",
    "place of birth": "Where was {x} born?",
    "place of death": "Where did {x} die?",
    "place of burial": "Where is {x} buried?",
    "country of citizenship": "Of which country is {x} a citizen?",
    "place of detention": "Where was {x} detained?",
}
FACTS = 300  # characters of the facts that a comparison writes down: a step must fit into a turn of the model
VERBAL = re.compile(r"\b(of|by|in|at|to|with|for|from|after|on|as)$")


def relation_question(subject: str, relation: str) -> str:
    """`X >> relation` as a question: `Paris >> capital of` becomes `What is Paris the capital of?`."""
    relation = " ".join(relation.split())
    if relation.lower() in PHRASES:
        return PHRASES[relation.lower()].format(x=subject)
    if VERBAL.search(relation):
        return f"What is {subject} {relation}?"
    return f"{'Who' if PERSONS.fullmatch(relation) else 'What'} is the {relation} of {subject}?"


def natural(text: str) -> str:
    """A MuSiQue sub-question in plain English: no `>>`, no stray spaces, a capital and a question mark."""
    text = " ".join(text.split())
    text = re.sub(r" ([?,.;:)]|'s\b)", r"\1", text)
    subject, arrow, relation = text.partition(" >> ")
    if arrow:
        return relation_question(subject.strip(), relation.strip(" ?"))
    text = text[:1].upper() + text[1:]
    return text + "?" if text[-1:].isalnum() or text[-1:] in "\")'" else text  # annotators often left it out


def from_evidences(question: Question, evidences, supporting: dict[str, list[str]]) -> tuple[Hop, ...]:
    """2WikiMultiHopQA: one hop per evidence (subject, relation, object; single spaces), in the data set's order.

    A subject that is the object of an earlier evidence becomes `#i`. Evidences that share subject and relation are one
    hop with several answers. The paragraph of a hop is the gold one titled like the subject, else the one that names
    both subject and object. Returns nothing if a hop has no paragraph. `supporting` as in `from_supporting`.
    """
    merged: dict[tuple[str, str], list[str]] = {}
    for subject, relation, value in evidences:
        merged.setdefault((subject, relation), []).append(value)
    found: list[Hop] = []
    for (subject, relation), values in merged.items():
        document = _paragraph_of(question, subject, values)
        if document is None:
            return ()
        earlier = next((i for i, hop in enumerate(found, 1) if hop.answer.casefold() == subject.casefold()), None)
        asked = f"#{earlier}" if earlier else _literal(subject)
        answer = " and ".join(dict.fromkeys(values))
        evidence = _brief(_telling(supporting[document.title], *values))
        found.append(Hop(relation_question(asked, relation), answer, document, evidence))
    return tuple(found)


def _paragraph_of(question: Question, subject: str, values: list[str]) -> Document | None:
    named = [d for d in question.gold if name_of(d.title).casefold() == name_of(subject).casefold()]
    both = (d for d in question.gold if _mentions(d.text, subject) and any(_mentions(d.text, v) for v in values))
    return named[0] if named else next(both, None)


def from_supporting(question: Question, supporting: dict[str, list[str]]) -> tuple[Hop, ...]:
    """HotpotQA: hops from the two paragraphs of the supporting facts; nothing if there are not two.

    `supporting` maps a gold title to its supporting sentences. By the question's `type` there are:

    - comparison: one hop per paragraph, in the order in which the question names them; its answer is the supporting
      sentences themselves, the facts to compare, as far as they are short.
    - bridge: two hops. The second paragraph is the one that has the answer, the first leads there. The first hop looks
      up the name of its paragraph if the question has it, else the question itself; its answer is the bridge entity,
      that is the title of one paragraph that the other one mentions, which the second hop looks up.
    """
    if len(question.gold) != 2:
        return ()
    if "comparison" in question.type:
        a, b = sorted(question.gold, key=lambda d: _position(question.text, d.title))
        names = name_of(a.title), name_of(b.title)
        names = names if names[0] != names[1] else (a.title, b.title)
        facts = [(d, _brief(supporting[d.title])) for d in (a, b)]
        return tuple(Hop(_literal(name), " ".join(fact), d, fact) for name, (d, fact) in zip(names, facts))
    sentences = {title: " ".join(named) for title, named in supporting.items()}
    first, second = _bridge_order(question, sentences)
    bridge, answer = _bridge(question, first, second, sentences), question.answers[0]
    known = name_of(first.title)
    lead = known if known != bridge and _overlap(known, question.text) == 1 else question.text
    lead_facts, facts = _telling(supporting[first.title], bridge), _telling(supporting[second.title], answer)
    return Hop(_literal(lead), bridge, first, _brief(lead_facts)), Hop("#1", answer, second, _brief(facts))


def from_paragraph(question: str, answer: str, document: Document | None) -> Hop:
    """MuSiQue: a hop whose evidence is the sentence of its paragraph that has the answer; of several, the one that has
    most of the question's words."""
    said = SENTENCE.split(" ".join(document.text.split())) if document else []
    telling = sorted((s for s in said if _mentions(s, answer)), key=lambda s: -_overlap(question, s))
    return Hop(question, answer, document, tuple(telling[:1]))


def _telling(sentences: list[str], *names: str) -> list[str]:
    """The sentences that mention one of the names; all if none does."""
    return [s for s in sentences if any(_mentions(s, name) for name in names)] or sentences


def _bridge_order(question: Question, sentences: dict[str, str]) -> tuple[Document, Document]:
    a, b = question.gold
    answer = question.answers[0]

    def leads(first: Document, second: Document) -> float:
        """A score of how well the chain first -> second explains the question."""
        evidence = 1.5 * (_mentions(sentences[second.title], answer) - _mentions(sentences[first.title], answer))
        evidence += _overlap(name_of(first.title), question.text) - _overlap(name_of(second.title), question.text)
        return evidence + 0.5 * _mentions(sentences[first.title], name_of(second.title))

    return (a, b) if leads(a, b) >= leads(b, a) else (b, a)


def _bridge(question: Question, first: Document, second: Document, sentences: dict[str, str]) -> str:
    """The entity that the first hop finds: a title that the other paragraph mentions, preferably not the question."""
    names = name_of(second.title), name_of(first.title)
    unknown = [n for n in names if _overlap(n, question.text) < 1]
    candidates: list[str] = []
    for of_first, of_second in ((sentences[first.title], sentences[second.title]), (first.text, second.text)):
        candidates += [n for n, text in ((names[0], of_first), (names[1], of_second)) if _mentions(text, n)]
    return next((n for n in candidates if n in unknown), (unknown + candidates + [names[0]])[0])


def _brief(sentences: list[str]) -> tuple[str, ...]:
    """The first sentences, as many as fit into FACTS characters; at least one."""
    kept = sentences[:1]
    for sentence in sentences[1:]:
        if len(" ".join([*kept, sentence])) > FACTS:
            break
        kept.append(sentence)
    return tuple(kept)


def name_of(title: str) -> str:
    """A title as it would stand in a sentence: `Neighbours (TV series)` is `Neighbours`."""
    title = " ".join(html.unescape(title).split())
    return re.sub(r"\s*\([^()]*\)$", "", title) or title


def _literal(text: str) -> str:
    """Text whose `#1` is not a reference to an earlier answer (`a #1 hit`), written `No. 1`."""
    return re.sub(r"#(?=\d)", "No. ", text)


def _mentions(text: str, name: str) -> bool:
    return in_a_row(split_words(name), split_words(text))


def _overlap(name: str, text: str) -> float:
    """Share of the name's words that are in the text, 0 to 1."""
    words = set(split_words(name))
    return len(words & set(split_words(text))) / max(len(words), 1)


def _position(text: str, title: str) -> int:
    at = text.casefold().find(name_of(title).casefold())
    return at if at >= 0 else len(text)
