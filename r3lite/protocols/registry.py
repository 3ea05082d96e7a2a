"""The protocols by the name that --format takes."""

from collections.abc import Callable

from r3lite.protocols.base import Protocol
from r3lite.protocols.dag import Dag
from r3lite.protocols.layout import OPENINGS, Opening
from r3lite.protocols.own import load_own
from r3lite.protocols.plain_answer import PlainAnswer
from r3lite.protocols.r3 import R3
from r3lite.protocols.tags import load_solution, load_tags
from r3lite.settings import ProtocolSettings

PROTOCOLS: dict[str, Callable[[ProtocolSettings], Protocol]] = {
    "r3": R3.load,
    "tags": load_tags,
    "solution": load_solution,
    "dag": Dag.load,
}


def build_protocol(settings: ProtocolSettings, opening: Opening = OPENINGS["none"]) -> Protocol:
    """Returns the protocol of --format, with the prompt files of the settings; or that of a baseline in a plain
    chat."""
    if opening.plain:
        return PlainAnswer.load(settings, opening.retrieves_first)
    if settings.is_own:
        return load_own(settings)
    return PROTOCOLS[settings.format](settings)
