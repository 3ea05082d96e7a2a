"""What a critic is asked: what in a prompt caused failures, and a better prompt.

Both are ProTeGi's (Pryzant et al. 2023, arXiv 2305.03495): the critique stands for a gradient, and the edit for a step
against it. Knows no network (see llm/client.py), no scores and no files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r3lite.core.episode import Episode
from r3lite.core.files import shipped
from r3lite.core.records import Record, Source
from r3lite.llm.episodes import described
from r3lite.llm.replies import Request
from r3lite.protocols.base import Protocol
from r3lite.protocols.templates import filled, placeholders

ROLES = {
    "init_prompt": "the text that opens each episode",
    "step_prompt": "the text that gives the model the documents of each of its queries",
}


@dataclass(frozen=True)
class Critic:
    """Makes requests about the prompt `improved`, a key of ROLES, of a protocol.

    A `nonce` sets apart requests of other rounds and branches, which are to get replies of their own.
    """

    improved: str
    protocol: Protocol

    def critique(self, prompt: str, failures: Sequence[Episode], number: int, of: int, nonce: str) -> Request:
        """Asks what in a prompt caused the failures: critique `number` of the `of` that a round asks for."""
        data = {"prompt": prompt, "form": self.form, "episodes": [self.shown(episode) for episode in failures]}
        values = {"role": ROLES[self.improved], "number": str(number), "of": str(of)}
        return _request("critique", values, data, "critique", 512, nonce)

    def edit(self, prompt: str, critique: str, nonce: str) -> Request:
        """Asks for a prompt that a critique no longer applies to."""
        data = {"prompt": prompt, "critique": critique, "form": self.form}
        names = " and ".join(f"{{{name}}}" for name in placeholders(prompt))
        values = {"role": ROLES[self.improved], "placeholders": names}
        return _request("edit", values, data, "prompt", 1024, nonce)

    @property
    def form(self) -> list[str]:
        """How steps are written, those that ask and the last one."""
        return [self.protocol.render(step, number) for number, step in enumerate(self.protocol.example(), 1)]

    def shown(self, episode: Episode) -> dict:
        data = described(episode)
        for entry, step in zip(data["steps"], episode.steps, strict=True):
            entry["faults"] = [self.protocol.faults[fault] for fault in step.faults]
        return data


def _request(what: str, values: Mapping[str, str], data: Mapping, key: str, most: int, nonce: str) -> Request:
    """Asks for a JSON object with one text, under `key`, by prompts/critic/`what`.txt with values for its words."""
    system = filled(shipped("prompts", "critic", f"{what}.txt").read_text(encoding="utf-8").strip(), values)
    schema = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}

    def read(reply: Any) -> str:
        return Record(reply, Source("the reply")).text(key).strip()

    prompt = json.dumps(data, ensure_ascii=False, indent=1)
    return Request(prompt, system, schema=schema, read=read, max_output_tokens=most, nonce=nonce)
