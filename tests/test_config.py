"""Settings: where a value comes from, what is refused and how, and that what is saved is read back."""

import dataclasses
import re
from typing import Annotated, Literal

import pytest

import r3lite.settings as settings
from r3lite.core.config import (
    Bounds,
    Free,
    Required,
    Section,
    Trait,
    UsageError,
    check_required,
    field_docs,
    flat,
    kinds_of,
    sections,
    settings_with,
)
from r3lite.core.earlier_output import free_settings
from r3lite.core.errors import nearest
from r3lite.core.files import shipped
from r3lite.core.invocation import SHORT_HELP, all_settings, build_parser, help_text, resolve, to_toml, with_values
from r3lite.evaluate import EvaluateConfig
from r3lite.export import ExportConfig
from r3lite.index import IndexConfig
from r3lite.models.lora import PROJECTIONS
from r3lite.report import ReportConfig
from r3lite.serve import ServeConfig
from tests.commands import CONFIGS, Everything
from tests.errors import raises

SECTIONS = [cls for cls in vars(settings).values() if isinstance(cls, type) and issubclass(cls, Section)]


def read(*argv: str) -> dict:
    return flat(resolve("sft", Everything(), list(argv)))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_setting_has_help_and_a_default_within_its_bounds(section):
    names = [f.name for f in dataclasses.fields(section)]
    assert list(field_docs(section)) == names and all(field_docs(section).values())
    alone = dataclasses.make_dataclass("Alone", [("only", section, section())], frozen=True)(section())
    defaults = {k: v for k, v in flat(alone).items() if v is not None}
    assert flat(with_values(alone, defaults)) == flat(alone)


def test_later_wins(toml):
    assert read()["learning_rate"] == 3e-4  # the command's own default
    path = toml("learning_rate = 1e-3\nlora_r = 4\n[sft]\nlora_r = 2\n[ppo]\nlora_r = 64\n")
    assert (read("--config", path)["learning_rate"], read("--config", path)["lora_r"]) == (1e-3, 2)
    assert read("--config", path, "--lora-r", "32")["lora_r"] == 32
    assert read("--lora-r=32")["lora_r"] == 32


def test_a_file_of_another_command_alone_is_refused(toml):
    """The config of a run of ppo was read by sft, which then planned its own defaults."""
    with raises(UsageError, "config-of-other-command", "sft, only [ppo]"):
        read("--config", toml("[ppo]\nlora_r = 64\n"))


