"""Requests to a critic: for what in a prompt caused failures, and for a better prompt.

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
    """Makes requests about one prompt of a protocol; `improved` is its key in ROLES.

    A `nonce` tells apart equal requests of different rounds and branches, so that each gets a reply of its own.
    """

    improved: str
    protocol: Protocol

    def critique(self, prompt: str, failures: Sequence[Episode], number: int, of: int, nonce: str) -> Request:
        """Returns the request for critique `number` of `of`, which says what in the prompt caused these failures."""
        data = {
            "prompt": prompt,
            "form": self.form,
            "episodes": [self._with_faults(episode) for episode in failures],
        }
        values = {"role": ROLES[self.improved], "number": str(number), "of": str(of)}
        return _request(
            template="critique",
            values=values,
            data=data,
            key="critique",
            max_tokens=512,
            nonce=nonce,
        )

    def edit(self, prompt: str, critique: str, nonce: str) -> Request:
        """Returns the request for a prompt that the critique no longer applies to."""
        data = {"prompt": prompt, "critique": critique, "form": self.form}
        names = " and ".join(f"{{{name}}}" for name in placeholders(prompt))
        values = {"role": ROLES[self.improved], "placeholders": names}
        return _request(
            template="edit",
            values=values,
            data=data,
            key="prompt",
            max_tokens=1024,
            nonce=nonce,
        )

    @property
    def form(self) -> list[str]:
        """Returns the format's example, step by step, as the model writes it."""
        steps = self.protocol.example()
        return [self.protocol.render(step, number) for number, step in enumerate(steps, 1)]

    def _with_faults(self, episode: Episode) -> dict:
        """Returns an episode as requests have it, with the faults of each step in words."""
        data = described(episode)
        for entry, step in zip(data["steps"], episode.steps, strict=True):
            entry["faults"] = [self.protocol.faults[fault] for fault in step.faults]
        return data


def _request(template: str, values: Mapping[str, str], data: Mapping, key: str, max_tokens: int, nonce: str) -> Request:
    """Returns a request for a JSON object with one text, under `key`.

    The system message is prompts/critic/`template`.txt with `values` in its placeholders; the prompt is `data` as JSON.
    """
    path = shipped("prompts", "critic", f"{template}.txt")
    system = filled(path.read_text(encoding="utf-8").strip(), values)
    schema = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}

    def read(reply: Any) -> str:
        return Record(reply, Source("the reply")).text(key).strip()

    return Request(
        prompt=json.dumps(data, ensure_ascii=False, indent=1),
        system=system,
        schema=schema,
        read=read,
        max_output_tokens=max_tokens,
        nonce=nonce,
    )
