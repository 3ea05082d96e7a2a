"""Sub-questions of the data sets, without a teacher: MuSiQue's are made readable; HotpotQA and 2WikiMultiHopQA have
none, so theirs are made by rule.

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
# Questions for the Wikidata relations that need a wording of their own; `relation_question` words all others by rule.
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
MAX_EVIDENCE = 300  # characters of the evidence of a hop: a step that quotes it must fit into a turn of the model
ENDS_IN_PREPOSITION = re.compile(r"\b(of|by|in|at|to|with|for|from|after|on|as)$")


def relation_question(subject: str, relation: str) -> str:
    """Returns `X >> relation` as a question: `Paris >> capital of` becomes `What is Paris the capital of?`."""
    relation = " ".join(relation.split())
    if relation.lower() in PHRASES:
        return PHRASES[relation.lower()].format(x=subject)
    if ENDS_IN_PREPOSITION.search(relation):  # such as `named after`
        return f"What is {subject} {relation}?"
    if PERSONS.fullmatch(relation):
        return f"Who is the {relation} of {subject}?"
    return f"What is the {relation} of {subject}?"


def natural(text: str) -> str:
    """Returns a MuSiQue sub-question in plain English: no `>>`, no stray spaces, a capital and a question mark."""
    text = " ".join(text.split())
    text = re.sub(r" ([?,.;:)]|'s\b)", r"\1", text)
    subject, arrow, relation = text.partition(" >> ")
    if arrow:
        return relation_question(subject.strip(), relation.strip(" ?"))
    text = text[:1].upper() + text[1:]
    last_character = text[-1:]
    if last_character.isalnum() or last_character in "\")'":
        return text + "?"  # annotators often left it out
    return text


def from_evidences(question: Question, evidences: list[list[str]], supporting: dict[str, list[str]]) -> tuple[Hop, ...]:
    """Returns the hops of a question of 2WikiMultiHopQA: one for each evidence, in the data set's order.

    An evidence has three texts: subject, relation and object. Evidences that share subject and relation are one hop,
    whose answer is their objects joined by "and". A subject that is the whole answer of an earlier hop i becomes `#i`.
    The paragraph of a hop is the gold one titled like the subject, else the one that names the subject and one of the
    objects. `supporting` maps the title of a gold paragraph to its supporting sentences.

    Returns () if a hop has no paragraph, or if a subject that the question does not name is only one of several answers
    of an earlier hop: its name would give away a gold paragraph.
    """
    merged: dict[tuple[str, str], list[str]] = {}
    for subject, relation, object_text in evidences:
        merged.setdefault((subject, relation), []).append(object_text)
    hops: list[Hop] = []
    earlier_values: list[str] = []  # of all hops before
    for (subject, relation), values in merged.items():
        document = _paragraph_of(question, subject, values)
        if document is None:
            return ()
        name = _literal(subject)
        for number, hop in enumerate(hops, 1):
            if hop.answer.casefold() == subject.casefold():
                name = f"#{number}"
                break
        else:
            is_hidden = not _mentions(question.text, subject)
            if is_hidden and subject.casefold() in earlier_values:
                return ()
        earlier_values += [value.casefold() for value in values]
        sentences = _telling(supporting[document.title], *values)
        hops.append(
            Hop(
                question=relation_question(name, relation),
                answer=" and ".join(dict.fromkeys(values)),
                document=document,
                evidence=_brief(sentences),
            )
        )
    return tuple(hops)


def _paragraph_of(question: Question, subject: str, values: list[str]) -> Document | None:
    """Returns the gold paragraph titled like the subject, else the one that names the subject and one of the values.

    Returns None if there is neither.
    """
    name = name_of(subject).casefold()
    for paragraph in question.gold:
        if name_of(paragraph.title).casefold() == name:
            return paragraph
    for paragraph in question.gold:
        if _mentions(paragraph.text, subject) and any(_mentions(paragraph.text, value) for value in values):
            return paragraph
    return None


def from_supporting(question: Question, supporting: dict[str, list[str]]) -> tuple[Hop, ...]:
    """Returns the hops of a question of HotpotQA, from the one or two gold paragraphs; () if there are more.

    `supporting` maps the title of a gold paragraph to its supporting sentences. One paragraph gives one hop, if it has
    the answer. The hop looks up the paragraph's name if the question has that name, else the question itself. Two
    paragraphs give, by the question's `type`:

    - comparison: one hop per paragraph, in the order in which the question names them; its answer is the supporting
      sentences themselves, the facts to compare, as many as `_brief` keeps.
    - bridge, or any other type: two hops. The second paragraph should have the answer, the first leads there
      (`_bridge_order`). The answer of the first hop is the bridge entity: the name of one of the paragraphs
      (`_bridge`). This hop looks up the name of its paragraph if the question has that name and it is not the bridge
      entity, else the question itself. The second hop looks up the bridge entity.
    """
    if len(question.gold) == 1:
        return _only_hop(question, supporting)
    if len(question.gold) != 2:
        return ()
    if "comparison" in question.type:
        return _comparison(question, supporting)
    supporting_texts = {title: " ".join(sentences) for title, sentences in supporting.items()}
    first, second = _bridge_order(question, supporting_texts)
    bridge = _bridge(question, first, second, supporting_texts=supporting_texts)
    lead = question.text
    if name_of(first.title) != bridge:
        lead = _lead(question, first)
    answer = question.answers[0]
    lead_evidence = _brief(_telling(supporting[first.title], bridge))
    evidence = _brief(_telling(supporting[second.title], answer))
    return (
        Hop(question=_literal(lead), answer=bridge, document=first, evidence=lead_evidence),
        Hop(question="#1", answer=answer, document=second, evidence=evidence),
    )


def _lead(question: Question, paragraph: Document) -> str:
    """Returns what the first hop looks up: the name of its paragraph if the question has it, else the question."""
    name = name_of(paragraph.title)
    if _overlap(name, question.text) == 1:
        return name
    return question.text


def _only_hop(question: Question, supporting: dict[str, list[str]]) -> tuple[Hop, ...]:
    """Returns the hop of a question with one gold paragraph; () if the paragraph does not have the answer."""
    (paragraph,) = question.gold
    answer = question.answers[0]
    if not _mentions(paragraph.text, answer):
        return ()
    hop = Hop(
        question=_literal(_lead(question, paragraph)),
        answer=answer,
        document=paragraph,
        evidence=_brief(_telling(supporting[paragraph.title], answer)),
    )
    return (hop,)


def _comparison(question: Question, supporting: dict[str, list[str]]) -> tuple[Hop, ...]:
    """Returns a hop for each of the two paragraphs, in the order in which the question names them."""
    first, second = sorted(question.gold, key=lambda paragraph: _position(question.text, paragraph.title))
    names = [name_of(first.title), name_of(second.title)]
    if names[0] == names[1]:
        names = [first.title, second.title]
    hops = []
    for name, paragraph in zip(names, (first, second)):
        facts = _brief(supporting[paragraph.title])
        hops.append(
            Hop(
                question=_literal(name),
                answer=" ".join(facts),
                document=paragraph,
                evidence=facts,
            )
        )
    return tuple(hops)


def from_paragraph(question: str, answer: str, document: Document | None) -> Hop:
    """Returns a hop of MuSiQue. Its evidence is the sentence of its paragraph that has the answer; of several such
    sentences, the one that shares most words with the sub-question."""
    sentences = []
    if document:
        sentences = SENTENCE.split(" ".join(document.text.split()))
    telling = [sentence for sentence in sentences if _mentions(sentence, answer)]
    telling.sort(key=lambda sentence: -_overlap(question, sentence))
    return Hop(question=question, answer=answer, document=document, evidence=tuple(telling[:1]))


def _telling(sentences: list[str], *names: str) -> list[str]:
    """Returns the sentences that mention one of the names; all sentences if none does."""
    telling = [sentence for sentence in sentences if any(_mentions(sentence, name) for name in names)]
    return telling or sentences


def _bridge_order(question: Question, supporting_texts: dict[str, str]) -> tuple[Document, Document]:
    """Returns the two gold paragraphs in the order in which they are looked up, which is not in the data.

    `supporting_texts` has the supporting sentences of each by its title. The second paragraph should have the answer,
    the question should name the first, and the first should mention the second. These clues are weighted by hand.
    """
    a, b = question.gold
    answer = question.answers[0]

    def score(first: Document, second: Document) -> float:
        """Returns how much speaks for this order."""
        first_text = supporting_texts[first.title]
        second_text = supporting_texts[second.title]
        first_name = name_of(first.title)
        second_name = name_of(second.title)
        answer_is_second = _mentions(second_text, answer) - _mentions(first_text, answer)  # -1, 0 or 1
        name_is_first = _overlap(first_name, question.text) - _overlap(second_name, question.text)  # -1 to 1
        leads_to_second = _mentions(first_text, second_name)  # 0 or 1
        return 1.5 * answer_is_second + name_is_first + 0.5 * leads_to_second

    if score(a, b) >= score(b, a):
        return a, b
    return b, a


def _bridge(question: Question, first: Document, second: Document, supporting_texts: dict[str, str]) -> str:
    """Returns the entity that the first hop finds: the name of one paragraph.

    Preferred is a name that the question does not have and that the other paragraph mentions, preferably in its
    supporting sentences; then any name that the question does not have; then any name that the other paragraph
    mentions; then the name of the second paragraph.
    """
    first_name = name_of(first.title)
    second_name = name_of(second.title)
    new_names = [name for name in (second_name, first_name) if _overlap(name, question.text) < 1]
    candidates: list[str] = []
    pairs_of_texts = [
        (supporting_texts[first.title], supporting_texts[second.title]),
        (first.text, second.text),
    ]
    for first_text, second_text in pairs_of_texts:
        if _mentions(first_text, second_name):
            candidates.append(second_name)
        if _mentions(second_text, first_name):
            candidates.append(first_name)
    for name in candidates:
        if name in new_names:
            return name
    by_preference = [*new_names, *candidates, second_name]
    return by_preference[0]


def _brief(sentences: list[str]) -> tuple[str, ...]:
    """Returns the first sentences, as many as fit into MAX_EVIDENCE characters, but at least the first sentence."""
    brief = sentences[:1]
    for sentence in sentences[1:]:
        if len(" ".join([*brief, sentence])) > MAX_EVIDENCE:
            break
        brief.append(sentence)
    return tuple(brief)


def name_of(title: str) -> str:
    """Returns a title as it would stand in a sentence: `Neighbours (TV series)` becomes `Neighbours`."""
    title = " ".join(html.unescape(title).split())
    return re.sub(r"\s*\([^()]*\)$", "", title) or title


def _literal(text: str) -> str:
    """Returns text with `#1` written as `No. 1`, because `#1` refers to an earlier answer."""
    return re.sub(r"#(?=\d)", "No. ", text)


def _mentions(text: str, name: str) -> bool:
    """Returns whether the words of a name stand in a text, one after the other."""
    return in_a_row(split_words(name), split_words(text))


def _overlap(name: str, text: str) -> float:
    """Returns the share of the name's words that are in the text, 0 to 1."""
    words = set(split_words(name))
    return len(words & set(split_words(text))) / max(len(words), 1)


def _position(text: str, title: str) -> int:
    """Returns where a text names a title; the end of the text if it does not."""
    place = text.casefold().find(name_of(title).casefold())
    if place < 0:
        return len(text)
    return place
