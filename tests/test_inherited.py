"""Settings that need not be repeated: those of the index and of the adapter's run, and what the user sets instead."""

import json

import pytest

from r3lite.ask import AskConfig
from r3lite.core import command
from r3lite.core.config import UsageError, flat
from r3lite.core.files import write_json
from r3lite.core.inherited import adapter_folder, lines_of_inherited
from r3lite.core.invocation import resolve, to_toml
from r3lite.evaluate import EvaluateConfig
from r3lite.export import ExportConfig
from r3lite.index import IndexConfig
from r3lite.plan import PlanRlConfig
from r3lite.serve import ServeConfig
from r3lite.settings import PpoConfig, SftConfig
from tests.errors import raises


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """The folders of a run of SFT, of one of RL, and of an index."""
    monkeypatch.chdir(tmp_path)
    for name, defaults in (("sft", SftConfig()), ("ppo", PpoConfig())):
        write_json(tmp_path / name / "adapter" / "adapter_config.json", {})
        config = resolve(name, defaults, ["--preset", "tiny", "--queries-per-step", "2"])
        (tmp_path / name / "config.toml").write_text(to_toml(config, name), encoding="utf-8")
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "manifest.json").write_text(json.dumps({"encoder": "my/encoder"}))
    return tmp_path


def read(name: str, defaults: object, *argv: str) -> dict:
    return flat(resolve(name, defaults, list(argv)))


def test_an_answer_needs_only_the_adapter_and_the_index(desk):
    """Encoder, model, format and prompts had to be repeated at every command, though the files name them."""
    config = resolve("ask", AskConfig(), ["who?", "--adapter", "ppo/adapter", "--index", "index"])
    values = flat(config)
    assert (values["model"], values["encoder"], values["top_k"]) == ("tiny", "my/encoder", 3)
    assert (values["init_prompt"], values["queries_per_step"]) == ("prompts/tiny/init_prompt.txt", 2)
    assert (values["preset"], values["max_new_tokens"]) == ("tiny", 96)  # which the preset has for `ask`, too
    of_preset = {"model", "top_k", "init_prompt", "step_prompt", "max_length"}
    assert config.inherited["encoder"] == "index" and config.inherited["preset"] == "ppo/adapter"
    assert not {"format", "system_prompt", *of_preset} & config.inherited.keys()
    assert set(config.set_by_user) == {"question", "adapter", "index"}
    of_run, of_index = lines_of_inherited(config)
    assert of_run == "from ppo/adapter: --preset tiny, --worked-example True, --queries-per-step 2"
    assert of_index == "from index: --encoder my/encoder"


def test_the_preset_of_the_run_need_not_be_repeated(desk):
    """`ask --adapter` of a run of `tiny` took its model and its prompts, and of 4,096 tokens an episode."""
    for name in ("sft", "ppo"):
        assert read("ask", AskConfig(), "--adapter", name)["max_length"] == 1536
    assert read("ask", AskConfig(), "--adapter", "ppo", "--preset", "laptop-4gb")["preset"] == "laptop-4gb"
    text = (desk / "ppo" / "config.toml").read_text()
    (desk / "ppo" / "config.toml").write_text(text.replace('preset = "tiny"', 'preset = "of-another-version"'))
    values = read("ask", AskConfig(), "--adapter", "ppo")
    assert (values["preset"], values["model"], values["max_new_tokens"]) == ("laptop-4gb", "tiny", 256)
    assert read("serve", ServeConfig(), "--adapters", "sft,rl=ppo")["preset"] == "laptop-4gb"
    (desk / "my.toml").write_text("preset = 'solution'\nadapter = 'sft'\n")
    assert read("ask", AskConfig(), "--config", "my.toml")["preset"] == "solution"
    (desk / "my.toml").write_text("adapter = 'sft'\n")
    assert read("ask", AskConfig(), "--config", "my.toml")["preset"] == "tiny"


def test_the_length_of_episodes_is_that_of_rl_but_not_of_the_rows_of_sft(desk):
    for name, defaults, flags in (("sft", SftConfig(), []), ("ppo", PpoConfig(), ["--max-new-tokens", "64"])):
        config = resolve(name, defaults, ["--max-length", "1200", *flags])
        (desk / name / "config.toml").write_text(to_toml(config, name))
    assert read("ask", AskConfig(), "--adapter", "sft")["max_length"] == 4096
    values = read("ask", AskConfig(), "--adapter", "ppo")
    assert (values["max_length"], values["max_new_tokens"]) == (1200, 256)  # a chat has longer turns
    assert read("ask", AskConfig(), "--adapter", "ppo", "--max-length", "4096")["max_length"] == 4096
    assert read("sft", SftConfig(), "--adapter", "ppo")["max_length"] == 2048


@pytest.mark.parametrize("name", ["sft", "ppo", "ppo/adapter"])
def test_other_commands_take_them_too(desk, name):
    for command_name, defaults in (("ppo", PpoConfig()), ("sft", SftConfig()), ("plan", PlanRlConfig())):
        assert read(command_name, defaults, "--adapter", name)["model"] == "tiny"
    assert read("export", ExportConfig(), "--adapter", name)["queries_per_step"] == 2
    assert read("serve", ServeConfig(), "--adapters", f"sft=sft,rl={name}")["model"] == "tiny"


