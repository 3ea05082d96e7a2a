"""The contexts of --contexts: those of demonstrations, for which no episodes have to be sampled.

A demonstration as `collect` writes it has the steps and documents of a question, and the right answer in its last turn.
Without this turn it is a context of --learn answer. Its searches are not the policy's own, but a round takes a fraction
of the time.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import chain

from r3lite.assembly.answer_round import is_context
from r3lite.core.answer_match import question_key
from r3lite.core.episode import ANSWERED, Question
from r3lite.core.errors import R3LiteError
from r3lite.datasets.trajectories import Trajectory, read_rows
from r3lite.protocols.layout import Layout
from r3lite.rollout.sequence import Sequence as SampledSequence
from r3lite.rollout.uniforms import Uniforms


def read_contexts(
    files: Sequence[str],
    questions: Sequence[Question],
    layouts: Mapping[str, Layout],
) -> dict[str, SampledSequence]:
    """Returns the contexts of the questions that have a demonstration in one of the files, by the question's id.

    A demonstration belongs to every question with the same text. A question gets the first of its demonstrations whose
    documents, cut to --max-document-tokens, have every gold paragraph and leave room for a turn. `layouts` are those of
    the questions' sources. Prints how many questions have a context.

    Raises R3LiteError if a file has conversations, or if there is a source none of whose questions has a context.
    """
    by_key: dict[str, list[Question]] = {}
    for question in questions:
        by_key.setdefault(question_key(question.text), []).append(question)
    contexts: dict[str, SampledSequence] = {}
    for row in chain.from_iterable(_read(file, layouts[""]) for file in files):
        for question in by_key.get(question_key(row.question), ()):
            if question.id not in contexts:
                context = _context(row, question, layouts[question.source])
                if context is not None:
                    contexts[question.id] = context
    _check_sources(questions, contexts)
    print(f"{len(contexts)} of {len(questions)} questions have a context in --contexts", file=sys.stderr)
    return contexts


def _read(file: str, layout: Layout) -> list[Trajectory]:
    """Returns the demonstrations of a file."""
    rows = read_rows(file, layout.protocol)
    if not all(isinstance(row, Trajectory) for row in rows):
        raise R3LiteError(
            f"--contexts {file} has conversations",
            "Pass demonstrations, which have steps, as `python -m r3lite.collect` writes them.",
            code="contexts-conversations",
        )
    return rows


def _context(row: Trajectory, question: Question, layout: Layout) -> SampledSequence | None:
    """Returns a demonstration as a finished sequence, as if the policy had sampled it; None if it is no context.

    `Sequence.reopened` removes its last turn.
    """
    lengths = layout.lengths
    transcript = layout.lay_out(question, row.steps, lengths.max_document_tokens)
    fields = vars(transcript) | {"finish": ANSWERED}
    demonstration = SampledSequence(**fields, stream=Uniforms(""))  # nothing is drawn from this stream
    leaves_room = transcript.turn_start + lengths.max_new_tokens <= lengths.max_length
    if leaves_room and is_context(demonstration):
        return demonstration
    return None


def _check_sources(questions: Sequence[Question], contexts: Mapping[str, SampledSequence]) -> None:
    """Raises R3LiteError if a source has no question with a context: a round could not draw any of it."""
    sources = {question.source for question in questions}
    for source in sorted(sources - {context.question.source for context in contexts.values()}):
        of_source = f" of the source {source}" if source else ""
        raise R3LiteError(
            f"no question{of_source} has a demonstration with every gold paragraph in --contexts",
            "Collect demonstrations of these questions, raise --max-length, or remove --contexts.",
            code="contexts-without-questions",
        )
