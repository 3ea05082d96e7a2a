"""The shipped presets: what they hold, and what takes their place."""

import pytest

import r3lite.settings as settings
from r3lite.core.config import flat
from r3lite.core.files import shipped
from r3lite.core.invocation import resolve
from r3lite.core.token_record import TokenRecord
from r3lite.evaluate import check_baseline
from r3lite.protocols.markup import Tag
from r3lite.protocols.registry import build_protocol
from r3lite.rl.algorithms import ALGORITHMS
from r3lite.rl.batch import Batch, Rollout
from tests.commands import CONFIGS
from tests.test_config import read


@pytest.mark.parametrize("preset", sorted(p.stem for p in shipped("presets").glob("*.toml")))
def test_every_preset_is_valid(preset):
    assert read("--preset", preset)["preset"] == preset


def length(*argv: str) -> tuple:
    schedule = resolve("ppo", settings.PpoConfig(), list(argv)).schedule
    return schedule.max_steps, schedule.epochs


def test_epochs_that_are_asked_for_replace_the_steps_of_earlier_sources(toml):
    """`ppo --epochs 3` took the 200 steps of the default, and with --preset tiny the preset's."""
    assert length() == (200, 1.0)
    assert length("--epochs", "3") == length("--preset", "tiny", "--epochs", "3") == (None, 3.0)
    assert length("--epochs", "3", "--max-steps", "5") == (5, 3.0)
    file = toml("[ppo]\nepochs = 2\n")
    assert length("--preset", "tiny", "--config", file) == (None, 2.0)
    assert length("--config", file, "--max-steps", "5") == (5, 2.0)
    assert length("--config", toml("[ppo]\nepochs = 2\nmax_steps = 7\n")) == (7, 2.0)


def prompts(*argv: str) -> tuple:
    protocol = resolve("ppo", settings.PpoConfig(), list(argv)).protocol
    return protocol.format, protocol.init_prompt, protocol.step_prompt


def test_the_prompts_of_a_preset_are_for_its_format_only(toml):
    """Tags have no step prompt and would refuse the preset's; what the user names is the user's to mend."""
    tiny, files = ("--preset", "tiny"), ("prompts/tiny/init_prompt.txt", "prompts/tiny/step_prompt.txt")
    assert prompts(*tiny) == prompts(*tiny, "--format", "r3") == ("r3", *files)
    assert prompts(*tiny, "--format", "tags") == ("tags", None, None)
    assert prompts(*tiny, "--format", "tags", "--init-prompt", "mine") == ("tags", "mine", None)
    assert prompts("--config", toml('preset = "tiny"\nformat = "solution"\n')) == ("solution", None, None)
    file = toml('[ppo]\npreset = "tiny"\nformat = "tags"\nstep_prompt = "mine"\n')
    assert prompts("--config", file) == ("tags", None, "mine")
    assert prompts("--config", file, "--format", "r3") == ("r3", files[0], "mine")


def test_presets_of_other_systems():
    def preset(name: str) -> settings.PpoConfig:
        return resolve("ppo", settings.PpoConfig(), ["--preset", name])

    config = preset("search-r1")
    assert build_protocol(config.protocol).answer.opening == "<answer>" and config.retrieval.top_k == 3
    assert (config.rl.num_generations, config.rl.kl_beta, config.reward.format_reward) == (5, 0.001, 0.0)
    for name, graph in (("r-search", True), ("r-search-dag", None)):  # arXiv 2506.08352 and its code
        config = preset(name)
        assert (config.rl.algorithm, config.rl.num_generations, config.optimizer.learning_rate) == ("grpo", 4, 5e-6)
        assert (config.lora.lora_r, config.lora.lora_alpha) == (16, 32)
        assert [r["name"] for r in config.reward.rewards] == ["judged_answer", "valid_plan", "all_tags"]
        if graph:
            protocol = build_protocol(config.protocol)
            assert protocol.information == Tag("<r>", "</r>") and protocol.graph
    assert not build_protocol(preset("solution").protocol).can_search
    assert preset("solution").retrieval.retriever == "none"


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("sft", {"top_k", "max_hops"}),
        ("ppo", set()),
        ("evaluate", {"lora_r", "lora_alpha"}),
        ("collect", {"lora_r", "lora_alpha"}),
    ],
)
def test_the_preset_for_real_questions_is_the_same_in_every_stage(name, absent):
    """RL goes on from SFT's adapter, and all stages lay an episode out alike."""
    values = flat(resolve(name, CONFIGS[name][0], ["--preset", "hotpotqa"]))
    wanted = {"lora_r": 16, "lora_alpha": 32, "top_k": 3, "max_hops": 4, "max_length": 2048, "max_document_tokens": 160}
    assert wanted.items() - values.items() == {(key, wanted[key]) for key in absent} and not absent & values.keys()


def test_a_baseline_passes_over_the_hops_of_the_preset_for_real_questions():
    for name in ("rag", "closed-book", "gold"):
        argv = ["--preset", "hotpotqa", "--baseline", name]
        check_baseline(resolve("evaluate", CONFIGS["evaluate"][0], argv))


def test_the_preset_for_real_questions_takes_one_step_per_round_and_none_of_full_size_for_recall():
    """mini_batch_size stayed 16 with 64 episodes in a round, and whitening made 0.12 recall as much as an answer."""
    config = resolve("ppo", CONFIGS["ppo"][0], ["--preset", "hotpotqa", "--batch-size", "256"])
    assert config.rl.mini_batch_size >= config.episodes_of_round == 1024
    algorithm = ALGORITHMS[config.rl.algorithm](config.rl, config.lengths)
    steps = []
    for paid in (0.12, 1.0):  # two wrong answers, one of which found more; a right and a wrong one
        rollouts = [
            Rollout.with_final_reward(TokenRecord(tokens=[0, 1, 2], action_mask=[False, True, True]), r, 0)
            for r in (paid, 0.0)
        ]
        batch = algorithm.with_advantages(Batch.of(rollouts))
        steps.append(float((batch.advantages * algorithm.weights(batch)).abs().sum()))
    assert steps[0] == pytest.approx(0.12 * steps[1])
    reward = config.reward  # a wrong answer that found everything: at most a tenth of a right one
    assert (1 + reward.gamma_incorrect) * reward.process_recall <= 0.1 * (reward.outcome_em + reward.outcome_f1)
