"""One row of each format that questions come in, and a file of such rows."""

import json

HOTPOT = {
    "_id": "h1",
    "question": "Kate Ramsay is a character of a soap opera created by who?",
    "answer": "Reg Watson",
    "type": "bridge",
    "supporting_facts": [["Neighbours", 1], ["Kate Ramsay", 0], ["Kate Ramsay", 9]],
    "context": [
        ["Neighbours", ["Neighbours is a soap opera.", " It was created by Reg Watson."]],
        ["Ramsay Street", ["A street."]],
        ["Kate Ramsay", ["Kate Ramsay is a character of \"Neighbours\".", " She was played by Ashleigh Brewer."]],
    ],
}  # fmt: skip
TWO_WIKI = {
    "_id": "w1",
    "question": "Where was the director of Brenn born?",
    "answer": "Oslo",
    "type": "compositional",
    "supporting_facts": [["Brenn (film)", 0], ["Ann Dahl", 0]],
    "context": [
        ["Brenn (film)", ["Brenn is a film.", "It was directed by Ann Dahl."]],
        ["Ann Dahl", ["Ann Dahl was born in Oslo.", "She made films."]],
    ],
    "evidences": [["Brenn", "director", "Ann Dahl"], ["Ann Dahl", "place of birth", "Oslo"]],
}
MUSIQUE = {
    "id": "2hop__1",
    "question": "Where was the director of Brenn born?",
    "answer": "Oslo",
    "answer_aliases": ["Kristiania", "Oslo"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Ann Dahl", "paragraph_text": "Ann Dahl was born in Oslo.", "is_supporting": True},
        {"idx": 1, "title": "Ann Dahl", "paragraph_text": "Another one.", "is_supporting": False},
        {"idx": 2, "title": "Brenn", "paragraph_text": "A film by Ann Dahl.", "is_supporting": True},
    ],
    "question_decomposition": [
        {"id": 7, "question": "Brenn >> director", "answer": "Ann Dahl", "paragraph_support_idx": 2},
        {"id": 8, "question": "where was #1 born", "answer": "Oslo", "paragraph_support_idx": 0},
    ],
}


def write(path, rows, array=False):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text(f"[{', '.join(lines)}]" if array else "\n".join(lines) + "\n", encoding="utf-8")
    return path
