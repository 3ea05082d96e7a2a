"""Episodes that are sampled on other machines: by two rollout workers on loopback, one of which dies, and by an
imitation of vLLM; and everything that is refused."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from r3lite import index, ppo, rollout_worker
from r3lite.assembly import remote_rollouts, rollout_service
from r3lite.core.config import UsageError
from r3lite.core.episode import Document, Question
from r3lite.core.errors import R3LiteError
from r3lite.core.files import write_jsonl, write_text
from r3lite.core.invocation import resolve
from r3lite.core.records import InvalidRecord, Record, Source
from r3lite.core.spans import Stopwatch
from r3lite.llm.http_client import Link
from r3lite.models import lora
from r3lite.retrieval.setup import Setup
from r3lite.rollout import wire
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.uniforms import Uniforms
from r3lite.settings import PpoConfig
from tests.cold_start import WORLD, adapter, arguments, assert_same_runs, logged
from tests.errors import raises
from tests.sampled_elsewhere import (
    SHORT,
    config_of,
    equal,
    perturb,
    rollouts_of,
    sampler_of,
    service_of,
    trainers_difference,
    worker_flags,
)
from tests.scripted_server import Scripted

ROOT = Path(__file__).parent.parent


def test_two_workers_sample_what_the_trainer_would_and_one_may_die(cold, tmp_path, running, monkeypatch, capfd):
    """Nothing is lost and nothing is there twice, though one is killed while it samples."""
    command = [sys.executable, "-m", "r3lite.rollout_worker", *worker_flags(cold), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        dying = re.search(r"http://\S+(?=,)", process.stdout.readline())[0]
        surviving = running(service_of(cold))
        requested_urls = []
        text = Link.text

        def watched(link, path, content=None):
            if path == "/sample":
                requested_urls.append(link.url)
                if link.url == dying and requested_urls.count(dying) == 1:
                    threading.Timer(0.02, process.kill).start()  # the request is on its way by then
            return text(link, path, content)

        monkeypatch.setattr(Link, "text", watched)
        flags = ["--num-generations", "4", "--batch-size", "4"]
        sampler, _, _ = sampler_of(config_of(cold, *flags, "--rollout-server", f"{dying},{surviving}"), tmp_path)
        local, _, _ = sampler_of(config_of(cold, *flags), tmp_path, elsewhere=False)
        for number in (1, 2):
            sampled, expected = sampler.sample(number, Stopwatch()), local.sample(number, Stopwatch())
            equal(sampled.sequences, expected.sequences)
            assert [s and s.total for s in sampled.rewards] == [s and s.total for s in expected.rewards]
            # In round 2, too: the worker that died is tried again.
            assert sampled.extra_metrics == {"rollout/moved_episodes": 4, "rollout/stale_episodes": 0}
    finally:
        process.kill()
        process.wait()
    assert f"{dying} does not answer" in capfd.readouterr().err


def test_episodes_go_on_elsewhere_from_where_they_stood(cold, tmp_path, running):
    sampler, _, _ = sampler_of(config_of(cold, "--rollout-server", running(service_of(cold))), tmp_path)
    local, _, _ = sampler_of(config_of(cold), tmp_path, elsewhere=False)
    rounds = [sampler.sample(number, Stopwatch()).sequences for number in (1, 2, 3, 4)]
    starts = [(s, 1) for sequences in rounds for s in sequences if len(s.steps) > 1]
    seeds = [f"again {i}" for i in range(len(starts))]
    assert starts
    continued = sampler.engine.continue_from(starts, seeds, sampler.retrieve)
    equal(continued, local.engine.continue_from(starts, seeds, local.retrieve))
    assert [s.tokens for s in continued] != [s.tokens for s, _ in starts]


def test_the_critic_is_asked_when_the_episodes_are_back(cold, tmp_path, running):
    flags = ["--algorithm", "ppo", "--update-epochs", "1"]
    sampler, learner, _ = sampler_of(config_of(cold, *flags, "--rollout-server", running(service_of(cold))), tmp_path)
    local, beside, _ = sampler_of(config_of(cold, *flags), tmp_path, elsewhere=False)
    for head in (learner.value_head, beside.value_head):
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    sampled, expected = sampler.sample(1, Stopwatch()), local.sample(1, Stopwatch())
    for a, b in zip(sampled.sequences, expected.sequences, strict=True):
        assert a.values == pytest.approx(b.values, abs=1e-4) and any(a.values)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--max-hops", "3"],
            r"has other settings: --max-hops is 3 \(here 2\)\n  Start the worker with the flags of this run",
        ),
        (["--max-new-tokens", "32"], r"--max-new-tokens is 32 \(here 48\)"),
        (["--top-k", "1"], r"--top-k is 1 \(here 3\)"),
        (["--temperature", "0.5"], r"--temperature is 0.5 \(here 1.0\)"),
        (
            ["--init-prompt", "prompts/init_prompt.txt"],
            "has other settings: the prompts, chat template or tokenizer is",
        ),
        (["--index", "none", "--retriever", "none"], "--retriever is none .* the passages searched is False"),
    ],
)
def test_a_worker_with_other_settings_is_refused_by_their_names(cold, tmp_path, running, flags, message):
    with pytest.raises(R3LiteError, match=message):
        sampler_of(config_of(cold, "--rollout-server", running(service_of(cold, *flags))), tmp_path)


@pytest.fixture
def facts_in(tmp_path):
    """The facts of a machine with an index and a reranker in a folder of its own."""

    def facts(machine: str, text: str = "Rome lies on the Tiber.", weights: str = "w") -> dict[str, str]:
        write_jsonl(tmp_path / machine / "corpus.jsonl", [{"id": "1", "title": "Rome", "text": text}])
        news = tmp_path / machine / "the-news"
        corpus = str(tmp_path / machine / "corpus.jsonl")
        assert index.main(["--preset", "tiny", "--corpus", corpus, "--output", str(news)]) == 0
        reranker = tmp_path / machine / "the-reranker"
        write_text(reranker / "model.safetensors", weights)
        flags = ["--preset", "tiny", "--format", "dag", "--corpus", corpus, "--rerank", str(reranker)]
        config = resolve("ppo", PpoConfig(), [*flags, "--source-index", f"News={news},Academic=exa"])
        config.check_settings("ppo")
        setup = Setup(config.retrieval, [], config.common.seed)
        return rollout_service.facts_of(config, base="b", nf4=False, layouts={}, setup=setup)

    return facts


def test_rerankers_and_indexes_of_kinds_are_compared_by_content_and_not_by_path(facts_in):
    """A worker whose folders had other paths than the trainer's was refused."""
    ours = facts_in("here")
    assert facts_in("there") == ours
    assert "here" not in "".join(ours.values()) and "Academic=exa" in ours["--source-index"]
    assert {name for name, fact in facts_in("a", weights="v").items() if fact != ours[name]} == {"--rerank"}
    changed = facts_in("b", text="Rome is old.")
    assert changed["--source-index"] != ours["--source-index"] and changed["--rerank"] == ours["--rerank"]


