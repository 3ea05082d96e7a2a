"""Which mode an ask of mode `auto` goes to, by its words (English); nothing is learned and no model is asked."""

import re
from collections.abc import Collection

GREETING = re.compile(
    r"^(\W*\b(hi|hello|hey|good (morning|afternoon|evening|night)|thanks?( you)?|thank you|bye|goodbye|ok(ay)?|please|"
    r"nice|great|cool|sorry|yes|no)\b)+",
    re.IGNORECASE,
)
SMALL_TALK = re.compile(r"^\W*(how are you|who are you|what can you do|what is your name)\b.{0,20}$", re.IGNORECASE)
WRITING = re.compile(
    r"^\W*((please|can you|could you|would you) )*(write|rewrite|rephrase|translate|summari[sz]e|shorten|draft|compose|"
    r"correct|proofread|tell me a (joke|story)|continue)\b",
    re.IGNORECASE,
)
# `-` and `/` count as signs of a sum only with blanks around them: dates and ranges of years have none. After "how
# many", a number counts unless it is a year.
REASONING = re.compile(
    r"\b(step by step|calculate|compute|solve|prove|derive|deduce|infer|logic(al(ly)?)?|puzzle|riddle|probability|"
    r"explain why|how would|what (would|happens?) if|if all|suppose|assume|reason(ing)? about)\b"
    r"|\d\s*[+*^=<>\u00d7\u00f7]\s*\d|\d\s[-/]\s\d|\bhow (many|much)\b.{0,200}\b(?!(1\d|20)\d\d\b)\d",
    re.IGNORECASE,
)
QUESTION = re.compile(
    r"\?\s*$|^\W*(who|whom|whose|when|where|which|what|why|how|is|are|was|were|did|does|do|has|have|in (which|what)|"
    r"find|search|look up|name the|tell me (about|who|when|where|which|what))\b",
    re.IGNORECASE,
)


def route(text: str, modes: Collection[str]) -> str:
    """Returns the mode of `modes` that fits a question.

    Small talk and requests to write something go to chat, sums and suppositions to reasoning, other questions to
    search, all else to chat. If their mode is missing, reasoning and search stand in for each other; if both are
    missing, all goes to chat, which must be among `modes`.
    """
    text = GREETING.sub("", text)
    if SMALL_TALK.search(text) or WRITING.search(text):
        return "chat"
    order = ["chat"]
    if REASONING.search(text):
        order = ["reasoning", "search", "chat"]
    elif QUESTION.search(text):
        order = ["search", "reasoning", "chat"]
    return next(mode for mode in order if mode in modes)
