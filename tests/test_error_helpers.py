"""The check of a command's output by the code of its error."""

import pytest

from tests.errors import shows

UNUSED = "r3lite.plan: --card is T4, but has no effect here: it needs --device cuda\nthe run has 7 rows\n"
SILENT = "\nr3lite.collect stopped: the teacher does not reply: server\n  Run the command again to continue.\n"


def test_an_error_is_found_by_its_code_with_its_values():
    assert shows(UNUSED, "setting-unused", "--card", "T4", "--device cuda")
    assert shows(UNUSED + SILENT, "teacher-silent", "server")


def test_another_error_or_another_value_is_not_found():
    assert not shows(UNUSED, "teacher-silent")
    assert not shows(UNUSED, "setting-unused", "7 rows")  # of another line
    assert not shows(SILENT, "teacher-silent", "client")


def test_cause_and_remedy_are_looked_for():
    assert not shows(SILENT.partition("\n  ")[0], "teacher-silent")


def test_a_code_that_no_error_has_is_a_mistake_of_the_test():
    with pytest.raises(KeyError):
        shows(UNUSED, "no-such-code")