def test_another_base_and_another_version_are_refused(cold, tmp_path, running, monkeypatch):
    service = service_of(cold)
    url, ours = running(service), dict(service.facts)
    config = config_of(cold, "--rollout-server", url)
    service.facts = ours | {"--model": "0123456789abcdef"}
    with pytest.raises(R3LiteError, match=r"has other settings: --model is 0123456789abcdef \(here \w{16}\)"):
        sampler_of(config, tmp_path)
    service.facts = ours | {"the version of r3lite": "0.0.1"}
    with raises(R3LiteError, "worker-differs", "the version of r3lite is 0.0.1 (here"):
        sampler_of(config, tmp_path)
    service.facts = ours
    sampler, _, _ = sampler_of(config, tmp_path)
    sampler.sample(1, Stopwatch())
    service.facts = ours | {"--max-hops": "7"}  # it was started anew while the run goes on
    with raises(R3LiteError, "worker-differs", "--max-hops is 7"):
        sampler.sample(2, Stopwatch())


def test_an_adapter_of_another_base_is_refused_by_the_worker(cold, tmp_path, running, monkeypatch):
    service = service_of(cold)
    sampler, _, _ = sampler_of(config_of(cold, "--rollout-server", running(service)), tmp_path)
    monkeypatch.setattr(rollout_service.lora, "read_base", lambda folder: ("other", "0123456789abcdef"))
    with pytest.raises(R3LiteError, match="the adapter was trained on another base: other with the fingerprint 0123"):
        sampler.sample(1, Stopwatch())


