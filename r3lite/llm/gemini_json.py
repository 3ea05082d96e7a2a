"""Reads the JSON that Gemini's server sends, and checks it: texts, why one is missing, token counts, errors.

Knows no network and no settings. InvalidRecord says what is wrong with a reply.
"""

from r3lite.core.records import InvalidRecord, Record, Source, parse
from r3lite.llm.replies import Answer, Complaint, estimated_tokens, token_count

BLOCKED = ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "MODEL_ARMOR", "LANGUAGE")


def read_answer(body: str, prompt_tokens: float, limit: int) -> Answer:
    """Reads the body of a reply to a prompt of about `prompt_tokens` tokens, which may write at most `limit` tokens.

    A count that is missing, zero or not a count is replaced by an estimate, so that no reply is free.
    """
    reply = Record(parse(body), Source("the reply"))
    candidates = reply.records("candidates", [])
    usage = reply.record("usageMetadata")
    if candidates:
        first = candidates[0]
        parts = first.record("content").records("parts", [])
        text = "".join(p.text("text", "", blank=True) for p in parts if not p.flag("thought", False))
        detail = first.text("finishReason", "STOP")
        failure = _failure(text, detail)
    else:
        reason = reply.record("promptFeedback").text("blockReason", "")
        text, failure, detail = "", "blocked" if reason else "empty", f"prompt: {reason or 'no reason given'}"
    read = token_count(usage, "promptTokenCount") or prompt_tokens
    written = token_count(usage, "candidatesTokenCount") or estimated_tokens(text)
    thoughts = token_count(usage, "thoughtsTokenCount")
    return Answer(text, failure, detail, read, written + (limit if thoughts is None else thoughts))


def _failure(text: str, reason: str) -> str | None:
    if reason == "MAX_TOKENS":
        return "cut"
    if reason in BLOCKED:
        return "blocked"
    return None if text.strip() else "empty"


def read_complaint(body: str) -> Complaint:
    """The body of an error; one of another form is its own message."""
    try:
        error = Record(parse(body), Source("")).record("error")
        delays = tuple(d.text("retryDelay", "", blank=True) for d in error.records("details", []))
        return Complaint(error.text("status", "", blank=True), error.text("message", "", blank=True), delays)
    except InvalidRecord:
        return Complaint("", body)
