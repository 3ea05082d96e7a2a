"""The list of guards that `bench.mutants` removes fits the package; 20 of them are removed here, slowly."""

import subprocess
import sys

import pytest

from bench import mutants

MUTANTS = mutants.read_list()


def test_sixty_guards_of_which_twenty_are_removed_by_slow_tests():
    assert len({mutant.guard for mutant in MUTANTS}) == len(MUTANTS) == 60
    assert sum(mutant.slow for mutant in MUTANTS) == 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.guard)
def test_a_guard_is_where_the_list_says(mutant):
    """If its line was changed, change the list, too."""
    text = (mutants.ROOT / mutant.file).read_text(encoding="utf-8")
    compile(mutant.mutated(text), mutant.file, "exec")
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (mutants.ROOT / file).read_text(encoding="utf-8"), test


@pytest.mark.slow
@pytest.mark.parametrize("guard", [mutant.guard for mutant in MUTANTS if mutant.slow])
def test_a_removed_guard_fails_a_test(guard):
    command = [sys.executable, "-m", "bench.mutants", "--only", guard]
    done = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
