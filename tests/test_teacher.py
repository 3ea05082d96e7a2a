"""The teacher of failed episodes: what it said, a cache of it that goes on where it stopped, and what does not fit."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from r3lite import collect, ppo
from r3lite.assembly import teacher, teacher_cache
from r3lite.core.errors import R3LiteError
from r3lite.core.files import read_jsonl, write_jsonl
from r3lite.core.token_record import TokenRecord
from r3lite.datasets import teacher_logprobs
from r3lite.datasets.teacher_logprobs import Lesson, read_cache
from r3lite.datasets.trajectories import Row
from r3lite.models.logprobs import TopTokens
from r3lite.models.weights import resolve_folder
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rewards.reward import EpisodeReward
from r3lite.rl.batch import Batch, Rollout
from tests.cold_start import SHORT, WORLD, arguments, assert_same_runs, logged
from tests.errors import raises, shows

TINY = resolve_folder("tiny")
CPU = ["--preset", "tiny", "--device", "cpu", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory) -> str:
    """Trajectories of the first six questions, which the runs below are about."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    flags = ["--data", str(WORLD / "train.jsonl"), "--limit", "6", "--corpus", str(WORLD / "corpus.jsonl")]
    assert collect.main(["--preset", "tiny", *flags, "--output", str(path)]) == 0
    return str(path)


def collected(trajectories: str, folder, *extra_flags: str) -> int:
    return collect.main([*CPU, "--teacher-logprobs", str(folder), "--data", trajectories, *extra_flags])


@pytest.fixture(scope="module")
def cache(trajectories, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "made"
    assert collected(trajectories, folder, "--teacher-top", "8") == 0
    return folder


def lessons(folder) -> dict[str, Lesson]:
    return read_cache(folder, Tokenizer.load(TINY).fingerprint, 1536)


def test_what_is_kept_is_what_transformers_says(cache, trajectories):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    cached_lessons = lessons(cache)
    size = Tokenizer.load(TINY).size
    assert list(cached_lessons) == [row.values["id"] for row in read_jsonl(trajectories)]
    for lesson in cached_lessons.values():
        with torch.no_grad():
            logits = model(torch.tensor([lesson.row.tokens])).logits[0, :-1, :size]
        expected = logits.log_softmax(-1)[torch.tensor(lesson.row.action_mask[1:])].topk(8)
        # Both are 3e-4 from float64 here.
        assert torch.allclose(lesson.teacher.logprobs, expected.values, atol=1e-3, rtol=0)
        gaps = expected.values[:, :-1] - expected.values[:, 1:]
        clear = torch.cummin((gaps > 2e-3).int(), -1).values.bool()  # else two may change places
        assert torch.equal(lesson.teacher.ids[:, :-1][clear], expected.indices.int()[:, :-1][clear])
        assert clear.float().mean() > 0.9


def test_a_cache_that_was_stopped_goes_on_and_is_the_same_to_the_bit(trajectories, tmp_path, monkeypatch):
    for module in (teacher_cache, teacher_logprobs):
        monkeypatch.setattr(module, "ROWS_PER_PART", 2)
    assert collected(trajectories, tmp_path / "whole") == 0
    write = teacher_logprobs.write_part
    part_numbers = []

    def stops(folder, number, **part):
        if number == 1:
            raise KeyboardInterrupt
        write(folder, number, **part)

    monkeypatch.setattr(teacher_logprobs, "write_part", stops)
    assert collected(trajectories, tmp_path / "parts") == 130
    with raises(R3LiteError, "logprobs-incomplete", "manifest"):
        lessons(tmp_path / "parts")

    def counted(folder, number, **part):
        part_numbers.append(number)
        write(folder, number, **part)

    monkeypatch.setattr(teacher_logprobs, "write_part", counted)
    assert collected(trajectories, tmp_path / "parts") == 0
    assert part_numbers == [1, 2]
    assert collected(trajectories, tmp_path / "parts") == 0 and part_numbers == [1, 2]  # nothing is left to do
    full_run, parts = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("whole", "parts"))
    assert full_run == parts and len(full_run) == 4


