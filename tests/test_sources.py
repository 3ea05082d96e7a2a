"""Several sources in a run: what each is drawn, loses and is paid, and resuming to the bit."""

import json
import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch

from r3lite import ppo, sft
from r3lite.assembly import supervised
from r3lite.assembly.rl_setup import common_prompt_tokens
from r3lite.core.episode import Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl
from r3lite.core.invocation import with_values
from r3lite.datasets.sources import read_data, read_questions_of
from r3lite.protocols.chat import Chat
from r3lite.protocols.layout import Layout
from r3lite.settings import LengthSettings, PpoConfig, SftConfig
from tests.cold_start import WORLD, arguments, assert_same_runs, logged
from tests.errors import raises, shows
from tests.test_sft import SHORT, log, start, toy, trajectory, wait_for  # noqa: F401

PAGE = Path(__file__).parent.parent / "docs" / "sources.md"


def talk(i: int, words: int = 4) -> dict:
    turns = [{"role": "user", "content": f"Tell me {i}."}, {"role": "assistant", "content": " ".join(["well"] * words)}]
    return {"id": f"talk {i}", "messages": turns}


@pytest.fixture
def mixed(toy, tmp_path):  # noqa: F811
    """The toy's arguments with three sources in a config file, one of them in tags."""
    write_jsonl(tmp_path / "tags.jsonl", map(trajectory, range(15, 30)))
    write_jsonl(tmp_path / "talk.jsonl", [talk(i) for i in range(6)])
    files = {"rows": "weight = 3", "tags": 'weight = 1.5\nformat = "tags"', "talk": 'weight = 1.5\ntype = "chat"'}
    tables = [f"[[sources]]\nfile = '{tmp_path / name}.jsonl'\n{keys}\n" for name, keys in files.items()]
    (tmp_path / "sources.toml").write_text("\n".join(tables), encoding="utf-8")
    at = toy.index("--data")
    return [*toy[:at], *toy[at + 2 :], "--config", str(tmp_path / "sources.toml")]


def trainer(mixed: list[str], **settings) -> supervised.SFTTrainer:
    options = dict(zip((a[2:].replace("-", "_") for a in mixed[::2]), mixed[1::2]))
    sources = tomllib.loads(Path(options["config"]).read_text(encoding="utf-8"))
    config = with_values(SftConfig(), options | sources | settings)
    return supervised.build_trainer(config, *read_data(config))