def test_what_the_user_sets_wins_even_if_it_is_the_default(desk):
    flags = ["--adapter", "ppo", "--index", "index", "--top-k", "5", "--encoder", "intfloat/e5-base-v2"]
    values = read("ask", AskConfig(), *flags, "--model", "a/b", "--init-prompt", "none")
    assert (values["top_k"], values["encoder"]) == (5, "intfloat/e5-base-v2")
    assert (values["model"], values["init_prompt"]) == ("a/b", None)
    assert values["step_prompt"] == "prompts/tiny/step_prompt.txt"
    (desk / "my.toml").write_text("top_k = 5\n[ask]\nmodel = 'c/d'\n")
    values = read("ask", AskConfig(), "--adapter", "ppo", "--config", "my.toml")
    assert (values["top_k"], values["model"], values["queries_per_step"]) == (5, "c/d", 2)
    with raises(UsageError, "config-of-other-command", "evaluate, only [ppo]"):
        read("evaluate", EvaluateConfig(), "--config", "ppo/config.toml", "--adapter", "sft")


def test_a_preset_is_not_as_sure_as_the_files(desk):
    values = read("ask", AskConfig(), "--preset", "hotpotqa", "--adapter", "ppo", "--index", "index")
    assert (values["model"], values["encoder"]) == ("tiny", "my/encoder")


def test_prompts_of_another_format_or_that_are_gone_are_not_taken(desk):
    values = read("ask", AskConfig(), "--adapter", "ppo", "--format", "tags")
    assert (values["init_prompt"], values["queries_per_step"], values["model"]) == (None, 1, "tiny")
    assert read("ask", AskConfig(), "--adapter", "ppo", "--format", "r3")["queries_per_step"] == 2
    text = (desk / "ppo" / "config.toml").read_text()
    text = text.replace("prompts/tiny/init", "gone/init").replace('preset = "tiny"', 'preset = "laptop-4gb"')
    (desk / "ppo" / "config.toml").write_text(text)
    values = read("ask", AskConfig(), "--adapter", "ppo")
    assert (values["init_prompt"], values["step_prompt"]) == (None, "prompts/tiny/step_prompt.txt")


def test_of_several_adapters_what_they_have_in_common_is_taken(desk):
    (desk / "ppo" / "config.toml").write_text('[ppo]\nmodel = "tiny"\nqueries_per_step = 3\n')
    values = read("serve", ServeConfig(), "--adapters", "sft,rl=ppo,base")
    assert (values["model"], values["queries_per_step"]) == ("tiny", 1)
    values = read("export", ExportConfig(), "--average", "sft,ppo")
    assert (values["model"], values["queries_per_step"]) == ("tiny", 1)
    # An equals sign in a folder's name divides nothing: the run was looked up under half of its path.
    (desk / "runs").mkdir()
    (desk / "sft").rename(desk / "runs" / "lr=1e-4")
    for entry in ("runs/lr=1e-4", "rl=runs/lr=1e-4"):
        assert read("serve", ServeConfig(), "--adapters", entry)["queries_per_step"] == 2


def test_a_model_of_a_run_brings_its_format_but_stays(desk):
    (desk / "sft" / "config.toml").write_text('[sft]\nmodel = "tiny"\nformat = "tags"\nno_lora = true\n')
    values = read("ask", AskConfig(), "--model", "sft/model")
    assert (values["model"], values["format"]) == ("sft/model", "tags")


def test_an_index_that_is_edited_has_its_encoder(desk):
    for edit in ("--add", "--delete"):
        assert read("index", IndexConfig(), edit, "x", "--output", "index")["encoder"] == "my/encoder"
    assert read("index", IndexConfig(), "--corpus", "x", "--output", "index")["encoder"] != "my/encoder"
    assert read("ask", AskConfig(), "--index", "index", "--retriever", "lexical")["encoder"] != "my/encoder"


@pytest.mark.parametrize("content", [None, "no JSON", "{}", '{"encoder": 3}'])
def test_a_folder_that_is_no_index_or_no_run_gives_nothing(desk, content):
    (desk / "index" / "manifest.json").unlink()
    (desk / "ppo" / "config.toml").unlink()
    if content is not None:
        (desk / "index" / "manifest.json").write_text(content)
        (desk / "ppo" / "config.toml").write_text(content)
    config = resolve("ask", AskConfig(), ["--index", "index", "--adapter", "ppo"])
    assert config.inherited == {}


def test_the_summary_and_a_dry_run_say_where_a_setting_is_from(desk, capsys):
    argv = ["who?", "--adapter", "ppo", "--index", "index"]
    assert command.Command("ask", AskConfig(), work=lambda config: None)(argv) == 0
    assert "from index: --encoder my/encoder\n" in capsys.readouterr().err
    assert command.Command("ask", AskConfig(), work=lambda config: None)([*argv, "--dry-run"]) == 0
    differing = capsys.readouterr().out.partition("\n\n")[0]
    assert "my/encoder  (from index)" in differing and "tiny  (from ppo)" in differing


def test_the_adapter_of_an_interrupted_run_is_that_of_its_newest_checkpoint(tmp_path):
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-100-copy", "checkpoint-2000.bad"):
        (tmp_path / name / "adapter").mkdir(parents=True)
        (tmp_path / name / "adapter" / "adapter_config.json").write_text("{}")
    assert adapter_folder(tmp_path) == tmp_path / "checkpoint-100" / "adapter"