def test_a_cache_of_something_else_is_not_gone_on_with(trajectories, cache, tmp_path, capsys):
    folder = shutil.copytree(cache, tmp_path / "cache")
    same_k = ["--teacher-top", "8"]
    assert collected(trajectories, folder, "--teacher-top", "9") == 1
    assert "part-00000.safetensors was made with another top: 8, not 9" in capsys.readouterr().err
    assert collected(trajectories, folder, *same_k, "--quantize", "nf4", "--nf4-cache", "none") == 1
    assert "was made with another teacher" in capsys.readouterr().err
    assert collected(trajectories, folder, *same_k, "--limit", "2") == 1
    assert "was made with another trajectories" in capsys.readouterr().err
    (folder / "mine.txt").write_text("x")
    assert collected(trajectories, folder, *same_k) == 1
    assert "is not a cache of log-probabilities: it holds mine.txt" in capsys.readouterr().err
    assert collect.main([*CPU, "--teacher-logprobs", "a", "--data", trajectories, "--output", "b"]) == 2
    assert shows(capsys.readouterr().err, "setting-unused", "--output is b")


def dgpo(cold, output, *extra_flags: str) -> list[str]:
    return arguments(cold, output, "--algorithm", "dgpo", *SHORT.split(), "--dtype", "fp32", *extra_flags)


def test_ppo_learns_from_a_cache_and_goes_on_to_the_bit(cold, cache, tmp_path):
    full_run, parts = (dgpo(cold, tmp_path / name, "--teacher-logprobs", str(cache)) for name in ("whole", "parts"))
    assert ppo.main(full_run) == 0
    assert ppo.main([*parts, "--stop-after", "1"]) == 0
    assert ppo.main([*parts, "--resume", "auto"]) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", 2)
    for record in logged(tmp_path / "whole", "metrics.jsonl"):
        assert record["teacher/failed"] == record["teacher/guided"] > 0 and record["teacher/kl"] > 0
        assert record["teacher/failed"] == pytest.approx(1 - record["rewards/em/mean"])


def test_a_cache_that_does_not_fit_the_run_is_refused(cold, cache, trajectories, tmp_path, capsys):
    run = dgpo(cold, tmp_path / "run", "--teacher-logprobs")
    (tmp_path / "init.txt").write_text("Say it.\n{question}", encoding="utf-8")
    assert ppo.main([*run, str(cache), "--init-prompt", str(tmp_path / "init.txt")]) == 1
    assert "has another prompt than its episodes" in capsys.readouterr().err
    run = dgpo(cold, tmp_path / "other", "--teacher-logprobs")
    assert ppo.main([*run, str(cache), "--max-length", "300"]) == 1
    assert "but --max-length is 300" in capsys.readouterr().err
    assert ppo.main([*run, str(tmp_path)]) == 1
    assert "is not a complete cache" in capsys.readouterr().err
    lines = [row.values | {"id": f"other {i}"} for i, row in enumerate(read_jsonl(trajectories))]
    write_jsonl(tmp_path / "rows.jsonl", lines)
    assert collected(str(tmp_path / "rows.jsonl"), tmp_path / "of others") == 0
    assert ppo.main([*run, str(tmp_path / "of others")]) == 1
    assert "has no trajectory for any of the 6 questions" in capsys.readouterr().err


def test_a_teacher_with_other_tokens_is_refused(cold, cache, tmp_path, capsys):
    """One token has another id: its distributions would be read as something else."""
    folder = shutil.copytree(TINY, tmp_path / "teacher")
    definition = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = definition["model"]["vocab"]
    first_token, second_token = [token for token in vocabulary if len(token) > 3][:2]
    vocabulary[first_token], vocabulary[second_token] = vocabulary[second_token], vocabulary[first_token]
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    assert ppo.main(dgpo(cold, tmp_path / "run", "--teacher", str(folder))) == 1
    assert f"the teacher {folder} and the policy tiny have different tokenizers" in capsys.readouterr().err
    with raises(R3LiteError, "teacher-tokenizer-differs"):
        read_cache(cache, Tokenizer.load(folder).fingerprint, 1536)


