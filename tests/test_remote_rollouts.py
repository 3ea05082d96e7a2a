"""Episodes that are sampled on other machines: by two rollout workers on loopback, one of which dies, and by an
imitation of vLLM; and everything that is refused."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from r3lite import ppo, rollout_worker
from r3lite.assembly import remote_rollouts, rl_setup, rollout_service
from r3lite.assembly.rl_round import RoundSampler
from r3lite.core.command import COMMANDS
from r3lite.core.config import UsageError
from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.http_server import Server
from r3lite.core.invocation import resolve
from r3lite.core.records import InvalidRecord, Record, Source
from r3lite.datasets.sources import read_questions_of
from r3lite.models import lora
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rl.batch import Batch, Rollout
from r3lite.rollout import remote, wire
from r3lite.settings import PpoConfig, RolloutWorkerConfig
from r3lite.training import optim
from r3lite.training.metrics import Stopwatch
from tests.cold_start import WORLD, adapter, arguments, logged, same
from tests.fake_vllm import FakeVllm
from tests.scripted_server import Scripted

SHORT = ["--dtype", "fp32", "--max-new-tokens", "48", "--max-hops", "2"]
ROOT = Path(__file__).parent.parent


@pytest.fixture
def running(running):
    """Starts servers, of a service if one is given, and stops them; the address of each."""

    def start(service) -> str:
        return running(service if isinstance(service, ThreadingHTTPServer) else Server(service, "127.0.0.1", 0))

    return start


def worker_flags(cold: Path, *more: str) -> list[str]:
    return ["--preset", "tiny", "--index", str(cold / "index"), *SHORT, *more]


def service_of(cold: Path, *more: str, token: str | None = None):
    flags = worker_flags(cold, *more)
    return rollout_service.build(resolve("rollout_worker", RolloutWorkerConfig(), flags, COMMANDS, "ppo"), token)


def config_of(cold: Path, *more: str) -> PpoConfig:
    flags = arguments(cold, cold / "unused", "--algorithm", "grpo", *SHORT, *more)
    return resolve("ppo", PpoConfig(), flags, COMMANDS)


def sampler_of(config: PpoConfig, output: Path, elsewhere: bool = True):
    """The sampler of a run, as `reinforcement.train` makes it, and its learner and state."""
    remote_rollouts.check(config)
    questions = read_questions_of(config.data, config.mixture)
    setup = Setup(config.retrieval, questions, config.common.seed)
    engine, learner, state = rl_setup.build(config, questions)
    sampler = RoundSampler(config, questions, engine, build_retriever(setup), None)
    if elsewhere:
        sampler = remote_rollouts.build(sampler, learner, state, setup, output)
    return sampler, learner, state


def equal(one, other, within: float = 1e-5) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.question.id, a.tokens, a.action_mask) == (b.question.id, b.tokens, b.action_mask)
        assert (a.steps, a.step_ends, a.finish, a.place) == (b.steps, b.step_ends, b.finish, b.place)
        assert a.logprobs == pytest.approx(b.logprobs, abs=within)


def test_two_workers_sample_what_the_trainer_would_and_one_may_die(cold, tmp_path, running, monkeypatch, capfd):
    """Nothing is lost and nothing is there twice, though one is killed while it samples."""
    command = [sys.executable, "-m", "r3lite.rollout_worker", *worker_flags(cold), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        dying = re.search(r"http://\S+(?=,)", process.stdout.readline())[0]
        other, asked = running(service_of(cold)), []
        text = remote.Link.text

        def watched(link, path, content=None):
            if path == "/sample":
                asked.append(link.url)
                if link.url == dying and asked.count(dying) == 1:
                    threading.Timer(0.02, process.kill).start()  # the request is on its way by then
            return text(link, path, content)

        monkeypatch.setattr(remote.Link, "text", watched)
        flags = ["--num-generations", "4", "--batch-size", "4"]
        sampler, _, _ = sampler_of(config_of(cold, *flags, "--rollout-server", f"{dying},{other}"), tmp_path)
        local, _, _ = sampler_of(config_of(cold, *flags), tmp_path, elsewhere=False)
        for number in (1, 2):
            made, expected = sampler.sample(number, Stopwatch()), local.sample(number, Stopwatch())
            equal(made.sequences, expected.sequences)
            assert [s and s.total for s in made.scored] == [s and s.total for s in expected.scored]
            assert made.told == {"rollout/moved_episodes": 4, "rollout/stale_episodes": 0}  # 2: it is tried again
    finally:
        process.kill()
        process.wait()
    assert f"{dying} gives no answer" in capfd.readouterr().err


def test_episodes_go_on_elsewhere_from_where_they_stood(cold, tmp_path, running):
    sampler, _, _ = sampler_of(config_of(cold, "--rollout-server", running(service_of(cold))), tmp_path)
    local, _, _ = sampler_of(config_of(cold), tmp_path, elsewhere=False)
    begun = [(s, 1) for s in sampler.sample(1, Stopwatch()).sequences if len(s.steps) > 1]
    seeds = [f"again {i}" for i in range(len(begun))]
    assert begun
    made = sampler.sampler.engine.run_on(begun, seeds, sampler.sampler.retrieve)
    equal(made, local.engine.run_on(begun, seeds, local.retrieve))
    assert [s.tokens for s in made] != [s.tokens for s, _ in begun]


def test_the_critic_is_asked_when_the_episodes_are_back(cold, tmp_path, running):
    flags = ["--algorithm", "ppo", "--update-epochs", "1"]
    sampler, learner, _ = sampler_of(config_of(cold, *flags, "--rollout-server", running(service_of(cold))), tmp_path)
    local, beside, _ = sampler_of(config_of(cold, *flags), tmp_path, elsewhere=False)
    for head in (learner.value_head, beside.value_head):
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    made, expected = sampler.sample(1, Stopwatch()), local.sample(1, Stopwatch())
    for a, b in zip(made.sequences, expected.sequences, strict=True):
        assert a.values == pytest.approx(b.values, abs=1e-4) and any(a.values)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max-hops", "3"], r"differs: --max-hops is 3 \(here 2\)\n  Start the worker with the flags of this run"),
        (["--max-new-tokens", "32"], r"--max-new-tokens is 32 \(here 48\)"),
        (["--top-k", "1"], r"--top-k is 1 \(here 3\)"),
        (["--temperature", "0.5"], r"--temperature is 0.5 \(here 1.0\)"),
        (["--init-prompt", "prompts/init_prompt.txt"], "differs: the prompts, chat template or tokenizer is"),
        (["--index", "none", "--retriever", "none"], "--retriever is none .* the passages searched is False"),
    ],
)
def test_a_worker_with_other_settings_is_refused_by_their_names(cold, tmp_path, running, flags, told):
    with pytest.raises(R3LiteError, match=told):
        sampler_of(config_of(cold, "--rollout-server", running(service_of(cold, *flags))), tmp_path)


def test_another_base_and_another_version_are_refused(cold, tmp_path, running, monkeypatch):
    service = service_of(cold)
    url, ours = running(service), dict(service.facts)
    config = config_of(cold, "--rollout-server", url)
    service.facts = ours | {"--model": "0123456789abcdef"}
    with pytest.raises(R3LiteError, match=r"differs: --model is 0123456789abcdef \(here \w{16}\)"):
        sampler_of(config, tmp_path)
    service.facts = ours | {"the version of r3lite": "0.0.1"}
    with pytest.raises(R3LiteError, match=r"differs: the version of r3lite is 0.0.1 \(here"):
        sampler_of(config, tmp_path)
    service.facts = ours
    sampler, _, _ = sampler_of(config, tmp_path)
    sampler.sample(1, Stopwatch())
    service.facts = ours | {"--max-hops": "7"}  # it was started anew while the run goes on
    with pytest.raises(R3LiteError, match="differs: --max-hops is 7"):
        sampler.sample(2, Stopwatch())


def test_an_adapter_of_another_base_is_refused_by_the_worker(cold, tmp_path, running, monkeypatch):
    service = service_of(cold)
    sampler, _, _ = sampler_of(config_of(cold, "--rollout-server", running(service)), tmp_path)
    monkeypatch.setattr(rollout_service.lora, "read_base", lambda folder: ("other", "0123456789abcdef"))
    with pytest.raises(R3LiteError, match="the adapter was trained on another base: other with the fingerprint 0123"):
        sampler.sample(1, Stopwatch())


def test_an_adapter_that_was_damaged_on_its_way_is_refused(cold, tmp_path, running, monkeypatch):
    sampler, _, _ = sampler_of(config_of(cold, "--rollout-server", running(service_of(cold))), tmp_path)
    text = remote.Link.text

    def damaged(link, path, content=None):
        return text(link, path, content[:-1] + b"x" if isinstance(content, bytes) else content)

    monkeypatch.setattr(remote.Link, "text", damaged)
    with pytest.raises(R3LiteError, match=r"refuses: status 422: .*the adapter was damaged on its way: its hash is"):
        sampler.sample(1, Stopwatch())


def test_a_worker_that_was_started_anew_gets_the_adapter_again(cold, tmp_path, running):
    service = service_of(cold)
    sampler, _, _ = sampler_of(config_of(cold, "--rollout-server", running(service)), tmp_path)
    sampler.sample(1, Stopwatch())
    lora.remove_adapter(service.engine.model, service.version)
    service.version = ""
    again = sampler.sample(1, Stopwatch())
    assert len(again.sequences) == 6 and service.version == sampler.sampler.engine.adapter.version


def test_without_a_server_the_run_says_which_is_missing(cold, tmp_path, running, monkeypatch):
    with pytest.raises(R3LiteError, match=r"http://127.0.0.1:9 gives no answer: ConnectError.*\n  See that it runs"):
        sampler_of(config_of(cold, "--rollout-server", "http://127.0.0.1:9"), tmp_path)
    url = running(service_of(cold))
    sampler, _, _ = sampler_of(config_of(cold, "--rollout-server", url), tmp_path)
    sampler.sampler.engine.servers[0].link.url = "http://127.0.0.1:9"
    with pytest.raises(R3LiteError, match=r"no rollout server is left: http://127\.0\.0\.1:9 gives no answer"):
        sampler.sample(1, Stopwatch())


def test_a_worker_asks_for_its_token(cold, tmp_path, running, monkeypatch):
    url = running(service_of(cold, token="a secret of this test"))
    monkeypatch.delenv("R3LITE_TOKEN", raising=False)
    with pytest.raises(R3LiteError, match=r"(?s)status 401: .* R3LITE_TOKEN must be the same on both sides"):
        sampler_of(config_of(cold, "--rollout-server", url), tmp_path)
    monkeypatch.setenv("R3LITE_TOKEN", "a secret of this test")
    assert sampler_of(config_of(cold, "--rollout-server", url), tmp_path)


@pytest.fixture
def vllm(running):
    """Starts imitations of vLLM."""
    return lambda **options: (made := FakeVllm(**options), running(made))


def perturb(state) -> None:
    """Moves the policy, as an update does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in optim.parameters(state.optimizer).items():
            if "lora_B" in name:
                weight += 0.01 * torch.randn(weight.shape, generator=generator)


