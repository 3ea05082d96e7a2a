"""How rewards stand on a command line and in a file, and come back from the file that a run wrote."""

import json

import pytest

from r3lite.core import command
from r3lite.core.config import UsageError
from r3lite.core.earlier_output import changes
from r3lite.core.invocation import resolve, to_toml
from r3lite.settings import PpoConfig


@pytest.fixture
def rewards(tmp_path):
    """The rewards of a command line and of the text of a file."""

    def read(*argv: str, file: str = ""):
        (tmp_path / "my.toml").write_text(file, encoding="utf-8")
        config = resolve("ppo", PpoConfig(), ["--config", str(tmp_path / "my.toml"), *argv])
        return config.reward.rewards

    return read


TABLES = """
[ppo]
seed = 1

[[ppo.rewards]]
name = "rouge_l"
weight = 0.5

[[ppo.rewards]]
name = "my.rewards:brevity"
weight = -2
most = 40
words = ["a, b", "c\\u007f"]
soft = true
"""
READ = (
    {"name": "rouge_l", "weight": 0.5},
    {"name": "my.rewards:brevity", "weight": -2, "most": 40, "words": ["a, b", "c\x7f"], "soft": True},
)


def test_where_rewards_come_from(rewards):
    assert rewards() is None
    assert rewards(file=TABLES) == READ and rewards(file=TABLES.replace("[[ppo.", "[[")) == READ
    assert rewards("--rewards", "rouge_l=0.5, m:f=-1e-3,chat", file=TABLES) == (
        {"name": "rouge_l", "weight": 0.5},
        {"name": "m:f", "weight": -0.001},
        {"name": "chat", "weight": 1.0},
    )
    assert rewards("--rewards", "none", file=TABLES) is None  # also takes back those of a preset
    assert rewards("--preset", "solution")[0]["name"] == "strict_format"


def test_what_a_run_wrote_down_is_read_back(rewards, tmp_path):
    first = resolve("ppo", PpoConfig(), ["--config", write(tmp_path / "my.toml", TABLES)])
    assert rewards(file=to_toml(first, "ppo")) == READ
    saved_settings = json.loads(json.dumps(command.flat(first)))  # as a checkpoint keeps them
    assert changes(saved_settings, first) == ""


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_resumed_run_cannot_change_them(tmp_path):
    old_config = resolve("ppo", PpoConfig(), ["--config", write(tmp_path / "my.toml", TABLES)])
    new_config = resolve("ppo", PpoConfig(), ["--rewards", "rouge_l=0.5"])
    saved_settings = json.loads(json.dumps(command.flat(old_config)))
    assert "rewards (was [{'name': 'rouge_l', 'weight': 0.5}, " in changes(saved_settings, new_config)
    # A run of a version without named rewards had none, and goes on.
    old = {key: value for key, value in json.loads(json.dumps(command.flat(PpoConfig()))).items() if key != "rewards"}
    assert changes(old, PpoConfig()) == ""


MUST_BE = "it must be NAME=WEIGHT, or a table of a name, a weight and the parameters of the reward"


@pytest.mark.parametrize(
    ("argv", "file", "message"),
    [
        (["--rewards", "em=x"], "", f"rewards is 'em=x'; {MUST_BE}"),
        (["--rewards", "em=nan"], "", MUST_BE),
        (["--rewards", "em=1e12"], "", MUST_BE),
        (["--rewards", "=1"], "", MUST_BE),
        (["--rewards", "os.path=1"], "", MUST_BE),
        (["--rewards", "../m:f=1"], "", MUST_BE),
        (["--rewards", ""], "", "--rewards is empty"),
        (["--rewards", "chat=1,chat=2"], "", "--rewards has chat 2 times; give it one weight"),
        ([], "[[ppo.rewards]]\nweight = 1", MUST_BE),
        ([], '[[ppo.rewards]]\nname = "chat"\nweight = "1"', MUST_BE),
        ([], '[[ppo.rewards]]\nname = "chat"\nweight = true', MUST_BE),
        ([], '[[ppo.rewards]]\nname = "chat"\nmost = inf', MUST_BE),
        ([], '[[ppo.rewards]]\nname = "chat"\nmost = 1979-05-27', MUST_BE),
        ([], '[[ppo.rewards]]\nname = "chat"\nmost = {a = 1}', MUST_BE),
        ([], '[ppo.rewards]\nname = "chat"', "it must be a list"),
        ([], "[ppo]\nrewards = [1]", MUST_BE),
        ([], "[ppo]\nrewards = [true]", MUST_BE),
    ],
)
def test_what_is_no_reward_is_refused(rewards, argv, file, message):
    with pytest.raises(UsageError) as caught:
        rewards(*argv, file=file)
    assert message in str(caught.value) and "\n" not in str(caught.value)
