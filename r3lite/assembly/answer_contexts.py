"""The contexts of --contexts: they are made from demonstrations, so no episodes are sampled for them.

A demonstration as `collect` writes it has the steps and documents of a question, and the right answer in its last turn.
Without this turn it is a context of --learn answer. Its beginnings, from the first turn on, are contexts of --learn
turn. Its searches are not the policy's own, but a round takes only a fraction of the time that sampled contexts take.
"""

import sys
from collections.abc import Mapping, Sequence

from r3lite.core.episode import ANSWERED, Question, Step
from r3lite.core.errors import R3LiteError
from r3lite.datasets.rl_questions import Demonstrations, in_words, source_without
from r3lite.protocols.layout import Layout
from r3lite.rollout.sequence import Sequence as SampledSequence
from r3lite.rollout.uniforms import Uniforms

Contexts = dict[str, list[SampledSequence]]  # by the id of their question


def contexts_of(
    questions: Sequence[Question],
    demonstrations: Demonstrations,
    layouts: Mapping[str, Layout],
    all_turns: bool,
) -> Contexts:
    """Returns the contexts of the questions from the `demonstrations` of --contexts.

    They end before the last turn of a demonstration or, with `all_turns`, before any of its turns but the first. A
    question gets those of the first of its demonstrations that leaves room for a turn. `layouts` are those of the
    questions' sources. Prints how many questions get no context, and raises R3LiteError if no question of a source gets
    one.
    """
    contexts: Contexts = {}
    for question in questions:
        for demonstration in demonstrations[question.id]:
            last = len(demonstration.steps)
            contexts_of_question = []
            for number in range(2 if all_turns else last, last + 1):
                earlier_steps = demonstration.steps[: number - 1]
                context = _context(earlier_steps, question, layouts[question.source])
                if context is not None:
                    contexts_of_question.append(context)
            if contexts_of_question:
                contexts[question.id] = contexts_of_question
                break
    too_long = len(questions) - len(contexts)
    if too_long:
        message = f"left out {too_long} of {len(questions)} questions, whose demonstrations leave no room for a turn"
        print(message, file=sys.stderr)
    source = source_without(questions, [question for question in questions if question.id in contexts])
    if source is not None:
        raise R3LiteError(
            f"no demonstration{in_words(source)} in --contexts leaves room for a turn",
            "Raise --max-length, or lower --max-new-tokens or --max-document-tokens.",
            code="contexts-too-long",
        )
    return contexts


def _context(steps: Sequence[Step], question: Question, layout: Layout) -> SampledSequence | None:
    """Returns a demonstration's first steps, as if the policy had sampled them; None if they leave no room for a turn.

    The sequence is finished: it has another turn, with a placeholder, which `Sequence.reopened` removes.
    """
    lengths = layout.lengths
    transcript = layout.lay_out(question, [*steps, Step("-", answer="-")], lengths.max_document_tokens)
    if transcript.turn_start + lengths.max_new_tokens > lengths.max_length:
        return None
    fields = vars(transcript) | {"finish": ANSWERED}
    return SampledSequence(**fields, stream=Uniforms(""))  # nothing is drawn from this stream
