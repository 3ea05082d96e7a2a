"""`instruction`, `output` and perhaps an `input`, as Alpaca's and Evol-Instruct's rows have them.

The input follows the instruction in the user's turn. Alpaca's own frame ("Below is an instruction ...") is left out: a
chat model has its chat template.
"""

from r3lite.core.records import Record
from r3lite.datasets.conversations.conversation import turn


def read(row: Record) -> list[dict[str, str]]:
    asked, given = row.text("instruction"), row.text("input", "", blank=True)
    asked = f"{asked}\n\n{given}" if given.strip() else asked
    return [turn("user", asked), turn("assistant", row.text("output").strip())]