def test_an_adapter_that_was_damaged_on_its_way_is_refused(cold, tmp_path, running, monkeypatch):
    sampler, _, _ = sampler_of(config_of(cold, "--rollout-server", running(service_of(cold))), tmp_path)
    text = Link.text

    def damaged(link, path, content=None):
        return text(link, path, content[:-1] + b"x" if isinstance(content, bytes) else content)

    monkeypatch.setattr(Link, "text", damaged)
    with pytest.raises(R3LiteError, match=r"refuses: status 422: .*the adapter was damaged in transfer: its hash is"):
        sampler.sample(1, Stopwatch())


def test_a_worker_that_was_started_anew_gets_the_adapter_again(cold, tmp_path, running):
    service = service_of(cold)
    sampler, _, _ = sampler_of(config_of(cold, "--rollout-server", running(service)), tmp_path)
    sampler.sample(1, Stopwatch())
    lora.remove_adapter(service.engine.model, service.version)
    service.version = ""
    second_round = sampler.sample(1, Stopwatch())
    assert len(second_round.sequences) == 6 and service.version == sampler.engine.adapter.version


def test_without_a_server_the_run_says_which_is_missing(cold, tmp_path, running, monkeypatch):
    with pytest.raises(R3LiteError, match=r"http://127.0.0.1:9 does not answer: ConnectError.*\n  Check that it runs"):
        sampler_of(config_of(cold, "--rollout-server", "http://127.0.0.1:9"), tmp_path)
    url = running(service_of(cold))
    sampler, _, _ = sampler_of(config_of(cold, "--rollout-server", url), tmp_path)
    sampler.engine.servers[0].link.url = "http://127.0.0.1:9"
    with pytest.raises(R3LiteError, match=r"no rollout server is left: http://127\.0\.0\.1:9 does not answer"):
        sampler.sample(1, Stopwatch())


def test_a_worker_asks_for_its_token(cold, tmp_path, running, monkeypatch):
    url = running(service_of(cold, token="a secret of this test"))
    monkeypatch.delenv("R3LITE_TOKEN", raising=False)
    with pytest.raises(R3LiteError, match=r"(?s)status 401: .* address in --rollout-server and R3LITE_TOKEN"):
        sampler_of(config_of(cold, "--rollout-server", url), tmp_path)
    monkeypatch.setenv("R3LITE_TOKEN", "a secret of this test")
    assert sampler_of(config_of(cold, "--rollout-server", url), tmp_path)


def test_another_server_is_neither(cold, tmp_path, running):
    with raises(R3LiteError, "not-a-worker"):
        sampler_of(config_of(cold, "--rollout-server", running(Scripted((200, {"hello": 1}, 0)))), tmp_path)


def test_a_stale_round_is_measured_and_corrected(cold, tmp_path, running):
    """The loss of its first step is that of the truncated importance weights, worked out here."""
    flags = ["--kl-beta", "0", "--negative-advantage-scale", "1", "--entropy-coefficient", "0"]
    flags += ["--max-staleness", "1", "--importance-cap", "1.2", "--rollout-server"]
    sampler, learner, state = sampler_of(config_of(cold, *flags, running(service_of(cold))), tmp_path)
    first = sampler.sample(1, Stopwatch())
    assert first.extra_metrics["rollout/stale_episodes"] == 0 and trainers_difference(learner, first.sequences) < 1e-4
    perturb(state)
    second = sampler.sample(2, Stopwatch())
    assert second.extra_metrics["rollout/stale_episodes"] == 6
    batch = rollouts_of(second.sequences)
    trainer = learner.policy_logprobs(batch)
    ratios = (trainer - batch.logprobs).exp().clamp(max=1.2)
    advantages = learner.algorithm.with_advantages(batch).advantages
    weights = learner.algorithm.weights(batch)
    expected, without = (float((-advantages * r * weights).sum()) for r in (ratios, torch.ones_like(ratios)))
    # Ten times what the loss may differ by. How far the weights matter depends on the cold start, and so on the
    # processor.
    assert abs(expected - without) > 1e-5
    metrics = learner.learn(batch, "seed")
    assert metrics["loss"] == pytest.approx(expected, abs=1e-6)
    assert metrics["sampling/sampling_logp_difference/max"] > 1e-2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--importance-cap", "none"], "--max-staleness 1 needs an --importance-cap"),
        (["--algorithm", "exgrpo"], "--max-staleness 1 does not work with exgrpo, which replays"),
        (["--kl-budget", "0.001"], "--max-staleness 1 does not work with --kl-budget, which measures the last update"),
        (["--eval-data", str(WORLD / "dev.jsonl")], "pass --guard warn"),
    ],
)
def test_what_a_round_ahead_cannot_be_is_refused(cold, flags, message):
    config = config_of(cold, "--rollout-server", "http://127.0.0.1:9", "--max-staleness", "1", *flags)
    with pytest.raises(UsageError, match=message):
        remote_rollouts.check(config)