def test_the_loss_of_each_source_by_hand(mixed):
    sft_trainer = trainer(mixed, batch_size=3, gradient_accumulation=4, validation_fraction=0.3, validate_every=1)
    model, rows = sft_trainer.policy.model, [sft_trainer.rows[i] for i in sft_trainer.mixture.rows(0, 12)]

    def by_hand(rows) -> float:
        losses = []
        with torch.no_grad():
            for row in rows:
                logits = model.logits(model(torch.tensor([row.tokens])))[0, :, : sft_trainer.vocabulary]
                logprobs = logits.log_softmax(-1)
                places = [t for t in range(1, len(row.tokens)) if row.action_mask[t]]
                losses += [-logprobs[t - 1, row.tokens[t]].item() for t in places]
        return sum(losses) / len(losses)

    names = {row.source for row in rows}
    assert names == {"rows", "tags", "talk"} and all(
        len({r.source for r in g}) == 1 for g in sft_trainer.micro_batches(rows)
    )
    expected = {f"loss/{name}": by_hand([r for r in rows if r.source == name]) for name in names}
    expected["loss"] = by_hand(rows)
    record, _ = sft_trainer.step(1)
    assert {name: record[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    held_out = {f"eval_loss/{n}": by_hand([r for r in sft_trainer.held_out if r.source == n]) for n in ("rows", "tags")}
    assert {name: record[name] for name in held_out} == pytest.approx(held_out, abs=1e-4)
    assert record["eval_loss"] == pytest.approx(by_hand(sft_trainer.held_out), abs=1e-4)


def test_each_source_is_laid_out_in_its_format_and_drawn_by_its_weight(mixed):
    sft_trainer = trainer(mixed, validation_rows=0)
    assert Counter(row.source for row in sft_trainer.rows) == {"rows": 20, "tags": 15, "talk": 6}
    drawn = Counter(sft_trainer.rows[i].source for i in sft_trainer.mixture.rows(0, 4000))
    assert drawn["rows"] / 4000 == pytest.approx(0.5, abs=0.03)
    assert drawn["tags"] / 4000 == pytest.approx(0.25, abs=0.03)
    assert (sft_trainer.total, sft_trainer.row_limit) == (3, 41)  # an epoch is as many draws as there are rows
    prompts = {
        name: max((r for r in sft_trainer.rows if r.source == name), key=lambda r: len(r.tokens)) for name in drawn
    }
    assert len(prompts["tags"].tokens) > len(prompts["rows"].tokens) > len(prompts["talk"].tokens)  # shipped prompt


def test_the_memory_plan_has_the_longest_row_of_all_sources(mixed, tmp_path):
    short_trainer = trainer(mixed, validation_rows=0)
    write_jsonl(tmp_path / "talk.jsonl", [talk(i, words=300 if i == 3 else 4) for i in range(6)])
    long_trainer = trainer(mixed, validation_rows=0)
    longest = max(long_trainer.rows, key=lambda row: len(row.tokens))
    assert longest.source == "talk" and len(longest.tokens) > max(len(row.tokens) for row in short_trainer.rows)
    alone = trainer(mixed, validation_rows=0, sources=[{"file": str(tmp_path / "talk.jsonl"), "type": "chat"}])
    peak = long_trainer.policy.plan.peak
    assert short_trainer.policy.plan.peak < peak == alone.policy.plan.peak


def test_a_question_of_two_sources_is_held_out_of_both(mixed):
    options = dict(zip((a[2:].replace("-", "_") for a in mixed[::2]), mixed[1::2]))
    sources = tomllib.loads(Path(options["config"]).read_text(encoding="utf-8"))
    config = with_values(SftConfig(), options | sources | {"validation_fraction": 0.5})
    _, rows, held_out = read_data(config)
    trained = {row.id for source_rows in rows.values() for row in source_rows}
    held_out_ids = {row.id for source_rows in held_out.values() for row in source_rows}
    shared = {f"q{i}" for i in range(15, 20)}
    assert not trained & held_out_ids and shared & held_out_ids and shared & trained


def test_sft_left_and_resumed_equals_uninterrupted_to_the_bit(mixed, tmp_path):
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = [*mixed, *SHORT, "--max-steps", "8", "--validate-every", "3"]
    assert sft.main([*arguments, "--output", str(uninterrupted)]) == 0
    assert sft.main([*arguments, "--output", str(parts), "--stop-after", "3"]) == 0
    assert sft.main(["--config", str(parts / "config.toml"), "--resume", "auto"]) == 0
    assert_same_runs(uninterrupted, parts, total=8)
    drawn = [{name for name in record if name.startswith("loss/")} for record in log(uninterrupted)]
    assert set.union(*drawn) == {"loss/rows", "loss/tags", "loss/talk"}


def test_sft_killed_and_resumed_equals_uninterrupted_to_the_bit(mixed, tmp_path):
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = [*mixed, *SHORT, "--max-steps", "12", "--save-every", "4", "--gradient-accumulation", "4"]
    process = start([*arguments, "--output", str(parts)])
    wait_for(process, lambda: len(log(parts)) >= 6)
    process.kill()
    process.communicate()
    assert 6 <= len(log(parts)) < 12
    assert sft.main([*arguments, "--output", str(parts), "--resume", "auto"]) == 0
    assert sft.main([*arguments, "--output", str(uninterrupted)]) == 0
    assert_same_runs(uninterrupted, parts, total=12)


def test_a_resumed_run_cannot_change_the_weights(mixed, tmp_path, capsys):
    arguments = [*mixed, *SHORT, "--max-steps", "4", "--output", str(tmp_path / "run")]
    assert sft.main([*arguments, "--stop-after", "1"]) == 0
    config = Path(mixed[-1])
    config.write_text(config.read_text(encoding="utf-8").replace("weight = 3", "weight = 4"), encoding="utf-8")
    assert sft.main([*arguments, "--resume", "auto"]) == 1
    assert "sources (was" in capsys.readouterr().err


def test_the_dry_run_of_sft_shows_the_sources(mixed, capsys):
    assert sft.main([*mixed, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert re.search(r"rows +50\.0% +any +r3 +\d+ of ", plan) and re.search(r"talk +25\.0% +chat +chat +\d+ of ", plan)
    assert "39 rows, 2 more held out" in plan
    assert sft.main([*mixed, "--data", "x.jsonl", "--dry-run"]) == 2
    assert shows(capsys.readouterr().err, "data-and-sources")


@pytest.fixture
def rl_sources(tmp_path):
    """A config file with questions in R3 steps, questions in tags, and chats."""
    write_jsonl(tmp_path / "talk.jsonl", [talk(i) for i in range(4)])
    keys_by_file = {
        WORLD / "train.jsonl": "",
        WORLD / "dev.jsonl": 'format = "tags"',
        tmp_path / "talk.jsonl": 'type = "chat"',
    }
    tables = [f"[[sources]]\nfile = '{file}'\n{keys}\n" for file, keys in keys_by_file.items()]
    (tmp_path / "sources.toml").write_text("\n".join(tables), encoding="utf-8")
    return tmp_path / "sources.toml"


def rl_arguments(cold, config: Path, output: Path, *extra_flags: str) -> list[str]:
    flags = arguments(cold, output, "--config", str(config), "--max-new-tokens", "48", *extra_flags)
    at = flags.index("--data")
    return [*flags[:at], *flags[at + 2 :]]


@pytest.mark.parametrize("extra_flags", [[], ["--algorithm", "grpo", "--refill-limit", "2"]])
def test_rl_of_several_sources_and_resumed_to_the_bit(cold, rl_sources, tmp_path, extra_flags):
    extra_flags = [*extra_flags, "--batch-size", "4", "--max-steps", "3"]
    assert ppo.main(rl_arguments(cold, rl_sources, tmp_path / "whole", *extra_flags)) == 0
    run = rl_arguments(cold, rl_sources, tmp_path / "parts", *extra_flags)
    assert ppo.main([*run, "--stop-after", "1"]) == 0
    assert ppo.main([*run, "--resume", "auto"]) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", total=3)
    episodes = logged(tmp_path / "whole", "episodes.jsonl")
    assert {e["source"] for e in episodes} == {"train", "dev", "talk"}
    for e in episodes:
        assert e["id"].startswith(f"{e['source']}/")
        if e["source"] == "talk":  # a plain chat: what was said is the answer
            assert len(e["steps"]) == 1 and "query" not in e["steps"][0] and e["steps"][0]["analysis"] == ""
    assert any(s.get("documents") for e in episodes if e["source"] == "train" for s in e["steps"])
    for record in logged(tmp_path / "whole", "metrics.jsonl"):
        for name in ("train", "dev", "talk"):
            source_episodes = [e for e in episodes if e["step"] == record["step"] and e["source"] == name]
            paid = [sum(e["step_rewards"]) for e in source_episodes]
            if source_episodes:
                assert record[f"reward/{name}"] == pytest.approx(sum(paid) / len(paid))
            assert bool(source_episodes) == (f"reward/{name}" in record)


def test_the_dry_run_of_rl_shows_the_sources_and_traces_are_refused(rl_sources, capsys):
    flags = ["--preset", "tiny", "--config", str(rl_sources)]
    assert ppo.main([*flags, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert re.search(r"dev +33\.3% +any +tags +100 of ", plan) and "904 questions" in plan
    assert ppo.main([*flags, "--algorithm", "luffy", "--traces", "x.jsonl", "--dry-run"]) == 2
    assert shows(capsys.readouterr().err, "setting-with-sources", "--traces")


def test_prompts_of_sources_share_what_all_begin_with_and_must_leave_room(tokenizer):
    def question_of(text: str, *earlier: str) -> Question:
        messages = tuple({"role": role, "content": m} for role, m in zip(("system", "user", "assistant"), earlier))
        return Question("talk/1", text, ("a",), source="talk", earlier=messages)

    layouts = {"talk": Layout(tokenizer, Chat("s" * 80), LengthSettings(max_length=400))}
    prompts = [layouts["talk"].prompt("b"), layouts["talk"].prompt("a")]
    common = next(i for i, (x, y) in enumerate(zip(*prompts)) if x != y)
    assert common_prompt_tokens([question_of("b"), question_of("a")], layouts) == common // 16 * 16 > 64
    # Of 1 + 7 + 20.
    assert common_prompt_tokens([question_of("b"), question_of("a"), question_of("c", "s" * 20)], layouts) == 16
    with raises(R3LiteError, "prompt-too-long", "talk/1"):
        common_prompt_tokens([question_of("b"), question_of("x" * 400)], layouts)


def test_the_examples_of_the_page_run(cold, tmp_path, monkeypatch):
    """Each TOML block of docs/sources.md under the name that its first line gives, beside the sample world."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(WORLD, tmp_path / "data" / "world")
    page = PAGE.read_text(encoding="utf-8")
    for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL):
        Path(re.match(r"# (\w+\.toml)", block)[1]).write_text(block, encoding="utf-8")
    Path("talk.jsonl").write_text(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1], encoding="utf-8")
    rows = logged(cold, "rows.jsonl")
    write_jsonl(Path("rows.jsonl"), rows[:40])
    write_jsonl(Path("tags.jsonl"), rows[40:60])
    one_step = ["--max-steps", "1"]
    assert sft.main(["--config", "sft.toml", "--output", "runs/mixed-sft", *one_step]) == 0
    assert ppo.main(["--config", "rl.toml", "--output", "runs/mixed-rl", *one_step, "--num-generations", "2"]) == 0
    assert json.loads(Path("runs/mixed-rl/summary.json").read_text(encoding="utf-8"))["questions"] == 901
    config = with_values(
        PpoConfig(), {"sources": tomllib.loads(Path("rl.toml").read_text(encoding="utf-8"))["sources"]}
    )
    assert len(read_questions_of(config.data, config.mixture)) == 901