def rollouts_of(sequences) -> Batch:
    """Episodes of groups of three that are paid 0, 1 and 2 at their ends."""
    paid = [
        Rollout.paid_at_end(s.tokens, s.action_mask, s.logprobs, float(i % 3), i // 3) for i, s in enumerate(sequences)
    ]
    return Batch.of(paid)


def trainers_difference(learner, sequences) -> float:
    """The largest one between the recorded log-probabilities and those that the trainer computes now."""
    batch = rollouts_of(sequences)
    return float((learner.policy_logprobs(batch) - batch.logprobs).abs().max())


def test_vllm_samples_turns_and_gets_the_adapter_after_each_update(cold, tmp_path, vllm):
    server, url = vllm()
    flags = ["--num-generations", "6", "--rollout-server", url]
    sampler, learner, state = sampler_of(config_of(cold, *flags), tmp_path)
    first = sampler.sample(1, Stopwatch()).sequences
    assert any(step.documents for s in first for step in s.steps)  # found and spliced here
    assert trainers_difference(learner, first) < 1e-4
    again, _, _ = sampler_of(config_of(cold, *flags), tmp_path / "again")
    equal(again.sample(1, Stopwatch()).sequences, first)  # each turn's seed follows from the episode's
    perturb(state)
    assert trainers_difference(learner, first) > 1e-3
    second = sampler.sample(2, Stopwatch()).sequences
    assert trainers_difference(learner, second) < 1e-4
    loads = [line for line in server.log if not line.startswith("complete")]
    old, new = (f"r3lite-{made.sampler.engine.adapter.version[:16]}" for made in (again, sampler))
    assert loads == [f"load {old}", f"load {new}", f"unload {old}"]
    assert [p.name for p in (tmp_path / "served").iterdir()] == [new]


def test_a_turn_that_vllm_ends_too_early_is_gone_on_with(cold, tmp_path, vllm):
    server, url = vllm()
    sampler, learner, _ = sampler_of(config_of(cold, "--rollout-server", url), tmp_path)
    server.stop_early = 4
    made = sampler.sample(1, Stopwatch()).sequences
    assert all(s.finish for s in made) and trainers_difference(learner, made) < 1e-4


def test_a_vllm_that_was_started_anew_gets_the_adapter_again(cold, tmp_path, vllm):
    server, url = vllm()
    sampler, learner, _ = sampler_of(config_of(cold, "--rollout-server", f"{url},{vllm()[1]}"), tmp_path)
    sampler.sample(1, Stopwatch())
    server.answer("/v1/unload_lora_adapter", {"lora_name": sampler.sampler.engine.servers[0].name})
    made = sampler.sample(2, Stopwatch())  # elsewhere, for now
    assert made.told["rollout/moved_episodes"] and trainers_difference(learner, made.sequences) < 1e-4
    assert sampler.sample(3, Stopwatch()).told["rollout/moved_episodes"] == 0 and server.loaded


def test_log_probabilities_of_vllm_are_those_of_the_temperature_or_refused(cold, tmp_path, vllm):
    flags = ["--temperature", "0.7", "--rollout-server"]
    with pytest.raises(R3LiteError, match="from before --temperature\n  Start vLLM with --logprobs-mode processed"):
        sampler_of(config_of(cold, *flags, vllm(raw=True)[1]), tmp_path)
    sampler, learner, _ = sampler_of(config_of(cold, *flags, vllm()[1]), tmp_path)
    assert trainers_difference(learner, sampler.sample(1, Stopwatch()).sequences) < 1e-4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"root": "Qwen/Qwen2.5-0.5B"}, "serves Qwen/Qwen2.5-0.5B, and --model is tiny"),
        ({"longest": 512}, "takes 512 tokens, and --max-length is 1536"),
        (
            {"updating": False},
            "vLLM cannot load .*: status 404.*\n  Start it with: VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        ),
    ],
)
def test_a_vllm_that_does_not_fit_is_refused(cold, tmp_path, vllm, options, told):
    with pytest.raises(R3LiteError, match=told):
        sampler_of(config_of(cold, "--rollout-server", vllm(**options)[1]), tmp_path)[0].sample(1, Stopwatch())