def test_a_run_a_round_ahead_resumes_with_the_adapter_of_the_round_before(cold, tmp_path, running):
    """What was sampled ahead is dropped, and sampled again with the adapter that the checkpoint has kept."""
    url = running(service_of(cold))
    ahead = ["--algorithm", "grpo", *SHORT, "--rollout-server", url, "--max-staleness", "1", "--max-steps", "3"]
    uninterrupted, resumed = (arguments(cold, tmp_path / name, *ahead) for name in ("whole", "parts"))
    assert ppo.main(uninterrupted) == 0
    assert ppo.main([*resumed, "--stop-after", "2"]) == 0
    assert ppo.main([*resumed, "--resume", "auto"]) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", 3)
    records = logged(tmp_path / "whole", "metrics.jsonl")
    assert [r["rollout/stale_episodes"] for r in records] == [0, 6, 6]
    assert all("sampling/importance_sampling_ratio/mean" in r for r in records)
    changed = [adapter(tmp_path / "whole"), adapter(cold / "sft")]
    assert any(not torch.equal(changed[0][name], changed[1][name]) for name in changed[1])


def test_a_dry_run_says_who_samples_and_with_which_adapter(cold, capsys):
    flags = arguments(cold, cold / "unused", "--rollout-server", "http://a:8100,http://b:8100", "--dry-run")
    assert ppo.main(flags) == 0
    message = (
        "Episodes are sampled by http://a:8100, http://b:8100 (not contacted now), each round with the newest adapter; "
    )
    assert message + "importance weights of at most 2" in capsys.readouterr().out
    assert ppo.main([*flags, "--max-staleness", "1"]) == 0
    assert "with the adapter before the last update" in capsys.readouterr().out
    assert ppo.main(["--max-staleness", "1", "--dry-run"]) == 2
    assert "--max-staleness is 1, but has no effect here: it needs --rollout-server" in capsys.readouterr().err
    assert rollout_worker.main(worker_flags(cold, "--dry-run")) == 0
    assert "Memory, for episodes of 1536 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 2]}, "step_ends is .* not a list of whole numbers from 0 to 1"),
        ({"tokens": ["1", 2, 3]}, "tokens is .* not a list of whole numbers from 0 to 8"),
        ({"tokens": [5, 6, 9]}, r"tokens is \[5, 6, 9\], not a list of whole numbers from 0 to 8"),
        ({"tokens": [5, 6, -1]}, "not a list of whole numbers"),
        ({"tokens": [5] * 101, "actions": "1" * 101}, "tokens are 101, more than --max-length 100"),
        ({"tokens": [], "actions": "0", "logprobs": [], "step_ends": [], "steps": []}, "are inconsistent"),
        ({"actions": "000", "logprobs": []}, "step_ends are not the ends of turns that were sampled"),
        ({"actions": "01x"}, "actions is '01x', not a text of 0 and 1"),
        ({"logprobs": [0.5, -1.0]}, "not a list of log-probabilities"),
        ({"logprobs": [-(10**400), -1.0]}, "not a list of log-probabilities"),
        ({"logprobs": [10**400, -1.0]}, "not a list of log-probabilities"),
        ({"step_ends": [3]}, "not a list of whole numbers from 0 to 2"),
        ({"step_ends": [1]}, "step_ends are not the ends of turns that were sampled"),
        ({"step_ends": [2, 1], "steps": [{"answer": "x"}] * 2}, "not the ends of turns"),
        ({"step_ends": [2, 2], "steps": [{"answer": "x"}] * 2}, "not the ends of turns"),
        ({"steps": [], "step_ends": []}, "not the ends of turns"),
        ({"finish": "done"}, "finish is 'done', not one of answered"),
        ({"finish": "searching"}, "finish is 'searching', not one of answered"),
    ],
)
def test_an_episode_from_the_network_is_read_with_distrust(change, message):
    sent = {"tokens": [5, 6, 7], "actions": "011", "logprobs": [-0.5, -1.0], "steps": [{"answer": "x"}]}
    sent |= {"step_ends": [2], "finish": "answered"}
    question, bounds = Question("q", "Who?", ()), wire.EpisodeLimits(vocabulary=9, max_length=100)
    sequence = wire.sequence_from_json(Record(sent, Source("")), question, bounds)
    assert wire.sequence_to_json(sequence).items() >= (sent | {"steps": [{"analysis": "", "answer": "x"}]}).items()
    with pytest.raises(InvalidRecord, match=message):
        wire.sequence_from_json(Record(sent | change, Source("")), question, bounds)