def test_values_are_read_by_their_type():
    values = read(
        "--limit", "5", "--rslora", "--lora-targets", "q_proj, v_proj", "--lora-alpha", "1e1", "--judge", "none"
    )
    assert (values["limit"], values["rslora"], values["lora_alpha"]) == (5, True, 10.0)
    assert values["lora_targets"] == ("q_proj", "v_proj")
    assert values["judge"] == "none"
    assert read("--limit", "none")["limit"] is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora-rank", "8"], r"unknown argument --lora-rank \(did you mean --lora-r"),
        (["--num-generations", "4"], "unknown argument --num-generations$"),  # of ppo; it is not like --verification
        (["--lernrate=3"], "unknown argument --lernrate=3"),
        (["stray"], "unknown argument stray"),
        (["--lora-r", "0"], "lora_r is 0; it must be at least 1"),
        (["--lora-r", "8.5"], "lora_r is '8.5'; it must be a whole number"),
        (["--learning-rate", "0"], "learning_rate is 0.0; it must be greater than 0"),
        (["--learning-rate", "nan"], "learning_rate is nan; it must be a number"),
        (["--learning-rate", "inf"], "learning_rate is inf; it must be a number"),
        (["--learning-rate", "x"], "learning_rate is 'x'; it must be a number"),
        (["--lora-dropout", "1.5"], "lora_dropout is 1.5; it must be at most 1"),
        (["--dtype", "bf61"], r"dtype is 'bf61'; choose from auto, fp32, bf16, fp16 \(did you mean bf16\?\)"),
        (["--preset", "laptop"], "unknown preset 'laptop'; choose from .*laptop-4gb"),
        (["--config", "gone.toml"], "gone.toml cannot be read"),
        (["--lora-r"], "expected one argument"),
        # Each of these was taken, and was a traceback of the planner, of PyTorch or of the sampler later.
        (["--lora-targets", "foo"], "lora_targets is 'foo'; choose from q_proj, "),
        (["--lora-targets", "q_proj,kproj"], r"lora_targets is 'kproj'; choose from .*\(did you mean k_proj\?\)"),
        (["--lora-targets", ","], "lora_targets has 0 values; it must have at least one"),
        (["--seed", "18446744073709551616"], "seed is 18446744073709551616; it must be at most 9223372036854775807"),
        (["--seed", "-1"], "seed is -1; it must be at least 0"),
        (["--learning-rate", "-1e-3"], "learning_rate is -0.001; it must be greater than 0"),  # a number, no flag
        (["--learning-rate", "-.5E+2"], "learning_rate is -50.0; it must be greater than 0"),
        (["--top-p", "0"], "top_p is 0.0; it must be greater than 0"),
        # An unset shell variable stood for the default: another corpus, the bare base, Google's server.
        (["--adapter", ""], "--adapter is empty; is a shell variable unset"),
        (["--judge-base-url="], "--judge-base-url is empty"),
        (["--data", ""], "--data is empty"),
        (["--lora-r", ""], "--lora-r is empty"),
        (["--lora-targets", ""], "--lora-targets is empty"),
        (["--config", ""], "--config is empty"),
        (["--preset", ""], "--preset is empty"),
        (["--data", "a\udcffb"], r"--data is 'a\\udcffb', which contains NUL or bytes that are not UTF-8"),
        (["--config", "a\udcffb"], r"--config is 'a\\udcffb', which contains NUL"),
        (["--preset", "\udcff"], r"--preset is '\\udcff', which contains NUL"),
        (["--config", "a\0b"], r"--config is 'a\\x00b', which contains NUL"),
        (["--lora-r", "5000"], "lora_r is 5000; it must be at most 4096"),
        (["--limit", "9" * 30], "it must be at most 1000000000"),
        (["--lora-alpha", "1e308"], r"lora_alpha is 1e\+308; it must be at most 1000000000"),
        (["--config", "/dev/zero"], "/dev/zero is a pipe or device"),
        (["--lora", "8"], "unknown argument --lora"),  # no abbreviations: a later flag would change their meaning
    ],
)
def test_a_bad_command_line_is_one_line_with_the_nearest_name(argv, message):
    with pytest.raises(UsageError, match=message) as caught:
        read(*argv)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a"], "compare has 1 values; it must have 2"),
        (["a", "b", "c"], "compare has 3 values; it must have 2"),
        ([], "expected at least one argument"),
        (["a", ""], "--compare is empty"),
        (["a", "b\udcff"], r"--compare is 'b\\udcff', which contains NUL"),
    ],
)
def test_a_setting_of_two_values_takes_two(tmp_path, argv, message):
    def compare(*argv):
        return resolve("evaluate", EvaluateConfig(), list(argv)).evaluate.compare

    assert compare("--compare", "a,b", "c", "--seed", "1") == ("a,b", "c")  # a comma is part of a name here
    (tmp_path / "my.toml").write_text('compare = ["a", "b"]\n', encoding="utf-8")
    assert compare("--config", str(tmp_path / "my.toml")) == ("a", "b")
    assert compare("--config", str(tmp_path / "my.toml"), "--compare", "none") is None
    with pytest.raises(UsageError, match=message):
        compare("--compare", *argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat = 1", r"unknown key 'learning_rat' \(did you mean learning_rate\?\)"),
        ("[sft]\nlora = 1", "unknown key 'lora'"),
        ("[ppo]\nloraa_r = 1", "unknown key 'loraa_r'"),  # of another command, but no less wrong
        ("[stf]\nlora_r = 1", r"unknown table \[stf\] \(did you mean sft\?\)"),
        # Keys that only other commands have were taken in the command's own table, and did nothing.
        ("[sft]\nkl_beta = 0.1", r"unknown key 'kl_beta' in \[sft\]"),
        ("[sft]\nvalue_learning_rate = 0.1", r"'value_learning_rate' in \[sft\] \(did you mean learning_rate\?\)"),
        # Each of these was a TypeError or an AttributeError.
        ("limit = [1]", r"limit is \[1\]; it must be a whole number"),
        ("[sft.limit]\nx = 1", "limit is {'x': 1}; it must be a whole number"),
        ("learning_rate = 1979-05-27", "must be a number"),
        ("sft = 3", "unknown key 'sft'"),
        ("[[sft]]\nlora_r = 1", "unknown key 'sft'"),
        ("lora_targets = []", "lora_targets has 0 values"),
        ("lora_r = 2.0", "lora_r is 2.0; it must be a whole number"),
        ("lora_r = true", "lora_r is True; it must be a whole number"),
        ("rslora = 1", "rslora is 1; it must be true or false"),
        ("model = 3", "model is 3; it must be text"),
        ("lora_targets = 3", "lora_targets is 3; it must be a list"),
        ("lora_r = ", "cannot be read"),
        ("lora_r = " + "9" * 5000, "cannot be read"),
        ("lora_r = " + "[" * 100_000, "cannot be read"),
        ('adapter = ""', "--adapter is empty"),
        ('preset = ""', "--preset is empty"),
        ('model = "a\\u0000"', "--model is 'a.x00', which contains NUL"),
        ("learning_rate = nan", "must be a number"),
    ],
)
def test_a_bad_file_is_named_with_the_nearest_key(toml, text, message):
    path = toml(text)
    with pytest.raises(UsageError, match=message) as caught:
        read("--config", path)
    assert "my.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "argv", "bound"),
    [
        ("sft", ["--validation-fraction", "1"], "at most 0.5"),
        ("sft", ["--gradient-accumulation", "1000000"], "at most 4096"),
        ("sft", ["--max-length", "100000000"], "at most 1048576"),
        ("ppo", ["--num-generations", "1000000"], "at most 1024"),
        ("ppo", ["--max-hops", "5000"], "at most 100"),
        ("ppo", ["--outcome-em", "1e308"], "at most 1000000000"),
        ("ppo", ["--gamma-correct", "1e308"], "at most 1000"),
        ("ppo", ["--gamma-fail=-1e308"], "at least -1000"),
        ("ppo", ["--temperature", "1e308"], "at most 100"),
        ("collect", ["--max-hops", "5000"], "at most 100"),
        ("collect", ["--attempts", "1000000"], "at most 100"),
        ("retrieve", ["--top-k", "1000000"], "at most 1000"),
    ],
)
def test_what_would_take_weeks_or_overflow_is_refused_with_its_bound(name, argv, bound):
    default, table = CONFIGS[name]
    with pytest.raises(UsageError, match=f"it must be {bound}$"):
        resolve(name, default, argv, table)