def test_another_server_is_neither(cold, tmp_path, running):
    with pytest.raises(R3LiteError, match="is neither a rollout worker of r3lite nor vLLM"):
        sampler_of(config_of(cold, "--rollout-server", running(Scripted((200, {"hello": 1}, 0)))), tmp_path)


def test_a_stale_round_is_measured_and_corrected(cold, tmp_path, running):
    """The loss of its first step is that of the truncated importance weights, worked out here."""
    flags = ["--kl-beta", "0", "--negative-advantage-scale", "1", "--entropy-coefficient", "0"]
    flags += ["--max-staleness", "1", "--importance-cap", "1.2", "--rollout-server"]
    sampler, learner, state = sampler_of(config_of(cold, *flags, running(service_of(cold))), tmp_path)
    first = sampler.sample(1, Stopwatch())
    assert first.told["rollout/stale_episodes"] == 0 and trainers_difference(learner, first.sequences) < 1e-4
    perturb(state)
    second = sampler.sample(2, Stopwatch())
    assert second.told["rollout/stale_episodes"] == 6
    batch = rollouts_of(second.sequences)
    trainer = learner.policy_logprobs(batch)
    ratios = (trainer - batch.logprobs).exp().clamp(max=1.2)
    advantages = learner.algorithm.with_advantages(batch).advantages
    weights = learner.algorithm.weights(batch)
    expected, without = (float((-advantages * r * weights).sum()) for r in (ratios, torch.ones_like(ratios)))
    assert abs(expected - without) > 1e-4
    metrics = learner.learn(batch, "seed")
    assert metrics["loss"] == pytest.approx(expected, abs=1e-6)
    assert metrics["sampling/sampling_logp_difference/max"] > 1e-2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--importance-cap", "none"], "--max-staleness 1 needs a correction: pass --importance-cap"),
        (["--algorithm", "exgrpo"], "--max-staleness 1 draws a round before exgrpo knows what it replays"),
        (["--eval-data", str(WORLD / "dev.jsonl")], "pass --guard warn"),
    ],
)
def test_what_a_round_ahead_cannot_be_is_refused(cold, flags, told):
    config = config_of(cold, "--rollout-server", "http://127.0.0.1:9", "--max-staleness", "1", *flags)
    with pytest.raises(UsageError, match=told):
        remote_rollouts.check(config)