def test_an_episode_goes_on_from_the_beginning_that_was_sent():
    """The prompt of its question, or the first steps of another episode with their log-probabilities."""

    def sequence(tokens, actions, logprobs):
        return Sequence(
            Question("q", "Who?", ()), tokens=tokens, action_mask=actions, logprobs=logprobs, stream=Uniforms(0)
        )

    start = sequence([5, 6, 7], [False, True, False], [-0.5])
    wire.check_start(sequence([5, 6, 7, 8], [False, True, False, True], [-0.5, -1.0]), start)
    for tokens, actions, logprobs in (
        ([5, 6, 8, 8], [False, True, False, True], [-0.5, -1.0]),
        ([5, 6, 7, 8], [False, True, True, True], [-0.5, -1.0, -1.0]),
        ([5, 6, 7, 8], [False, True, False, True], [-0.4, -1.0]),
        ([5, 6], [False, True], [-0.5]),
    ):
        with raises(InvalidRecord, "wire-prompt-differs", "q"):
            wire.check_start(sequence(tokens, actions, logprobs), start)


def test_a_ticket_goes_on_after_a_step_that_is_not_the_last():
    sent = {"tokens": [5, 6, 7, 8], "actions": "0101", "logprobs": [-0.5, -1.0], "step_ends": [1, 3]}
    sent |= {"finish": "answered", "steps": [{"query": "x"}, {"answer": "y"}]}
    question = wire.tickets_to_json([wire.Ticket(Question("q", "Who?", ()), "0", 0)])["questions"][0]
    bounds = wire.EpisodeLimits(vocabulary=9, max_length=100)

    def read(steps):
        episode = {"question": 0, "seed": "0", "begun": sent, "steps": steps}
        return wire.tickets_from_json(Record({"questions": [question], "episodes": [episode]}, Source("")), bounds)

    assert read(1)[0].sequence().tokens == [5, 6, 7]
    with pytest.raises(InvalidRecord, match=r"steps is 2, not a whole number from 1 to 1"):
        read(2)  # it ended in a ValueError, when the next turn was looked for


def test_an_adapter_without_its_two_files_is_refused(tmp_path):
    """It was a ValueError: the worker closed the connection without a word."""
    with raises(InvalidRecord, "wire-adapter"):
        wire.AdapterFiles(b'{"r": 8}').write(tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_the_worker_is_sent_a_question_without_its_answers():
    document = Document("1", "Oslo", "In Norway.", metadata=(("year", 1.0),))
    earlier = ({"role": "user", "content": "Hi."},)
    question = Question(
        "q", "Where?", ("secret",), (document,), (document,), "title", (), "", earlier, "source", "Look."
    )
    sent = wire.tickets_to_json([wire.Ticket(question, "0/1", 0), wire.Ticket(question, "0/2", 1)])
    assert len(sent["questions"]) == 1 and "secret" not in str(sent)
    bounds = wire.EpisodeLimits(vocabulary=9, max_length=100)
    read = wire.tickets_from_json(Record(json.loads(json.dumps(sent)), Source("")), bounds)
    assert [t.seed for t in read] == ["0/1", "0/2"] and read[0].question is read[1].question
    assert read[0].question == dataclasses.replace(question, answers=())
