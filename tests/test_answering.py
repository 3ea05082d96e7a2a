"""What `evaluate` and `ask` say of an adapter whose run had another step format or other prompts."""

import pytest

from r3lite.ask import AskConfig
from r3lite.assembly.policy import warn_of_other_format
from r3lite.core.errors import R3LiteError
from r3lite.core.invocation import resolve, to_toml
from r3lite.settings import SftConfig
from tests.errors import raises


@pytest.fixture
def run(tmp_path):
    """The folder of a run with the tiny model's prompts."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "checkpoint-5" / "adapter").mkdir(parents=True)
    config = resolve("sft", SftConfig(), ["--preset", "tiny"])
    (tmp_path / "config.toml").write_text(to_toml(config, "sft"), encoding="utf-8")
    return tmp_path


def warning(capsys, *argv):
    config = resolve("ask", AskConfig(), list(map(str, argv)))
    warn_of_other_format(config.model.adapter, config)
    return capsys.readouterr().err


@pytest.mark.parametrize("inside", ["", "adapter", "checkpoint-5", "checkpoint-5/adapter"])
def test_another_format_or_prompt_is_told(run, capsys, inside):
    adapter = run / inside
    assert warning(capsys, "--preset", "tiny", "--adapter", adapter) == warning(capsys, "--adapter", adapter) == ""
    message = warning(capsys, "--adapter", adapter, "--init-prompt", "prompts/init_prompt.txt", "--step-prompt", "none")
    assert message.startswith(f"warning: {adapter} was trained on --init-prompt prompts/tiny/")
    assert "--step-prompt prompts/tiny/step_prompt.txt (here none)" in message and message.count("\n") == 1
    with raises(R3LiteError, "format-differs", f"{adapter} was trained on --format r3, not tags"):
        warning(capsys, "--adapter", adapter, "--format", "tags")


@pytest.mark.parametrize("text", [None, "no TOML", "", "[sft]\n", "format = 'tags'\n"])
def test_an_adapter_that_says_nothing_of_its_run_is_taken_as_it_is(run, capsys, text):
    (run / "config.toml").unlink() if text is None else (run / "config.toml").write_text(text)
    assert warning(capsys, "--adapter", run) == "" == warning(capsys)


@pytest.mark.parametrize(
    ("sources", "flags", "difference"),
    [
        ('[{"file" = "a", "type" = "r1"}]', [], "chats without steps (here --format r3)"),
        ('[{"file" = "a", "format" = "tags"}]', [], "--format tags (here r3)"),
        ('[{"file" = "a", "type" = "r1"}, {"file" = "b"}]', [], None),
        ('[{"file" = "a", "format" = "tags"}, {"file" = "b"}]', ["--format", "tags"], None),
    ],
)
def test_formats_are_those_of_the_sources(tmp_path, capsys, sources, flags, difference):
    """An adapter that saw chats alone knows no steps, though its run had the setting."""
    (tmp_path / "config.toml").write_text(f'[sft]\nformat = "r3"\nsources = {sources}\n', encoding="utf-8")
    message = warning(capsys, "--adapter", tmp_path, *flags)
    assert message == (f"warning: {tmp_path} was trained on {difference}: results may be worse\n" if difference else "")


def test_other_thoughts_are_told(tmp_path, capsys):
    (tmp_path / "config.toml").write_text('[sft]\nthinking = "on"\n', encoding="utf-8")
    assert warning(capsys, "--adapter", tmp_path, "--thinking", "on") == ""
    assert "was trained on --thinking on (here auto)" in warning(capsys, "--adapter", tmp_path, "--thinking", "off")