def test_a_preset_that_is_not_text_is_a_usage_error(toml):
    """The nearest name of a number was a TypeError."""
    with raises(UsageError, "wrong-type", "my.toml: preset is 3; it must be text"):
        read("--config", toml("preset = 3"))


def test_a_file_may_hold_keys_that_only_other_commands_have(toml):
    assert read("--config", toml("kl_beta = 0.5\nlora_r = 3\n"))["lora_r"] == 3
    assert read("--config", toml("lora_r = 3\n[ppo]\nkl_beta = 0.5\n"))["lora_r"] == 3


def test_index_is_a_setting_at_the_top_and_a_table_of_the_command(toml):
    """`index = "folder"`, which other commands read, was an AttributeError in the command index."""

    def batch_size(text):
        return resolve("index", IndexConfig(), ["--config", toml(text)]).index.batch_size

    assert batch_size('index = "runs/index"\nbatch_size = 3\n') == 3
    assert batch_size("[index]\nbatch_size = 3\n") == 3


def test_lora_targets_are_those_that_an_adapter_can_have():
    assert settings.LoraSettings().lora_targets == PROJECTIONS


def test_a_file_with_a_byte_order_mark(toml):
    assert read("--config", toml("lora_r = 3\n", "utf-8-sig"))["lora_r"] == 3


