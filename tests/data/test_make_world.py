"""The sample world: reproducible, in MuSiQue's schema, answerable by search, and its splits share no name."""
import importlib.util
import json
import math
import random
import re
from collections import Counter
from pathlib import Path

from make_world import HEADS, RELATIONS, TAILS, World, write_world

from r3lite.protocols.registry import build_protocol
from r3lite.settings import ProtocolSettings

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "world"
FILES = ("train", "dev", "test", "test_comparison")
NAME_WORDS = {head + tail for head in HEADS for tail in TAILS}


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (SHIPPED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def name_words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text)) & NAME_WORDS


def test_shipped_files_are_what_the_command_writes(tmp_path):
    counts = write_world(tmp_path, seed=0)
    assert counts == {"corpus": 1304, "train": 800, "dev": 100, "test": 300, "test_comparison": 60}
    for name in counts:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (SHIPPED / f"{name}.jsonl").read_bytes(), name


def test_rows_are_musique_rows_that_their_gold_paragraphs_answer():
    for row in (row for name in FILES for row in lines(name)):
        hops, answers = row["question_decomposition"], {}
        assert {p["idx"] for p in row["paragraphs"] if p["is_supporting"]} == {h["paragraph_support_idx"] for h in hops}
        for n, hop in enumerate(hops, 1):
            question = re.sub(r"#(\d)", lambda m, answers=answers: answers[int(m[1])], hop["question"])
            paragraph = row["paragraphs"][hop["paragraph_support_idx"]]
            assert paragraph["title"] in question and hop["answer"] in paragraph["paragraph_text"]
            answers[n] = hop["answer"]
        kind = row["id"].split("__")[0]
        if kind == "comparison":
            assert row["answer"] == ("yes" if answers[1] == answers[2] else "no")
        else:
            assert kind == f"{len(hops)}hop" and row["answer"] == hops[-1]["answer"]


def test_no_name_word_is_shared_between_splits_or_with_pretraining():
    words = {split: {w for a in lines("corpus") if a["id"].startswith(f"{split}-")
                     for w in name_words(a["title"] + " " + a["text"])}
             for split in ("train", "dev", "test")}
    words["pretraining"] = {w for seed in range(100) for a in World(random.Random(seed)).articles()
                            for w in name_words(a["title"] + " " + a["text"])}
    assert all(len(split_words) > 200 for split_words in words.values())
    for a in words:
        for b in words:
            assert a == b or not words[a] & words[b]
    for split, names in (("train", ("train",)), ("dev", ("dev",)), ("test", ("test", "test_comparison"))):
        assert all(name_words(row["question"]) <= words[split] for name in names for row in lines(name))


def test_titles_are_unique_so_that_a_gold_article_has_no_double():
    titles = [a["title"] for a in lines("corpus")]
    assert len(set(titles)) == len(titles)


def test_a_hop_question_finds_its_article_among_three():
    """Plain TF-IDF over title and text, as the hashing encoder does it."""
    articles = lines("corpus")
    bags = [Counter(re.findall(r"\w+", f"{a['title']} {a['text']}".lower())) for a in articles]
    frequency = Counter(word for bag in bags for word in bag)
    weight = {word: math.log(len(bags) / n) for word, n in frequency.items()}
    vectors = [{w: n * weight[w] for w, n in bag.items()} for bag in bags]
    norms = [math.sqrt(sum(x * x for x in v.values())) for v in vectors]
    hits = queries = 0
    for row in lines("test") + lines("test_comparison"):
        answers = {}
        for n, hop in enumerate(row["question_decomposition"], 1):
            question = re.sub(r"#(\d)", lambda m, answers=answers: answers[int(m[1])], hop["question"])
            answers[n] = hop["answer"]
            words = [w for w in re.findall(r"\w+", question.lower()) if w in weight]
            scores = [sum(weight[w] * v.get(w, 0.0) for w in words) / norm for v, norm in zip(vectors, norms)]
            best = sorted(range(len(articles)), key=scores.__getitem__)[-3:]
            gold = row["paragraphs"][hop["paragraph_support_idx"]]["title"]
            hits += gold in {articles[i]["title"] for i in best}
            queries += 1
    assert hits / queries >= 0.99, hits / queries


def test_comparisons_are_balanced_and_every_relation_is_asked():
    comparisons = [row["answer"] for row in lines("test_comparison") if row["id"].startswith("comparison")]
    assert 0.3 < comparisons.count("yes") / len(comparisons) < 0.7
    openings = {hop["question"].split("#")[0].split(" ")[0:2][1]
                for row in lines("train") for hop in row["question_decomposition"]}
    assert openings >= {r.question.split(" ")[1] for r in RELATIONS}


def test_the_pretraining_text_never_shows_the_step_format():
    """Its base would otherwise know what SFT is to teach; the headings' words occur one by one, in glossary lines."""
    path = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_text.py"
    spec = importlib.util.spec_from_file_location("tiny_text", path)
    tiny_text = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny_text)
    rng, headings = random.Random(0), re.compile(r"^(Step \d+:|The (problem|retrieval|final) \w+:)", re.MULTILINE)
    protocol = build_protocol(ProtocolSettings())
    for step in protocol.example():
        assert len(headings.findall(protocol.render(step, 1))) == 3  # it would be seen
    for progress in (0.0, 0.2, 1.0):
        for _ in range(300):
            text = "".join(piece for piece, _ in tiny_text.sample(rng, progress))
            assert text and not headings.search(text), text
