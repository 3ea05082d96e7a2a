"""Conversations that teach plain RAG: the prompt of `evaluate --baseline rag`, and the gold answer as the reply.

They are the control for training in steps: the same questions, but one retrieval with the question and no steps. The
prompt of a row is laid out by the code that lays out the evaluation, so that both prompts have the same tokens.
"""

from collections.abc import Sequence
from pathlib import Path

from r3lite.core.episode import Document, Failure, Question, Retrieve, Step, retrieve_all
from r3lite.core.files import write_jsonl
from r3lite.datasets.collected import Tally
from r3lite.datasets.conversations import turn
from r3lite.protocols.layout import Layout
from r3lite.protocols.transcript import Transcript


def write_plain_rag(questions: Sequence[Question], retrieve: Retrieve, layout: Layout, output: Path) -> Tally:
    """Writes a conversation for every question at which the retriever did not fail; the reply is the question's first
    answer.

    `layout` is that of the baseline. Raises R3LiteError, as the evaluation does, for a question that does not fit into
    the limits of the layout.
    """
    tally = Tally(len(questions))
    transcripts = [Transcript(question) for question in questions]
    for transcript in transcripts:
        layout.open(transcript)
    searches = []
    for transcript in transcripts:
        searches.append((transcript.question, transcript.pending[0]))  # `open` has asked for the question's documents
    outcomes = retrieve_all(retrieve, searches)
    rows = []
    for transcript, outcome in zip(transcripts, outcomes, strict=True):
        if isinstance(outcome, Failure):
            tally.rejected["the retriever failed"] += 1
            continue
        rows.append(conversation(transcript, outcome, layout))
        tally.keep_retrieved(transcript.question, transcript.steps)
    write_jsonl(output, rows)
    return tally


def conversation(transcript: Transcript, documents: Sequence[Document], layout: Layout) -> dict:
    """Returns the row of a question: the system message, a user message with documents and question, and the answer.

    The transcript must be opened (`Layout.open`). Adds to its steps the documents, cut as for the evaluation, and the
    answer.
    """
    question = transcript.question
    protocol = layout.protocol
    layout.splice(transcript, [documents])
    prompt = protocol.observation(protocol.quoted(question.text), transcript.steps)
    transcript.steps.append(Step(answer=question.answers[0]))
    reply = protocol.render(transcript.steps[-1], len(transcript.steps))
    messages = [
        turn("system", protocol.system),
        turn("user", prompt),
        turn("assistant", reply),
    ]
    return {"id": question.id, "messages": messages, "source": "rag"}