def test_a_run_a_round_ahead_resumes_with_the_adapter_of_the_round_before(cold, tmp_path, running):
    """What was sampled ahead is dropped, and sampled again with the adapter that the checkpoint has kept."""
    url = running(service_of(cold))
    ahead = ["--algorithm", "grpo", *SHORT, "--rollout-server", url, "--max-staleness", "1", "--max-steps", "3"]
    whole, parts = (arguments(cold, tmp_path / name, *ahead) for name in ("whole", "parts"))
    assert ppo.main(whole) == 0
    assert ppo.main([*parts, "--stop-after", "2"]) == 0
    assert ppo.main([*parts, "--resume", "auto"]) == 0
    same(tmp_path / "whole", tmp_path / "parts", 3)
    records = logged(tmp_path / "whole", "metrics.jsonl")
    assert [r["rollout/stale_episodes"] for r in records] == [0, 6, 6]
    assert all("sampling/importance_sampling_ratio/mean" in r for r in records)
    changed = [adapter(tmp_path / "whole"), adapter(cold / "sft")]
    assert any(not torch.equal(changed[0][name], changed[1][name]) for name in changed[1])


def test_a_dry_run_says_who_samples_and_with_which_adapter(cold, capsys):
    flags = arguments(cold, cold / "unused", "--rollout-server", "http://a:8100,http://b:8100", "--dry-run")
    assert ppo.main(flags) == 0
    told = "Episodes are sampled by http://a:8100, http://b:8100 (not asked now), each round with the adapter of now; "
    assert told + "importance weights of at most 2" in capsys.readouterr().out
    assert ppo.main([*flags, "--max-staleness", "1"]) == 0
    assert "with the adapter of the round before, while that is learned from" in capsys.readouterr().out
    assert ppo.main(["--max-staleness", "1", "--dry-run"]) == 2
    assert "--max-staleness is 1, and would do nothing here: it is for --rollout-server" in capsys.readouterr().err
    assert rollout_worker.main(worker_flags(cold, "--dry-run")) == 0
    assert "Memory, for episodes of 1536 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens": [1, 2]}, "do not fit one another"),
        ({"tokens": ["1", 2, 3]}, "tokens is .* not a list of whole numbers"),
        ({"logprobs": [0.5, -1.0]}, "not a list of logarithms of probabilities"),
        ({"step_ends": [3]}, "do not fit one another"),
        ({"finish": "done"}, "finish is 'done', not one of answered"),
    ],
)
def test_an_episode_from_the_network_is_read_with_distrust(change, told):
    sent = {"tokens": [5, 6, 7], "actions": "011", "logprobs": [-0.5, -1.0], "steps": [{"answer": "x"}]}
    sent |= {"step_ends": [2], "finish": "answered"}
    question = Question("q", "Who?", ())
    made = wire.sequence_from_json(Record(sent, Source("")), question)
    assert wire.sequence_to_json(made).items() >= (sent | {"steps": [{"analysis": "", "answer": "x"}]}).items()
    with pytest.raises(InvalidRecord, match=told):
        wire.sequence_from_json(Record(sent | change, Source("")), question)


def test_the_worker_is_sent_a_question_without_its_answers():
    document = Document("1", "Oslo", "In Norway.", metadata=(("year", 1.0),))
    earlier = ({"role": "user", "content": "Hi."},)
    asked = Question("q", "Where?", ("secret",), (document,), (document,), "title", (), "", earlier, "source", "Look.")
    sent = wire.tickets_to_json([wire.Ticket(asked, "0/1", 0), wire.Ticket(asked, "0/2", 1)])
    assert len(sent["questions"]) == 1 and "secret" not in str(sent)
    read = wire.tickets_from_json(Record(json.loads(json.dumps(sent)), Source("")))
    assert [t.seed for t in read] == ["0/1", "0/2"] and read[0].question is read[1].question
    assert read[0].question == dataclasses.replace(asked, answers=())
