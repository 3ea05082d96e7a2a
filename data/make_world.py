"""An invented encyclopedia and multi-hop questions about it, in MuSiQue's schema.

Owns: the names, the relations with their paraphrases, the articles, the questions with gold decompositions, and
`write_world`, which writes the sample data under `data/world/`. Everything follows from a `random.Random`.
Knows nothing of models, prompts, the step format or retrieval.

A name word is a head and a tail ("Kar" + "dosk"). The pair's class (head + tail index, modulo 8) says which split may
use the word, so two splits share no word of any name: what a model copies from a test article it has never seen whole.
"""
import argparse
import json
import pathlib
import random
from dataclasses import dataclass, field

VOWELS = "aeiou"
HEADS = [o + v + "lrn"[(i + j) % 3] for i, o in enumerate(
    "B Br D Dr F G Gr H J K L M N P R S T Tr V Z".split()) for j, v in enumerate(VOWELS)]
TAILS = [o + v + ("n", "", "r", "s", "l", "", "th")[(3 * i + j) % 7] for i, o in enumerate(
    "b br d dr f g h j k l m n p r s st t v w z".split()) for j, v in enumerate(VOWELS)]
SPLIT_CLASSES = {"pretraining": (0, 1, 2, 3), "train": (4, 5), "dev": (6,), "test": (7,)}
WORKS = ("Works", "Group", "House", "Brothers")


@dataclass(frozen=True)
class Relation:
    """A fact that an article about a `subject` states, and how it is asked for.

    `sentences`: paraphrases with {s}ubject and {o}bject; `question`: the hop question; `phrases`: noun phrases for
    the object, all branching to the right, so that a nested question reads from the last hop to the first.
    """
    name: str
    subject: str
    object: str
    question: str
    phrases: tuple[str, ...]
    sentences: tuple[str, ...]


RELATIONS = (
    Relation("director", "film", "person", "Who directed {s}?", ("the director of {s}", "the person who directed {s}"),
             ("{s} is a film directed by {o}.", "{s} is a film. Its director was {o}.", "{o} directed the film {s}.")),
    Relation("composer", "film", "person", "Who composed the music of {s}?",
             ("the composer of {s}", "the person who composed the music of {s}"),
             ("The music of {s} was composed by {o}.", "{o} composed the music for {s}.",
              "The composer of {s} was {o}.")),
    Relation("studio", "film", "company", "Which company produced {s}?",
             ("the studio of {s}", "the company that produced {s}"),
             ("{s} was produced by {o}.", "{o} produced {s}.", "The studio behind {s} was {o}.")),
    Relation("author", "book", "person", "Who wrote {s}?", ("the author of {s}", "the person who wrote {s}"),
             ("{s} is a book written by {o}.", "{s} is a book. Its author is {o}.", "{o} wrote the book {s}.")),
    Relation("publisher", "book", "company", "Which company published {s}?",
             ("the publisher of {s}", "the company that published {s}"),
             ("{s} was published by {o}.", "{o} published {s}.", "The publisher of {s} is {o}.")),
    Relation("birthplace", "person", "town", "Where was {s} born?",
             ("the birthplace of {s}", "the town of birth of {s}"),
             ("{s} was born in {o}.", "{s} is a native of {o}.", "The birthplace of {s} is {o}.")),
    Relation("spouse", "person", "person", "Who is married to {s}?", ("the spouse of {s}", "the person married to {s}"),
             ("{s} is married to {o}.", "{s} married {o}.", "The spouse of {s} is {o}.")),
    Relation("employer", "person", "company", "Which company does {s} work for?",
             ("the employer of {s}", "the company that employs {s}"),
             ("{s} works for {o}.", "{s} is employed by {o}.", "The employer of {s} is {o}.")),
    Relation("founder", "company", "person", "Who founded {s}?", ("the founder of {s}", "the person who founded {s}"),
             ("{s} is a company founded by {o}.", "{s} is a company. Its founder was {o}.",
              "{o} founded the company {s}.")),
    Relation("headquarters", "company", "town", "Where is {s} based?",
             ("the home town of {s}", "the town that hosts {s}"),
             ("{s} is based in {o}.", "{s} has its offices in {o}.", "The home of {s} is {o}.")),
    Relation("country", "town", "country", "In which country is {s}?",
             ("the country of {s}", "the country that holds {s}"),
             ("{s} is a town in {o}.", "{s} is a town. It lies in the country {o}.", "The town {s} is part of {o}.")),
    Relation("river", "town", "river", "Which river runs through {s}?",
             ("the river of {s}", "the river that runs through {s}"),
             ("The river {o} runs through {s}.", "{s} lies on the river {o}.", "{s} was built on the river {o}.")),
    Relation("capital", "country", "town", "What is the capital of {s}?", ("the capital of {s}",),
             ("{s} is a country whose capital is {o}.", "{s} is a country. Its capital is {o}.",
              "{o} is the capital of the country {s}.")),
    Relation("language", "country", "language", "Which language is spoken in {s}?",
             ("the language of {s}", "the language spoken in {s}"),
             ("People in {s} speak {o}.", "{o} is spoken in {s}.", "The language of {s} is {o}.")),
)
BY_SUBJECT = {kind: tuple(r for r in RELATIONS if r.subject == kind)
              for kind in ("film", "book", "person", "company", "town", "country")}
