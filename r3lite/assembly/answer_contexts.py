"""The contexts of --contexts: they are made from demonstrations, so no episodes are sampled for them.

A demonstration as `collect` writes it has the steps and documents of a question, and the right answer in its last turn.
Without this turn it is a context of --learn answer. Its searches are not the policy's own, but a round takes only a
fraction of the time that sampled contexts take.
"""

import sys
from collections.abc import Mapping, Sequence

from r3lite.core.episode import ANSWERED, Question
from r3lite.core.errors import R3LiteError
from r3lite.datasets.rl_questions import Demonstrations, in_words, source_without
from r3lite.datasets.trajectories import Trajectory
from r3lite.protocols.layout import Layout
from r3lite.rollout.sequence import Sequence as SampledSequence
from r3lite.rollout.uniforms import Uniforms


def contexts_of(
    questions: Sequence[Question], demonstrations: Demonstrations, layouts: Mapping[str, Layout]
) -> dict[str, SampledSequence]:
    """Returns a context for each question, by the question's id, from the `demonstrations` of --contexts.

    A question gets the first of its demonstrations that leaves room for a turn. `layouts` are those of the questions'
    sources. Prints how many questions get no context, and raises R3LiteError if no question of a source gets one.
    """
    contexts: dict[str, SampledSequence] = {}
    for question in questions:
        for demonstration in demonstrations[question.id]:
            context = _context(demonstration, question, layouts[question.source])
            if context is not None:
                contexts[question.id] = context
                break
    too_long = len(questions) - len(contexts)
    if too_long:
        message = f"left out {too_long} of {len(questions)} questions, whose demonstrations leave no room for a turn"
        print(message, file=sys.stderr)
    source = source_without(questions, [context.question for context in contexts.values()])
    if source is not None:
        raise R3LiteError(
            f"no demonstration{in_words(source)} in --contexts leaves room for a turn",
            "Raise --max-length, or lower --max-new-tokens or --max-document-tokens.",
            code="contexts-too-long",
        )
    return contexts


def _context(row: Trajectory, question: Question, layout: Layout) -> SampledSequence | None:
    """Returns a demonstration as a finished sequence, as if the policy had sampled it; None if it leaves no room.

    `Sequence.reopened` removes its last turn.
    """
    lengths = layout.lengths
    transcript = layout.lay_out(question, row.steps, lengths.max_document_tokens)
    if transcript.turn_start + lengths.max_new_tokens > lengths.max_length:
        return None
    fields = vars(transcript) | {"finish": ANSWERED}
    return SampledSequence(**fields, stream=Uniforms(""))  # nothing is drawn from this stream
