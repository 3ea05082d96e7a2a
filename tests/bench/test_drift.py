"""The settings that bench.drift trains with, and its verdict."""

import tomllib

from bench.drift import preset, summary, write_settings
from r3lite.core.invocation import resolve
from r3lite.settings import PpoConfig


def test_the_tiny_model_is_trained_with_the_section_of_the_preset_at_the_same_share_of_the_rate(tmp_path):
    section = write_settings(tmp_path / "my.toml", "hotpotqa", 500)
    settings = tomllib.loads((tmp_path / "my.toml").read_text(encoding="utf-8"))
    ppo = preset("hotpotqa")["ppo"]
    rate = ppo["learning_rate"] / preset("hotpotqa")["sft"]["learning_rate"] * preset("tiny")["sft"]["learning_rate"]
    rounds = -(-500 // (ppo["batch_size"] * ppo["num_generations"]))
    assert settings["ppo"] == section == ppo | {"learning_rate": rate, "max_steps": rounds}
    config = resolve("ppo", PpoConfig(), ["--config", str(tmp_path / "my.toml")])
    assert (config.model.model, config.rl.algorithm, config.rl.batch_size) == (
        "tiny",
        ppo["algorithm"],
        ppo["batch_size"],
    )
    assert config.rl.negative_advantage_scale == ppo.get("negative_advantage_scale", 1.0)  # and not that of tiny


def test_the_verdict_by_hand():
    """A mean loss of 0.01 is the most; a mean KL of less than half of the budget is standing still."""

    def verdict(*runs: tuple[float, float, float]) -> str:
        return summary([{"cold_em": cold, "rl": {"em": em, "kl": kl}} for cold, em, kl in runs], "rl", 0.001)

    assert "mean loss +0.0050, mean KL 0.001: passes" in verdict((0.9, 0.88, 0.0005), (0.9, 0.91, 0.0015))
    assert "does not pass" in verdict((0.9, 0.88, 0.0005), (0.9, 0.895, 0.0015))
    assert "does not pass" in verdict((0.9, 0.9, 0.0004))
    assert "does not pass" in verdict((0.9, 0.9, 0.0021))