SAME_VALUE = {"birthplace": "Were {a} and {b} born in the same town?",
              "country": "Are {a} and {b} in the same country?",
              "employer": "Do {a} and {b} work for the same company?",
              "director": "Were {a} and {b} directed by the same person?"}
SAMPLE_SIZES = {"film": 60, "book": 40, "person": 120, "company": 40, "town": 50, "country": 16}


@dataclass
class Entity:
    kind: str
    name: str
    facts: dict[str, "Entity"] = field(default_factory=dict)
    article: dict | None = None


@dataclass(frozen=True)
class Hop:
    question: str           # "Where was Mira Tolen born?", nothing left to fill in
    reference: str          # "Where was #1 born?", as MuSiQue writes it
    subject: Entity         # its article answers the question
    answer: Entity


@dataclass(frozen=True)
class Chain:
    """A question and the hops that answer it; `kind` is "2hop", "3hop", "4hop" or "comparison"."""
    kind: str
    question: str
    answer: str
    hops: tuple[Hop, ...]


class Names:
    """Draws words of one split, none twice while the supply lasts (1,250 words a class)."""

    def __init__(self, rng: random.Random, split: str):
        self.rng, self.classes, self.used = rng, SPLIT_CLASSES[split], set()

    def word(self) -> str:
        for _ in range(200):
            i = self.rng.randrange(len(HEADS))
            j = self.rng.randrange(len(TAILS))
            word = HEADS[i] + TAILS[j]
            if (i + j) % 8 in self.classes and word not in self.used:
                break
        self.used.add(word)
        return word

    def name(self, kind: str) -> str:
        if kind in ("film", "book", "person"):
            return f"{self.word()} {self.word()}"
        if kind == "company":
            return f"{self.word()} {self.rng.choice(WORKS)}"
        return self.word()