def test_the_adapter_of_another_base_is_refused(cold, tmp_path, capsys, small_model, write_folder):
    other_base = write_folder(small_model(vocab_size=1024), tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, other_base / name)
    flags = ["--teacher", str(other_base), "--teacher-adapter", str(cold / "sft")]
    assert ppo.main(dgpo(cold, tmp_path / "run", *flags)) == 1
    assert "was trained on another base" in capsys.readouterr().err


def test_a_teacher_that_is_the_policy_says_nothing_new(cold, tmp_path):
    """In turns, along the policy's own tokens: before the first step the divergence is 0, with its adapter, not NF4."""
    teacher_flags = ["--teacher", "tiny", "--teacher-adapter", str(cold / "sft"), "--teacher-top", "1024"]
    for name, quantize, low, high in (("none", "none", 0, 1e-6), ("nf4", "nf4", 1e-4, 1)):
        flags = [*teacher_flags, "--teacher-quantize", quantize, "--nf4-cache", "none", "--max-steps", "1"]
        assert ppo.main(dgpo(cold, tmp_path / name, *flags)) == 0
        (record,) = logged(tmp_path / name, "metrics.jsonl")
        assert low <= record["teacher/kl"] < high and record["teacher/guided"] > 0


ROLLOUT = Rollout(
    TokenRecord(tokens=[5, 6, 7, 8], action_mask=[False, False, True, True], logprobs=[-1.0, -2.0], values=[0.0, 0.0]),
    [(2, 0.1), (3, 0.25)],
    1,
)
LESSON = Lesson(
    Row(tokens=[5, 6, 9, 3, 9], action_mask=[False, False, True, False, True]),
    TopTokens(torch.zeros(2, 1), torch.zeros(2, 1)),
)


def test_a_trajectory_stands_in_the_place_of_what_failed():
    """It is paid what the episode was, so that its group's advantages stay; the other episode keeps its tokens."""
    failed = replace(ROLLOUT, failed=True)
    cached = teacher.CachedTeacher({"q": LESSON})
    batch = cached.batch([failed, ROLLOUT], {0: "p", 1: "q"})
    assert batch.tokens.tolist() == [[5, 6, 9, 3, 9], [5, 6, 7, 8, 0]]
    assert batch.action_mask.tolist() == [[False, False, True, False, True], [False, False, True, True, False]]
    assert batch.rewards.sum(-1).tolist() == pytest.approx([0.35, 0.35]) and batch.failed.tolist() == [True, False]
    assert batch.teacher == [LESSON.teacher, None] and batch.groups.tolist() == [1, 1]
    untaught = cached.batch([failed], {0: "q", 1: "p"})
    assert untaught.teacher == [None] and torch.equal(untaught.tokens, Batch.of([failed]).tokens)
    with raises(R3LiteError, "lesson-prompt-differs", "q"):
        cached.batch([replace(failed, record=replace(failed.record, tokens=[5, 4, 7, 8]))], {0: "p", 1: "q"})


def test_what_has_failed():
    """What is not right, by the judge if there was one; or what is paid too little for the outcome."""
    close = EpisodeReward([0.4], {"em": 0.0, "f1": 0.8, "outcome": 0.4})
    assert close.failed() and close.failed(0.5) and not close.failed(0.4)
    assert not EpisodeReward([1.0], {"em": 1.0, "outcome": 1.0}).failed()
    assert not EpisodeReward([0.0], {"em": 0.0, "judge": 1.0, "outcome": 0.0}).failed()
