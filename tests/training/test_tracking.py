"""What TensorBoard and Weights & Biases get of a run's log, read back from their own files."""

import importlib.util

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.settings import TrackSettings
from r3lite.training.metrics import NO_TRACKER, MetricsLog
from r3lite.training.tracking import WANDB_ID, build_tracker
from tests.errors import raises

SETTINGS = {"seed": 7}
RECORDS = [{"step": 1, "loss": 2.0, "guard/alarm": "kl", "kl": None}, {"step": 2, "loss": 1.5, "eval/f1": 0.5}]


def logged(folder, track: str, records=RECORDS, done: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    tracker = NO_TRACKER
    if track != "none":
        tracking = TrackSettings(track=track, track_project="p", track_name="n")
        tracker = build_tracker(tracking, SETTINGS, output=folder, done=done)
    log = MetricsLog(folder, start=done, total=3, label="sft", tracker=tracker)
    for record in records:
        log.write(record)
    log.close()


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_the_same_numbers_under_the_same_names(tmp_path):
    logged(tmp_path, "tensorboard")
    assert scalars(tmp_path) == {"loss": [(1, 2.0), (2, 1.5)], "eval/f1": [(2, 0.5)]}


def test_a_resumed_run_hides_what_it_writes_again(tmp_path):
    logged(tmp_path, "tensorboard")
    logged(tmp_path, "tensorboard", [{"step": 2, "loss": 1.25}], done=1)
    assert scalars(tmp_path)["loss"] == [(1, 2.0), (2, 1.25)]


def test_wandb_has_them_too_and_a_resumed_run_goes_on_there(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    init_calls = []
    sent = []

    class Run:
        id = "abc"

        def log(self, numbers, step):
            sent.append((step, numbers))

        def finish(self):
            sent.append("finished")

    monkeypatch.setattr(wandb, "init", lambda **kwargs: init_calls.append(kwargs) or Run())
    logged(tmp_path, "wandb")
    assert sent == [(1, {"loss": 2.0}), (2, {"loss": 1.5, "eval/f1": 0.5}), "finished"]
    assert init_calls[0]["project"] == "p" and init_calls[0]["name"] == "n" and init_calls[0]["config"]["seed"] == 7
    assert init_calls[0]["id"] is None and (tmp_path / WANDB_ID).read_text() == "abc\n"
    logged(tmp_path, "wandb", done=1)
    assert (init_calls[1]["id"], init_calls[1]["resume"]) == ("abc", "allow")
    logged(tmp_path, "wandb")  # begun anew in the same folder: another run there
    assert init_calls[2]["id"] is None


def test_a_refusal_of_wandb_is_told_with_a_remedy(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def init(**kwargs):
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "init", init)
    with raises(R3LiteError, "wandb-unusable", "no API key") as error:
        build_tracker(TrackSettings(track="wandb"), SETTINGS, output=tmp_path, done=0)
    assert "WANDB_API_KEY" in error.value.remedy


@pytest.mark.parametrize("track", ["tensorboard", "wandb"])
def test_a_package_that_is_not_there_is_named_before_the_run_begins(monkeypatch, track):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(R3LiteError, "package-missing", track) as error:
        TrackSettings(track=track).check()
    assert "r3lite[track]" in error.value.remedy
    TrackSettings().check()


def test_without_a_tracker_nothing_is_loaded_or_written(tmp_path):
    logged(tmp_path, "none")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
