"""Rewards for other tasks than questions: writing Python code, calling functions, chatting. Code is parsed, never run.

Every function takes an episode, whose answer is the code, the call or the reply; what it returns is the reward of the
last step. `--format tags` and `solution` keep the lines of an answer; an answer of `r3` is one line.
"""

import ast
import json
import re
import warnings

from r3lite.core.episode import Episode, Question
from r3lite.core.records import InvalidRecord, parse
from r3lite.rewards.answers import rouge_l

FENCED = re.compile(r"```[\w+-]*\n(.*?)```", re.DOTALL)
CALL = "<functioncall>"  # stands before a call in glaive-function-calling-v2
# How that data set writes arguments, which is not JSON: as a text between single quotes.
QUOTED_ARGUMENTS = re.compile(r"""("arguments":\s*)'(.*)'(?=\s*\}$)""", re.DOTALL)
DECLARED = re.compile(r'"name":\s*"([^"]+)"')
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


def coding(episode: Episode, shortest: int = 3, longest: int = 60) -> float:
    """Returns -0.3 if the answer cannot be parsed as Python code, else 0.3 to 0.6.

    The code itself is worth 0.3. A docstring, a type hint in a function's signature, and a length of `shortest` to
    `longest` lines add 0.1 each.
    """
    code = _unfenced(episode.prediction)
    tree = _parsed(code) if code.strip() else None
    if tree is None:
        return -0.3
    nodes = list(ast.walk(tree))
    has_docstring = any(isinstance(node, DOCUMENTED) and ast.get_docstring(node) for node in nodes)
    has_hints = any(isinstance(node, FUNCTIONS) and _has_hints(node) for node in nodes)
    lines = sum(bool(line.strip()) for line in code.splitlines())
    has_good_length = shortest <= lines <= longest
    virtues = sum([has_docstring, has_hints, has_good_length])
    return round(0.3 + 0.1 * virtues, 1)


def function_calling(episode: Episode, tools: tuple[str, ...] = ()) -> float:
    """Returns -0.3 if the answer is no JSON object, else 0.3 to 0.7.

    The object itself is worth 0.3. A `name` with `arguments` (an object, or its text, also between single quotes) adds
    0.2, and the name of a known tool adds 0.2. The known tools are `tools`; if there are none, those that the question,
    or a message before it, declares as `"name": "..."`.
    """
    text = _unfenced(episode.prediction).strip().removeprefix(CALL)
    text = QUOTED_ARGUMENTS.sub(lambda match: match[1] + json.dumps(match[2]), text)
    try:
        call = parse(text)
    except InvalidRecord:
        return -0.3
    if not isinstance(call, dict):
        return -0.3
    name = call.get("name")
    is_complete = isinstance(name, str) and isinstance(call.get("arguments"), (dict, str))
    is_known = name in (tools or _declared_tools(episode.question))
    virtues = sum([is_complete, is_known])
    return round(0.3 + 0.2 * virtues, 1)


def chat(episode: Episode) -> float:
    """Returns the best ROUGE-L F1 of the reply over the reference replies, 0 to 1."""
    return rouge_l(episode)


def combined(episode: Episode) -> float:
    """Returns `coding` or `function_calling` if that is the question's type (`task` in its row), else `chat`."""
    if episode.question.type == "coding":
        return coding(episode)
    if episode.question.type == "function_calling":
        return function_calling(episode)
    return chat(episode)


def _unfenced(answer: str) -> str:
    """Returns the content of the first fenced block of an answer; all of it if there is none."""
    block = FENCED.search(answer)
    return block[1] if block else answer


def _declared_tools(question: Question) -> list[str]:
    """Returns the names that the messages before a question and the question declare as `"name": "..."`."""
    messages = [message["content"] for message in question.earlier]
    return DECLARED.findall("\n".join([*messages, question.text]))


def _parsed(code: str) -> ast.Module | None:
    """Returns the syntax tree; None if there is none, or if it is nested too deep."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about odd escapes and the like
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _has_hints(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if function.returns is not None:
        return True
    return any(isinstance(node, ast.arg) and node.annotation for node in ast.walk(function.args))
