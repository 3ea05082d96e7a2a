"""The protocols by name, and what is built of the settings: a protocol, or the layout of episodes that speak it."""

from collections.abc import Callable

from r3lite.protocols.base import Protocol
from r3lite.protocols.r3 import R3
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import OPENINGS, Layout
from r3lite.settings import LengthSettings, ProtocolSettings

# By the values of --format.
PROTOCOLS: dict[str, Callable[[ProtocolSettings], Protocol]] = {"r3": R3.load}


def build_protocol(settings: ProtocolSettings) -> Protocol:
    """The protocol of --format, with the prompt files of the settings."""
    return PROTOCOLS[settings.format](settings)


def build_layout(
    tokenizer: Tokenizer, settings: ProtocolSettings, lengths: LengthSettings, baseline: str = "none"
) -> Layout:
    """The layout of episodes in the protocol of --format; `baseline` names how they open."""
    return Layout(tokenizer, build_protocol(settings), lengths, OPENINGS[baseline])
