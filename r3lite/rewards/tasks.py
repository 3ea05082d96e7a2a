"""Rewards for other tasks than questions: writing Python code, calling functions, chatting. Code is parsed, never run.

Every function takes an episode, whose answer is the code, the call or the reply; what it returns is the reward of the
last step. `--format tags` and `solution` keep the lines of an answer; an answer of `r3` is one line.
"""

import ast
import re
import warnings

from r3lite.core.episode import Episode
from r3lite.core.records import InvalidRecord, parse
from r3lite.rewards.answers import rouge_l

FENCED = re.compile(r"```[\w+-]*\n(.*?)```", re.DOTALL)
CALL = "<functioncall>"  # stands before a call in glaive-function-calling-v2
DECLARED = re.compile(r'"name":\s*"([^"]+)"')
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


def coding(episode: Episode, shortest: int = 3, longest: int = 60) -> float:
    """0.3 if the answer is Python code that can be parsed, else -0.3 in all; 0.1 more each
    for a docstring, for a type hint in a function's signature, and for `shortest` to `longest` lines. At most 0.6."""
    code = _inside(episode.prediction)
    tree = _parsed(code) if code.strip() else None
    if tree is None:
        return -0.3
    documented = any(isinstance(n, DOCUMENTED) and ast.get_docstring(n) for n in ast.walk(tree))
    hinted = any(isinstance(n, FUNCTIONS) and _has_hints(n) for n in ast.walk(tree))
    lines = sum(bool(line.strip()) for line in code.splitlines())
    return round(0.3 + 0.1 * (documented + hinted + (shortest <= lines <= longest)), 1)


def function_calling(episode: Episode, tools: tuple[str, ...] = ()) -> float:
    """0.3 if the answer is a JSON object, else -0.3; 0.2 more if it has a `name` and `arguments` (an object, or its
    text), and 0.2 if the name is a known tool's: one of `tools`, or without these one that the question, or a message
    before it, declares as `"name": "..."`. At most 0.7."""
    try:
        call = parse(_inside(episode.prediction).strip().removeprefix(CALL))
    except InvalidRecord:
        return -0.3
    if not isinstance(call, dict):
        return -0.3
    name = call.get("name")
    complete = isinstance(name, str) and isinstance(call.get("arguments"), (dict, str))
    given = [*(message["content"] for message in episode.question.earlier), episode.question.text]
    known = name in (tools or DECLARED.findall("\n".join(given)))
    return round(0.3 + 0.2 * (complete + known), 1)


def chat(episode: Episode) -> float:
    """The best ROUGE-L F1 of the reply over the reference replies, 0 to 1."""
    return rouge_l(episode)


def combined(episode: Episode) -> float:
    """`coding` or `function_calling` if that is the question's type (`task` in its row), else `chat`."""
    return {"coding": coding, "function_calling": function_calling}.get(episode.question.type, chat)(episode)


def _inside(answer: str) -> str:
    """What stands in the first fenced block of an answer; all of it if there is none."""
    block = FENCED.search(answer)
    return block[1] if block else answer


def _parsed(code: str) -> ast.Module | None:
    """The syntax tree; None if it has none, or one that is nested too deep."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes and the like
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _has_hints(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    return function.returns is not None or any(argument.annotation for argument in arguments)
