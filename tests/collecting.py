"""Rows for `collect`, what it wrote, and a run of it."""

import json

from r3lite import collect
from r3lite.datasets import trajectories
from r3lite.protocols.registry import build_protocol
from r3lite.settings import ProtocolSettings


def row(number, hops=None, answer="Oslo"):
    film, person = f"Film {number}", f"Person {number}"
    hops = hops or [(f"Who directed {film}?", person, 0), ("Where was #1 born?", answer, 1)]
    return {
        "id": f"q{number}",
        "question": f"Where was the director of {film} born?",
        "answer": answer,
        "paragraphs": [
            {"idx": 0, "title": film, "paragraph_text": f"{film} is by {person}.", "is_supporting": True},
            {"idx": 1, "title": person, "paragraph_text": f"{person} was born in {answer}.", "is_supporting": True},
        ],
        "question_decomposition": [{"question": q, "answer": a, "paragraph_support_idx": i} for q, a, i in hops],
    }


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_rows(path, format="r3"):
    return trajectories.read_rows(path, build_protocol(ProtocolSettings(format=format)))


def run(data, output, *arguments):
    return collect.main(["--data", str(data), "--output", str(output), "--encoder", "hashing", *arguments])
