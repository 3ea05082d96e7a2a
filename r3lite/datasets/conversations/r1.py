"""`question`, `reasoning` and `answer`: traces of a model that reasons first, such as DeepSeek-R1 (arXiv 2501.12948).

The assistant writes the reasoning between `<think>` and `</think>`, then the answer.
"""

from r3lite.core.records import Record
from r3lite.datasets.conversations.conversation import turn


def read(row: Record) -> list[dict[str, str]]:
    reasoning, answer = row.text("reasoning").strip(), row.text("answer").strip()
    reasoning = reasoning.removeprefix("<think>").removesuffix("</think>").strip()
    return [turn("user", row.text("question")), turn("assistant", f"<think>\n{reasoning}\n</think>\n\n{answer}")]
