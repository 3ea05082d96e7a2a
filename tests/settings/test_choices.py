"""Choices that bring other settings with them: what wins, and what contradicts itself."""

import pytest

from r3lite import sft
from r3lite.core import invocation
from r3lite.core.config import Origin, flat
from r3lite.core.files import shipped
from r3lite.core.invocation import resolve, to_toml
from r3lite.settings import PpoConfig, RLSettings, SftConfig


def settings(*argv: str, default=None) -> dict:
    return flat(resolve("ppo", default or PpoConfig(), list(argv)))


def test_an_algorithm_brings_its_papers_settings():
    plain = settings()
    assert (plain["algorithm"], plain["clip_low"], plain["clip_high"], plain["kl_beta"]) == ("ppo", 0.2, 0.2, 0.001)
    for name in ("ppo", "grpo"):  # what they had before others were there
        assert settings("--algorithm", name) == plain | {"algorithm": name}
    dapo, gspo = settings("--algorithm", "dapo"), settings("--algorithm", "gspo")
    assert (dapo["clip_low"], dapo["clip_high"], dapo["kl_beta"], dapo["refill_limit"]) == (0.2, 0.28, 0.0, 3)
    assert (dapo["overlong_filter"], dapo["overlong_penalty"]) == ("on", 1.0)
    assert (gspo["clip_low"], gspo["clip_high"], gspo["old_logprobs"]) == (3e-4, 4e-4, "trainer")


def test_what_is_given_wins_over_what_a_choice_brings(toml):
    """A flag or a file is explicit; a preset was written for the algorithm that it names or for the default one."""
    dapo = ["--algorithm", "dapo"]
    assert settings(*dapo, "--clip-high", "0.2")["clip_high"] == 0.2
    path = toml('[ppo]\nalgorithm = "dapo"\nclip_high = 0.3\n')
    assert settings("--config", path)["clip_high"] == 0.3
    assert settings("--config", path)["refill_limit"] == 3
    assert settings("--config", toml("[ppo]\nclip_high = 0.3\n"), *dapo)["clip_high"] == 0.3
    assert "kl_beta = 0.001" in shipped("presets", "search-r1.toml").read_text(encoding="utf-8")
    assert settings("--preset", "search-r1")["kl_beta"] == 0.001
    assert settings("--preset", "search-r1", *dapo)["kl_beta"] == 0.0
    tiny = settings("--preset", "tiny", *dapo)  # a preset's other settings stay
    assert (tiny["kl_beta"], tiny["negative_advantage_scale"], tiny["clip_high"]) == (0.0, 0.2, 0.28)


def test_a_preset_that_makes_the_same_choice_refines_it(tmp_path, monkeypatch):
    """Whether the choice is repeated on the command line or not."""
    (tmp_path / "laptop-4gb.toml").write_text('algorithm = "dapo"\nclip_high = 0.25\n', encoding="utf-8")
    monkeypatch.setattr(invocation, "shipped", lambda *parts: tmp_path.joinpath(*parts[1:]))
    for flags in ([], ["--algorithm", "dapo"]):
        resolved = settings(*flags)
        assert (resolved["clip_high"], resolved["refill_limit"]) == (0.25, 3)
    assert settings("--algorithm", "gspo")["clip_high"] == 4e-4


def test_shares_and_epochs_are_rounded_up_from_what_they_are_and_not_from_what_floats_make_of_them():
    """0.55 x 100 is 55.00000000000001 and 1.1 x 100 / 10 is 11.000000000000002 in floats."""
    rl = RLSettings(batch_size=100)
    assert [rl.question_count(share) for share in (0.0, 0.001, 0.55, 0.551, 1.0)] == [0, 1, 55, 56, 100]
    flags = ["--epochs", "1.1", "--batch-size", "10"]
    ppo = resolve("ppo", PpoConfig(), flags)
    assert [ppo.rounds(questions) for questions in (1, 100, 101)] == [1, 11, 12]
    sft = resolve("sft", SftConfig(), [*flags, "--gradient-accumulation", "1"])
    assert sft.steps_and_row_limit(10) == (2, 11) and sft.steps_and_row_limit(100) == (11, 110)


def test_what_a_run_wrote_down_is_read_back(toml):
    first = resolve("ppo", PpoConfig(), ["--algorithm", "gspo", "--kl-beta", "0.1"])
    restored = settings("--config", toml(to_toml(first, "ppo")))
    assert {**restored, "config": None} == flat(first)


def test_what_was_asked_for_is_told_from_what_came_with_a_choice():
    config = resolve("ppo", PpoConfig(), ["--algorithm", "dapo", "--clip-low", "0.1"])
    assert config.set_by_user == {"algorithm": Origin.FLAG, "clip_low": Origin.FLAG}


def test_what_was_asked_for_is_what_the_preset_does_not_have():
    assert SftConfig().lora.lora_r == 8
    config = resolve("sft", SftConfig(), ["--preset", "tiny", "--lora-r", "3"])
    assert config.lora.lora_r == 3 and "lora_r" in config.set_by_user
    assert "lora_r" not in resolve("sft", SftConfig(), ["--preset", "tiny", "--lora-r", "16"]).set_by_user


def test_where_a_setting_stood_is_remembered(toml):
    path = toml("lora_r = 3\nseed = 1\n[sft]\nlora_r = 4\nlora_alpha = 5.0\n[ppo]\nlora_dropout = 0.5\n")
    config = resolve("sft", SftConfig(), ["--config", path, "--lora-alpha", "6"])
    assert {k: v for k, v in config.set_by_user.items() if k != "config"} == {
        "lora_r": Origin.TABLE,
        "seed": Origin.SHARED,
        "lora_alpha": Origin.FLAG,
    }


def test_schedules_bring_where_they_end():
    sft, ppo = SftConfig(), PpoConfig()
    ends = {"cosine": 0.1, "linear": 0.0, "constant": 1.0}
    for name, end in ends.items():
        for default in (sft, ppo):
            assert settings("--learning-rate-schedule", name, default=default)["min_learning_rate"] == end
        assert settings("--preset", "tiny", "--learning-rate-schedule", name)["min_learning_rate"] == end
    explicit = settings("--learning-rate-schedule", "linear", "--min-learning-rate", "0.5")
    assert explicit["min_learning_rate"] == 0.5
    # Nothing is chosen: each command's own, as before there was a choice.
    assert (settings(default=sft)["min_learning_rate"], settings()["min_learning_rate"]) == (0.1, 1.0)
    assert settings("--preset", "tiny")["min_learning_rate"] == 0.3


@pytest.mark.parametrize(
    ("schedule", "end", "says"),
    [
        ("constant", "0.5", "--min-learning-rate is 0.5, but a constant rate does not fall"),
        ("linear", "1", "--min-learning-rate is 1, but a linear schedule must fall"),
    ],
)
def test_a_schedule_that_contradicts_its_end_is_refused(capsys, schedule, end, says):
    flags = ["--dry-run", "--learning-rate-schedule", schedule, "--min-learning-rate", end]
    assert sft.main(flags) == 2 and says in capsys.readouterr().err
