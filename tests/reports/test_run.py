"""What is read of folders, sound or not."""

from r3lite.core.errors import R3LiteError
from r3lite.reports.run import MAX_EPISODES, read_runs
from tests.errors import raises
from tests.reports.conftest import episode


def test_a_run_that_was_killed_is_read_without_its_torn_line(run_folder):
    folder = run_folder("a", metrics=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    (run,) = read_runs([str(folder)])
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert run.label == "ppo, 2 steps, not complete" and "metrics.jsonl, line 3" in run.notes[0]


def test_a_step_that_is_there_twice_counts_once_with_what_came_last(run_folder):
    """A run that was resumed without its later checkpoint writes steps again."""
    (run,) = read_runs([str(run_folder("a", metrics=[{"step": 1, "loss": 2.0}, {"step": 1, "loss": 3.0}]))])
    assert run.metrics == [{"step": 1, "loss": 3.0}]


def test_the_first_round_and_the_newest_are_kept(run_folder):
    rounds = [episode(f"{n}-{i}", n) for n in (1, 2, 3) for i in range(MAX_EPISODES + 5)]
    rounds[0]["steps"][0]["faults"] = ["no_analysis"]
    (run,) = read_runs([str(run_folder("a", metrics=[{"step": 3}], episodes=rounds))])
    first, newest = run.episodes.values()
    assert [e.text("id") for e in first] == [f"1-{i}" for i in range(MAX_EPISODES)]
    assert [e.text("id") for e in newest] == [f"3-{i}" for i in range(MAX_EPISODES)]
    assert run.faults[1] == {"no_analysis": 1} and run.steps == dict.fromkeys((1, 2, 3), 2 * (MAX_EPISODES + 5))


def test_a_folder_of_runs_stands_for_all_of_them_and_names_tell_them_apart(run_folder, tmp_path):
    run_folder("b", metrics=[])
    run_folder("a", scores={"n": 3})
    runs = read_runs([str(tmp_path)])
    assert sorted(run.name for run in runs) == ["a", "b"]
    namesake = tmp_path / "c" / "a"
    namesake.mkdir(parents=True)
    (namesake / "metrics.jsonl").touch()
    assert [run.name for run in read_runs([str(tmp_path / "a"), str(namesake)])] == [f"{tmp_path.name}/a", "c/a"]


def test_a_folder_that_is_named_twice_is_one_run(run_folder, tmp_path, monkeypatch):
    """Named once by its whole path, it was there twice, under one name, and was compared with itself."""
    folder = run_folder("a", metrics=[{"step": 1}])
    monkeypatch.chdir(tmp_path)
    assert [run.name for run in read_runs(["a", str(folder), "."])] == ["a"]


def test_what_holds_no_run_is_refused(tmp_path):
    with raises(R3LiteError, "not-a-folder"):
        read_runs([str(tmp_path / "missing")])
    with raises(R3LiteError, "no-run"):
        read_runs([str(tmp_path)])