def test_resolved_settings_are_read_back(toml):
    argv = ["--model", 'C:\\models\\"q" é\x7f\n', "--learning-rate", "1e-7", "--lora-targets", "q_proj", "--limit", "3"]
    config = resolve("sft", Everything(), [*argv, "--rslora", "--judge-max-cost", "0.1"])
    restored = resolve("sft", Everything(), ["--config", toml(to_toml(config, "sft"))])
    restored_values = {name: value for name, value in flat(restored).items() if name != "config"}
    assert restored_values == {name: value for name, value in flat(config).items() if name != "config"}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("preset", ["laptop-4gb", "tiny"])
def test_what_was_unset_on_purpose_stays_unset_when_read_back(toml, name, preset):
    """Unset keys were left out, so a run with `--preset tiny --max-steps none` could not be resumed by its own file:
    the preset's value came back."""
    default, table = CONFIGS[name]
    kinds = [kind for section in sections(default).values() for kind in kinds_of(type(section)).items()]
    optional = [setting for setting, kind in kinds if kind.optional]
    unset = [word for key in optional if key != "config" for word in ("--" + key.replace("_", "-"), "none")]
    for argv in ([], unset):
        config = resolve(name, default, ["--preset", preset, *argv], table)
        file = toml(to_toml(config, table))
        restored = resolve(name, default, ["--config", file], table)
        assert restored == with_values(config, {"config": file})


# Traits


def test_a_trait_stands_beside_bounds_and_leaves_them():
    class ExampleSection(Section):
        plain: int = 1
        free: Free[Annotated[int, Bounds(low=1)]] = 1
        maybe: Free[Annotated[int, Bounds(low=1)] | None] = None
        choice: Free[Literal["a", "b"]] = "a"
        folders: tuple[str, ...] | None = None

    assert settings_with(ExampleSection(), Trait.FREE) == ["free", "maybe", "choice"]
    kinds = kinds_of(ExampleSection)
    assert kinds["maybe"].convert("maybe", "none") is None and kinds["choice"].choices == ("a", "b")
    # An item of a list is never None, which ended in a traceback.
    folders = kinds["folders"]
    assert folders.convert("folders", "none") is None
    assert folders.convert("folders", "none,rl=runs/a") == ("none", "rl=runs/a")
    for name in ("free", "maybe"):
        with raises(UsageError, "below-least", name, "0", "1"):
            kinds[name].convert(name, "0")


def test_what_a_resumed_run_may_change():
    anywhere = {"preset", "config", "output", "dry_run", "save_every", "keep_checkpoints", "stop_after", "resume"}
    anywhere |= {
        "vram_budget",
        "nf4_cache",
        "quantize",
        "stream_layers",
        "track",
        "track_project",
        "track_name",
        "track_spans",
    }
    limits = ("rpm", "concurrency", "timeout", "retries", "max_calls", "max_cost", "input_price", "output_price")
    assert free_settings(settings.SftConfig()) == anywhere
    judge = {f"judge_{name}" for name in (*limits, "cache")}
    assert free_settings(settings.PpoConfig()) == anywhere | judge | {
        "guard",
        "rollout_server",
        "rollout_timeout",
    }


@pytest.mark.parametrize("name", ["plan", "plan of RL", "quickstart"])
def test_what_needs_no_data_does_not_ask_for_them(name):
    check_required(CONFIGS[name][0])


def test_the_settings_of_a_section_of_a_section_are_known():
    class Special(settings.DataSettings):
        only_here: Annotated[str | None, Required("x")] = None

    assert "only_here" in all_settings()


def test_help_has_groups_and_defaults():
    text = build_parser("sft", Everything()).format_help()
    for section in sections(Everything()).values():
        assert type(section).__doc__.splitlines()[0].rstrip(".") + ":" in text
    assert "--learning-rate" in text and "[0.0003]" in text
    assert "--dtype auto,fp32,bf16,fp16" in text


