"""JSON of any origin: what `parse` and `Record` take, and that each refusal names the field."""

import json
import re

import pytest

from r3lite.core.records import MAX_DEPTH, InvalidRecord, Record, Source, number_text, parse


def record(**values) -> Record:
    return Record(values, Source("f.json", "Mend it."))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("{} {}", "extra data"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ('{"a": 1, "b": 2, "a": 3}', "duplicate key 'a'"),
        ("[" * 100_000, f"nested more than {MAX_DEPTH} deep"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep"),
        ("1" * 5000, "too many digits"),
        ('{"a": [1e999]}', "the number '1e999' is too large"),  # was read as infinity, and written so
        ("[-1e999]", "the number '-1e999' is too large"),
        (r'["\ud83d"]', "half of a surrogate pair"),
    ],
)
def test_text_beyond_the_bounds_is_refused(text, problem):
    with pytest.raises(InvalidRecord, match=re.escape(problem)):
        parse(text)


def test_text_within_the_bounds_is_what_json_reads():
    for text in ("[" * MAX_DEPTH + "]" * MAX_DEPTH, r'["\ud83d\ude00"]', ' {"a": [1, 2.5e3, null, true]}\n', "[]" * 1):
        assert parse(text) == json.loads(text)
    assert parse(json.dumps([[]] * 500)) == [[]] * 500  # wide, not deep


@pytest.mark.parametrize(
    ("take", "value", "problem"),
    [
        ("text", 7, "x is 7, not text"),
        ("text", " ", "x is blank"),
        ("text", None, "x is missing"),
        ("identifier", True, "x is True, not text or a whole number"),
        ("identifier", 1.5, "x is 1.5, not text or a whole number"),
        ("identifier", 10**400, "x is 1000000000"),
        ("flag", "false", "x is 'false', not true or false"),
        ("flag", 0, "x is 0, not true or false"),
        ("whole", True, "x is True, not a whole number of at least 0"),
        ("whole", -1, "x is -1, not a whole number of at least 0"),
        ("whole", 2.0, "x is 2.0, not a whole number"),
        ("number", "1", "x is '1', not a finite number"),
        ("number", False, "x is False, not a finite number"),
        ("number", float("inf"), "x is inf, not a finite number"),
        ("number", 10**400, "x is 100"),
        ("items", "abc", "x is 'abc', not a list"),
        ("texts", "abc", "x is 'abc', not a list of texts"),
        ("texts", ["a", 1], "x is ['a', 1], not a list of texts"),
        ("records", [{}, 3], "x[1] is 3, not a JSON object"),
        ("record", [], "x is [], not a JSON object"),
    ],
)
def test_a_field_of_another_type_is_named_with_file_and_remedy(take, value, problem):
    with pytest.raises(InvalidRecord) as error:
        getattr(record(x=value), take)("x")
    assert f"f.json: {problem}" in error.value.cause and error.value.remedy == "Mend it."


def test_a_default_stands_for_what_is_absent_or_null_only():
    row = record(null=None, text="")
    assert row.text("null", "d") == row.text("gone", "d") == "d" and row.text("text", "d", blank=True) == ""
    assert (row.whole("gone", 3), row.flag("gone", True), row.texts("gone", ())) == (3, True, ())
    with pytest.raises(InvalidRecord, match="text is blank"):
        row.text("text", "d")


def test_bounds_and_choices():
    row = record(n=0.0, k="b")
    assert row.number("n", low=0) == 0 and row.choice("k", ("a", "b")) == "b"
    with pytest.raises(InvalidRecord, match=r"n is 0.0, not a finite number above 0 and of at most 1"):
        row.number("n", low=0, high=1, above=True)
    with pytest.raises(InvalidRecord, match="k is 'b', not one of a, c"):
        row.choice("k", ("a", "c"))


def test_a_nested_field_is_named_with_its_way():
    row = record(steps=[{"documents": [{"id": 1}]}])
    with pytest.raises(InvalidRecord, match=re.escape("f.json: steps[0].documents[0].title is missing")):
        row.records("steps")[0].records("documents")[0].text("title")


def test_a_field_that_is_missing_is_told_with_those_that_are_there():
    """A CSV file with `query` for `question` was told that `question` is missing, and no more."""
    many_fields = {f"k{number}": number for number in range(1, 20)}
    keys = ", ".join(f"'k{number}'" for number in range(1, 9))
    causes = []
    for row in (record(query="Who?", response="Ann", note=None), record(note=None), record(**many_fields)):
        with pytest.raises(InvalidRecord) as error:
            row.text("question")
        causes.append(error.value.cause.removeprefix("f.json: question is missing"))
    assert causes == ["; its keys are 'query', 'response'", "", f"; its keys are {keys}, ..."]


def test_an_error_quotes_long_and_strange_values_on_one_short_line():
    for value in ("x" * 10_000, "a\nb\x1b[31m", {"k": ["v"] * 1000}, [[[[[1]]]]]):
        with pytest.raises(InvalidRecord) as error:
            record(x=value).whole("x")
        assert len(error.value.cause) < 250 and "\n" not in error.value.cause and "\x1b" not in error.value.cause


def test_numbers_as_text():
    values = (7, 7.0, -3.0, 1.5, 0.1, 1e16, 1e300, float(2**63))
    assert [number_text(value) for value in values] == [
        "7", "7", "-3", "1.5", "0.1", "10000000000000000", "1e+300", "9.223372036854776e+18",
    ]  # fmt: skip
