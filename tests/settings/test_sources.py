"""Sources in a config file: tables with defaults, errors that name the source, and a file that reads back."""

import tomllib

import pytest

from r3lite.core.config import UsageError, check_required, flat
from r3lite.core.invocation import resolve, to_toml
from r3lite.settings import PpoConfig, SftConfig
from tests.errors import raises

SOURCES = """
[[sources]]
file = "a b/rows.jsonl"
weight = 0.3

[[sources]]
name = "talk"
file = "name,subset,train"
type = "chat"
"""


def read(tmp_path, text: str, *argv: str, config=SftConfig, command="sft"):
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    return resolve(command, config(), ["--config", str(tmp_path / "run.toml"), *argv])


def test_tables_of_a_file(tmp_path):
    sources = read(tmp_path, SOURCES).mixture.sources
    assert [dict(entry) for entry in sources] == [
        {"file": "a b/rows.jsonl", "weight": 0.3, "name": "rows"},
        {"file": "name,subset,train", "weight": 1.0, "name": "talk", "type": "chat"},
    ]
    ppo_config = read(tmp_path, SOURCES.replace("[[sources]]", "[[ppo.sources]]"), config=PpoConfig, command="ppo")
    assert ppo_config.mixture.sources == sources
    of_ppo = SOURCES.replace("[[sources]]", "[[ppo.sources]]")
    assert read(tmp_path, f"{of_ppo}\n[sft]\nseed = 1\n").mixture.sources is None


def test_sources_stand_in_for_data(tmp_path):
    check_required(read(tmp_path, SOURCES))
    with raises(UsageError, "setting-missing", "--data"):
        check_required(read(tmp_path, SOURCES, "--sources", "none"))


def test_the_config_of_a_run_reads_back(tmp_path):
    config = read(tmp_path, SOURCES)
    text = to_toml(config, "sft")
    assert tomllib.loads(text)["sft"]["sources"][1]["name"] == "talk"
    assert flat(read(tmp_path, text))["sources"] == config.mixture.sources


def test_the_command_line_names_files_with_weights():
    config = resolve("sft", SftConfig(), ["--sources", "a=b.jsonl=2, folder/c.x.json=0.5"])
    assert [(e["name"], e["file"], e["weight"]) for e in config.mixture.sources] == [
        ("a-b", "a=b.jsonl", 2.0),
        ("c-x", "folder/c.x.json", 0.5),
    ]
    config = resolve("sft", SftConfig(), ["--sources", r"runs/lr=1e-4/a.jsonl,w=1\b.jsonl,lr=1/c.jsonl=3"])
    assert [(entry["file"], entry["weight"]) for entry in config.mixture.sources] == [
        ("runs/lr=1e-4/a.jsonl", 1.0),
        (r"w=1\b.jsonl", 1.0),
        ("lr=1/c.jsonl", 3.0),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("weight = 0", "the source rows has the weight 0; it must be above 0 and at most 1e+09"),
        ("weight = 2000000000", "the source rows has the weight 2000000000; it must be above 0 and at most 1e+09"),
        ("weight = -1.5", "the source rows has the weight -1.5"),
        ("weight = nan", "the source rows has the weight nan"),
        ("weight = true", "the source rows has the weight True"),
        ('weight = "2"', "the source rows has the weight '2'"),
        ('type = "coding2"', "the source rows has the type 'coding2'; choose from qa, chat, coding"),
        ("type = 3", "the source rows has the type 3"),
        (
            'format = "r4"',
            "the source rows has the format 'r4'; choose from r3, tags, solution, dag (did you mean r3?)",
        ),
        ('type = "chat"\nformat = "r3"', "the source rows is of type chat, which has no steps: remove its format"),
        ("wieght = 2", "the source rows.jsonl has no key 'wieght' (did you mean weight?)"),
        ('name = "a/b"', "the source of rows.jsonl is named 'a/b'; a name has letters"),
        ('name = "other"', "2 sources are named other"),
        ('[[sources]]\nname = "x"', "a source has no file"),
        ('[[sources]]\nfile = " "', "a source has no file"),
        ('[[sources]]\nfile = "a\\u0000b"', "a source has no file"),
    ],
)
def test_errors_name_the_source(tmp_path, line, message):
    with pytest.raises(UsageError) as error:
        read(tmp_path, f'[[sources]]\nfile = "other.jsonl"\n[[sources]]\nfile = "rows.jsonl"\n{line}\n')
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["sources = [3]", 'sources = ["a.jsonl=many"]', "sources = 3"])
def test_what_is_no_source_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match="sources"):
        read(tmp_path, text)


def test_one_table_is_not_a_list(tmp_path):
    """[sources] is a table of a command of that name to the reader, which says that there is none."""
    with raises(UsageError, "unknown-table", "sources"):
        read(tmp_path, '[sources]\nfile = "a.jsonl"\n')