COMMANDS = {name: default for name, (default, _) in CONFIGS.items()} | {
    "export": ExportConfig(),
    "report": ReportConfig(),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_help_fits_on_a_page_and_that_of_all_settings_names_each_flag(name, monkeypatch):
    """The help of ppo had 541 lines."""
    monkeypatch.setenv("COLUMNS", "80")
    short = help_text(name, COMMANDS[name], every=False)
    assert short.count("\n") <= SHORT_HELP == 60
    assert "--preset" in short and "--dry-run" in short
    full_help = help_text(name, COMMANDS[name], every=True)
    flags = {"--" + setting.replace("_", "-") for setting in flat(COMMANDS[name])}
    assert {word for word in flags if f"  {word}" not in full_help and f"--no-{word[2:]}" not in full_help} == set()
    assert len(full_help) >= len(short)


def test_the_short_help_has_what_most_people_set_with_a_sentence(capsys):
    for argv, is_full in (["--help"], False), (["-h"], False), (["--help", "all"], True), (["-h", "all"], True):
        with pytest.raises(SystemExit) as leaving:
            resolve("ppo", settings.PpoConfig(), argv)
        text = capsys.readouterr().out
        assert leaving.value.code == 0 and text.startswith("usage: python -m r3lite.ppo")
        assert ("--guard-kl " in text, "rollbacks" in text, "Collapse guard" in text) == (is_full, is_full, is_full)
        assert ("--help all shows all" in text) is not is_full
        for word in ["--adapter", "--learning-rate", "--num-generations", "--kl-beta", "--top-k", "--max-new-tokens"]:
            assert f"  {word} " in text
        lines = text.splitlines()
        assert ("  --top-k N                 passages per query [5]" in lines) is not is_full
    with raises(UsageError, "unknown-choice", "--help", "everything"):
        resolve("ppo", settings.PpoConfig(), ["--help", "everything"])


def test_the_help_of_preset_names_those_there_are():
    (names,) = re.findall(r"defaults: (.*)", field_docs(settings.Common)["preset"])
    assert re.split(", | or ", names) == sorted(path.stem for path in shipped("presets").glob("*.toml"))


def test_other_programs_names_of_a_flag_are_taken():
    config = resolve("ppo", settings.PpoConfig(), ["--num-hops", "3", "--memory-budget", "2GiB"])
    assert (config.lengths.max_hops, config.memory.vram_budget) == (3, "2GiB")
    text = build_parser("ppo", settings.PpoConfig()).format_help()
    assert re.search(r"--max-hops( N)?, --num-hops N", text)  # from Python 3.13 on the value is named once


def test_nearest_name():
    assert nearest("lerning_rate", ["learning_rate", "limit"]) == " (did you mean learning_rate?)"
    assert nearest("xyz", ["learning_rate"]) == ""


@pytest.mark.parametrize(
    "argv",
    [["a b"], ["--question", "a b"], ["--seed", "1", "a b"], ["a b", "--json"], ["--seed", "1", "a b", "--json"]],
)
def test_a_bare_setting_stands_anywhere_with_or_without_its_flag(argv):
    assert resolve("ask", CONFIGS["ask"][0], argv).ask.question == "a b"


def test_an_adapter_brings_the_prompt_without_the_worked_example():
    """What a model was trained on has no example in it; an untrained one writes no steps without."""

    def has_example(name, default, *argv):
        return resolve(name, default, list(argv)).protocol.worked_example

    assert not has_example("sft", settings.SftConfig())
    for name, default in (("ppo", settings.PpoConfig()), ("evaluate", EvaluateConfig())):
        assert has_example(name, default) and has_example(name, default, "--adapter", "none")
        assert not has_example(name, default, "--adapter", "runs/sft")
        assert has_example(name, default, "--adapter", "runs/sft", "--worked-example")
        assert not has_example(name, default, "--no-worked-example")
    assert not has_example("serve", ServeConfig(), "--adapters", "rl=runs/rl")
    assert not has_example("export", ExportConfig(), "--adapter", "runs/sft")
