"""Shows a sample episode in a step format, or how a turn in it is parsed, to check your own format."""

from r3lite.core import command
from r3lite.core.episode import Document, Step
from r3lite.core.files import read_text
from r3lite.protocols.base import Protocol
from r3lite.settings import CheckFormatSettings, CommandConfig, ProtocolSettings

QUESTION = "Where was the director of Brenn born?"
DOCUMENTS = (
    Document("1", "Brenn", "Brenn is a film by Ann Dahl."),
    Document("2", "Ann Dahl", "Ann Dahl was born in Oslo."),
)


class CheckFormatConfig(CommandConfig):
    """Prints a sample episode in --format, with the parts that the model writes, the parts that it is given, and how
    each turn is parsed. With --turn, parses your own turn and lists its faults. Needs no model.
    """

    check: CheckFormatSettings = CheckFormatSettings()
    protocol: ProtocolSettings = ProtocolSettings()


def check(config: CheckFormatConfig) -> None:
    """Prints how the turn in --turn is parsed, or without it a sample episode."""
    from r3lite.protocols.registry import build_protocol

    protocol = build_protocol(config.protocol)
    if config.check.turn is None:
        show_sample(protocol)
        return
    text = read_text(config.check.turn, "Pass a UTF-8 text file with one turn.").replace("\r\n", "\n")
    earlier = sample(protocol)[: config.check.step - 1]
    show(protocol, protocol.parse(protocol.first_turn(text), earlier))


def sample(protocol: Protocol) -> list[Step]:
    """Returns the steps of the format's example, with documents."""
    return [step.with_documents([DOCUMENTS] * len(step.searches)) for step in protocol.example()]


def show_sample(protocol: Protocol) -> None:
    """Prints the sample episode: who writes each part, and how each turn is parsed."""
    for message in protocol.shots:
        print(f"-- the worked example, {message['role']}\n{message['content']}\n")
    print(f"-- the opening\n{protocol.question_message(protocol.quoted(QUESTION))}")
    steps = sample(protocol)
    for number, step in enumerate(steps, 1):
        text = protocol.render(step, number)
        print(f"\n-- the model, turn {number}\n{text}\n\n-- is parsed as")
        show(protocol, protocol.parse(text, steps[: number - 1]))
        if step.searches:
            print(f"\n-- then is given\n{protocol.observation(protocol.quoted(QUESTION), steps[:number])}")
    print(f"\n-- a forced answer begins with\n{protocol.answer_prefix(len(steps))}")
    print(f"\n-- a turn ends at\n{' or '.join(map(repr, protocol.stop_strings))} or the end of the chat's turn")


def show(protocol: Protocol, step: Step) -> None:
    """Prints the parts of a parsed step, and its faults."""
    print(f"analysis: {step.analysis}")
    for search in step.searches:
        kind = f" ({search.kind})" if search.kind else ""
        print(f"query: {search.query}{kind}")
    if step.verification:
        print(f"verification: {step.verification}")
    if step.answer is not None:
        print(f"answer: {step.answer}")
    if not step.searches and step.answer is None:
        print("neither query nor answer: the episode ends as malformed")
    for fault in step.faults:
        print(f"fault {fault}: it {protocol.faults.get(fault, fault)}")


main = command.Command("check_format", CheckFormatConfig(), check)

if __name__ == "__main__":
    raise SystemExit(main())
