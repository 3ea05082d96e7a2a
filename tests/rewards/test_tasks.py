import warnings

import pytest

from r3lite.core.episode import Question
from r3lite.rewards.tasks import chat, coding, combined, function_calling
from tests.rewards.episodes import answered

PLAIN = "def add(a, b):\n    total = a + b\n    return total"
GOOD = 'def add(a: int, b):\n    """The sum."""\n    return a + b'


@pytest.mark.parametrize(
    ("code", "paid"),
    [
        (PLAIN, 0.4),  # it can be parsed, and has three lines
        ("x = 1", 0.3),
        (GOOD, 0.6),
        ('"""A module."""\nx = 1', 0.4),
        ("def add(a, b) -> int: return a + b", 0.4),
        ("class A:\n\n    def f(self, *rest: int): pass\n    # one more", 0.5),
        ("x: int = 1\ny = 2\nz = 3", 0.4),  # no hint in a signature
        ("\n".join("x = 1" for _ in range(61)), 0.3),
        ("def add(a, b:\n    return a", -0.3),
        ("", -0.3),
        ("(" * 1000, -0.3),
        ("x\0y", -0.3),
        (f"Here it is:\n```python\n{GOOD}\n```\nDone.", 0.6),
        (f"Here it is:\n{GOOD}", -0.3),  # the sentence is no Python
    ],
)
def test_code_is_paid_for_what_its_syntax_shows(code, paid):
    assert coding(answered(code)) == paid


def test_how_many_lines_fit_can_be_set():
    assert coding(answered(PLAIN), shortest=4) == coding(answered(PLAIN), longest=2) == 0.3


def test_code_is_never_run(tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\nraise SystemExit\nimport no_such_module"
    assert coding(answered(code)) == 0.4 and not (tmp_path / "ran").exists()


def test_odd_escapes_in_an_answer_warn_nobody():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert coding(answered("x = '\\d'")) == 0.3


ASKED = Question("q", 'You have [{"name": "weather", "parameters": {}}]. Is it raining?', ("weather",))


@pytest.mark.parametrize(
    ("call", "paid"),
    [
        ('{"name": "weather", "arguments": {"city": "Oslo"}}', 0.7),
        ('<functioncall> {"name": "weather", "arguments": "{}"}', 0.7),
        ('```json\n{"name": "weather", "arguments": {}}\n```', 0.7),
        # As glaive-function-calling-v2 writes all its calls: they were no JSON objects, and its own answers got -0.3.
        ('<functioncall> {"name": "weather", "arguments": \'{"city": "Oslo"}\'}', 0.7),
        ('{"name": "time", "arguments": \'{\n  "text": "it\'s \\"so\\""\n}\'\n}', 0.5),
        ('{"name": "weather", "arguments": \'{"city": "Oslo"}}', -0.3),
        ('{"name": "time", "arguments": {}}', 0.5),
        ('{"name": "weather"}', 0.5),
        ('{"city": "Oslo"}', 0.3),
        ('{"name": ["weather"], "arguments": {}}', 0.3),
        ("42", -0.3),  # JSON, but nothing that calls
        ("{'name': 'weather'}", -0.3),
        ("", -0.3),
    ],
)
def test_a_call_is_paid_for_its_form(call, paid):
    assert function_calling(answered(call, question=ASKED)) == paid


def test_tools_that_are_named_replace_those_of_the_question():
    call = '{"name": "weather", "arguments": {}}'
    assert function_calling(answered(call, question=ASKED), tools=["time"]) == 0.5
    assert (
        function_calling(answered(call), tools=["time", "weather"]) == 0.7 and function_calling(answered(call)) == 0.5
    )


def test_combined_chooses_by_the_task_of_the_row():
    call = '{"name": "f", "arguments": {}}'
    paid = {task: combined(answered(call, question=Question("q", "?", ("f",), type=task))) for task in TASKS}
    # As code it is an expression on one line; as a reply it has one word of three.
    assert paid == {"coding": 0.3, "function_calling": 0.5, "chat": 0.5, "": 0.5}
    assert chat(answered("Hello there", question=Question("q", "Hi", ("Hello, there!",)))) == 1


TASKS = ("coding", "function_calling", "chat", "")