class World:
    """Entities with facts about each other, one short article each, and questions along the facts.

    `sizes` gives the number of entities by kind; every kind of BY_SUBJECT needs at least one, persons two.
    """

    def __init__(self, rng: random.Random, split: str = "pretraining", sizes: dict[str, int] = SAMPLE_SIZES):
        self.rng, self.split, names = rng, split, Names(rng, split)
        self.entities = {kind: [Entity(kind, names.name(kind)) for _ in range(n)] for kind, n in sizes.items()}
        for kind, entities in self.entities.items():
            for entity in entities:
                self._settle(entity, kind, names)
        people = rng.sample(self.entities["person"], len(self.entities["person"]) // 2 * 2)
        for a, b in zip(people[::2], people[1::2]):
            a.facts["spouse"], b.facts["spouse"] = b, a
        self.order = [e for entities in self.entities.values() for e in entities]
        for number, entity in enumerate(self.order):
            entity.article = self._article(entity, f"{split}-{number}")

    def _settle(self, entity: Entity, kind: str, names: Names) -> None:
        for relation in BY_SUBJECT[kind]:
            if relation.object in ("river", "language"):  # values without an article of their own
                entity.facts[relation.name] = Entity(relation.object, names.name(relation.object))
            elif relation.name != "spouse":
                entity.facts[relation.name] = self.rng.choice(self.entities[relation.object])

    def _article(self, entity: Entity, identifier: str) -> dict:
        """Two or three sentences; the one that names the subject and its kind first, the others in any order."""
        relations = [r for r in BY_SUBJECT[entity.kind] if r.name in entity.facts]
        other_relations = relations[1:]
        self.rng.shuffle(other_relations)
        text = " ".join(self.rng.choice(r.sentences).format(s=entity.name, o=entity.facts[r.name].name)
                        for r in relations[:1] + other_relations)
        return {"id": identifier, "title": entity.name, "text": text}

    def articles(self) -> list[dict]:
        """Every article as {"id", "title", "text"}."""
        return [e.article for e in self.order]

    def hop(self, subject: Entity, fact: str) -> Hop:
        """The one-hop question for a fact of `subject`."""
        question = next(r for r in BY_SUBJECT[subject.kind] if r.name == fact).question.format(s=subject.name)
        return Hop(question, question, subject, subject.facts[fact])

    def chain(self, hops: int) -> Chain:
        """A random question of `hops` hops; no article is needed twice."""
        while True:
            entity = start = self.rng.choice(self.order)
            visited, relations = {id(start)}, []
            while len(relations) < hops and entity.kind in BY_SUBJECT:
                choices = [r for r in BY_SUBJECT[entity.kind]
                           if r.name in entity.facts and id(entity.facts[r.name]) not in visited]
                if not choices:
                    break
                relations.append(self.rng.choice(choices))
                entity = entity.facts[relations[-1].name]
                visited.add(id(entity))
            if len(relations) == hops:
                return self._chain_of(start, relations)

    def _chain_of(self, start: Entity, relations: list[Relation]) -> Chain:
        subject, phrase, hops = start, start.name, []
        for n, relation in enumerate(relations):
            answer = subject.facts[relation.name]
            reference = relation.question.format(s=f"#{n}" if n else subject.name)
            hops.append(Hop(relation.question.format(s=subject.name), reference, subject, answer))
            if n < len(relations) - 1:
                phrase = self.rng.choice(relation.phrases).format(s=phrase)
            subject = answer
        return Chain(f"{len(hops)}hop", relations[-1].question.format(s=phrase), subject.name, tuple(hops))

    def comparison(self) -> Chain:
        """Do two subjects share a value? Yes and no are equally likely where the world allows it."""
        relation = self.rng.choice([r for r in RELATIONS if r.name in SAME_VALUE])
        kin = [e for e in self.entities[relation.subject] if relation.name in e.facts]
        a, want = self.rng.choice(kin), self.rng.random() < 0.5
        value = a.facts[relation.name]
        candidates = [e for e in kin if e is not a]
        b = self.rng.choice([e for e in candidates if (e.facts[relation.name] is value) == want] or candidates)
        hops = tuple(Hop(q := relation.question.format(s=e.name), q, e, e.facts[relation.name]) for e in (a, b))
        answer = "yes" if b.facts[relation.name] is value else "no"
        return Chain("comparison", SAME_VALUE[relation.name].format(a=a.name, b=b.name), answer, hops)

    def distractors(self, chain: Chain, count: int) -> list[dict]:
        """Articles that answer no hop, half of them about the same kinds of things."""
        gold = {id(h.subject) for h in chain.hops}
        kinds = {h.subject.kind for h in chain.hops}
        near = [e.article for e in self.order if id(e) not in gold and e.kind in kinds]
        picked = self.rng.sample(near, min(count // 2, len(near)))
        far = [e.article for e in self.order if id(e) not in gold and not any(e.article is p for p in picked)]
        return picked + self.rng.sample(far, count - len(picked))

    def row(self, chain: Chain, number: int, distractors: int = 2) -> dict:
        """The chain as a MuSiQue row."""
        gold = [h.subject.article for h in chain.hops]
        paragraphs = gold + self.distractors(chain, distractors)
        self.rng.shuffle(paragraphs)
        place = {p["id"]: n for n, p in enumerate(paragraphs)}
        golden = {g["id"] for g in gold}
        return {
            "id": f"{chain.kind}__{self.split}_{number}", "question": chain.question, "answer": chain.answer,
            "answer_aliases": [], "answerable": True,
            "paragraphs": [{"idx": n, "title": p["title"], "paragraph_text": p["text"],
                            "is_supporting": p["id"] in golden}
                           for n, p in enumerate(paragraphs)],
            "question_decomposition": [
                {"id": n, "question": h.reference, "answer": h.answer.name,
                 "paragraph_support_idx": place[h.subject.article["id"]]} for n, h in enumerate(chain.hops)],
        }

    def rows(self, counts: dict[str, int]) -> list[dict]:
        """`counts` questions by kind ("2hop", "3hop", "4hop", "comparison"), all different, shuffled."""
        chains, questions = [], set()
        for kind, count in counts.items():
            wanted = len(chains) + count
            while len(chains) < wanted:
                chain = self.comparison() if kind == "comparison" else self.chain(int(kind[0]))
                if chain.question not in questions:
                    questions.add(chain.question)
                    chains.append(chain)
        self.rng.shuffle(chains)
        return [self.row(chain, n) for n, chain in enumerate(chains)]


def write_world(folder: pathlib.Path, seed: int = 0) -> dict[str, int]:
    """Write corpus, train, dev, test and test_comparison files into `folder`; returns the number of lines by file."""
    plan = {"train": {"train": {"2hop": 320, "3hop": 280, "4hop": 200}},
            "dev": {"dev": {"2hop": 40, "3hop": 30, "4hop": 30}},
            "test": {"test": {"2hop": 100, "3hop": 100, "4hop": 100}, "test_comparison": {"comparison": 60}}}
    larger = {kind: 2 * n for kind, n in SAMPLE_SIZES.items()}
    files: dict[str, list[dict]] = {"corpus": []}
    for split, counts_by_file in plan.items():
        sizes = larger if split == "train" else SAMPLE_SIZES
        world = World(random.Random(f"{seed}-{split}"), split, sizes)
        files["corpus"] += world.articles()
        files |= {name: world.rows(counts) for name, counts in counts_by_file.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
    return {name: len(lines) for name, lines in files.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the sample world: a corpus and multi-hop questions about it.")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for file, lines in write_world(options.folder, options.seed).items():
        print(f"{file}.jsonl: {lines} lines")
