"""An episode as it is shown to a model that judges it, or that criticizes its prompt."""

from r3lite.core.episode import Document, Episode

DOCUMENT_LENGTH = 512  # characters shown of a document's title and of its text, as in R3-RAG (arXiv 2505.23794)
TEXT_LENGTH = 2000  # characters shown of any other text


def described(episode: Episode) -> dict:
    """Returns an episode as JSON, which is how it is sent: no text in it can then look like the end of the data."""
    steps = []
    for number, step in enumerate(episode.steps, 1):
        entry: dict = {"step": number, "analysis": step.analysis[:TEXT_LENGTH]}
        if step.searches:
            entry["query"] = "\n".join(step.queries)[:TEXT_LENGTH]
            entry["documents"] = [_document(document) for document in step.documents]
        if step.verification:
            entry["verification"] = step.verification[:TEXT_LENGTH]
        if step.answer is not None:
            entry["answer"] = step.answer[:TEXT_LENGTH]
        steps.append(entry)
    return {
        "question": episode.question.text[:TEXT_LENGTH],
        "gold_answers": [answer[:TEXT_LENGTH] for answer in episode.question.answers],
        "final_answer": episode.prediction[:TEXT_LENGTH] or None,
        "steps": steps,
    }


def _document(document: Document) -> dict:
    return {"title": document.title[:DOCUMENT_LENGTH], "text": document.text[:DOCUMENT_LENGTH]}
