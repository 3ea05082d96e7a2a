"""Episodes that an imitation of vLLM samples."""

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.core.records import InvalidRecord, Record, Source
from r3lite.core.spans import Stopwatch
from r3lite.rollout.vllm import VllmServer
from r3lite.rollout.wire import AdapterFiles
from tests.errors import raises
from tests.fake_vllm import FakeVllm
from tests.sampled_elsewhere import config_of, equal, perturb, sampler_of, trainers_difference


@pytest.fixture
def vllm(running):
    """Starts imitations of vLLM."""
    return lambda **options: (server := FakeVllm(**options), running(server))


def test_vllm_samples_turns_and_gets_the_adapter_after_each_update(cold, tmp_path, vllm):
    server, url = vllm()
    flags = ["--num-generations", "6", "--rollout-server", url]
    sampler, learner, state = sampler_of(config_of(cold, *flags), tmp_path)
    first = sampler.sample(1, Stopwatch()).sequences
    assert any(step.documents for s in first for step in s.steps)  # found and spliced here
    assert trainers_difference(learner, first) < 1e-4
    second_sampler, _, _ = sampler_of(config_of(cold, *flags), tmp_path / "again")
    equal(second_sampler.sample(1, Stopwatch()).sequences, first)  # each turn's seed follows from the episode's
    perturb(state)
    assert trainers_difference(learner, first) > 1e-3
    second = sampler.sample(2, Stopwatch()).sequences
    assert trainers_difference(learner, second) < 1e-4
    loads = [line for line in server.log if not line.startswith("complete")]
    old, new = (f"r3lite-{round_sampler.engine.adapter.version[:16]}" for round_sampler in (second_sampler, sampler))
    assert loads == [f"load {old}", f"load {new}", f"unload {old}"]
    assert [p.name for p in (tmp_path / "served").iterdir()] == [new]


def test_a_turn_that_vllm_ends_too_early_is_gone_on_with(cold, tmp_path, vllm):
    server, url = vllm()
    sampler, learner, _ = sampler_of(config_of(cold, "--rollout-server", url), tmp_path)
    server.stop_early = 4
    sequences = sampler.sample(1, Stopwatch()).sequences
    turns = sum(
        is_action and not before for s in sequences for before, is_action in zip(s.action_mask, s.action_mask[1:])
    )
    assert server.stop_early == 0 and len([line for line in server.log if line.startswith("complete")]) == turns + 4
    assert all(s.finish for s in sequences) and trainers_difference(learner, sequences) < 1e-4


def test_a_vllm_that_was_started_anew_gets_the_adapter_again(cold, tmp_path, vllm):
    server, url = vllm()
    sampler, learner, _ = sampler_of(config_of(cold, "--rollout-server", f"{url},{vllm()[1]}"), tmp_path)
    sampler.sample(1, Stopwatch())
    server.answer("/v1/unload_lora_adapter", {"lora_name": sampler.engine.servers[0].name})
    moved = sampler.sample(2, Stopwatch())  # elsewhere, for now
    assert moved.extra_metrics["rollout/moved_episodes"] and trainers_difference(learner, moved.sequences) < 1e-4
    assert sampler.sample(3, Stopwatch()).extra_metrics["rollout/moved_episodes"] == 0 and server.loaded


def test_log_probabilities_of_vllm_are_those_of_the_temperature_or_refused(cold, tmp_path, vllm):
    flags = ["--temperature", "0.7", "--rollout-server"]
    with raises(R3LiteError, "vllm-raw-logprobs"):
        sampler_of(config_of(cold, *flags, vllm(raw=True)[1]), tmp_path)
    sampler, learner, _ = sampler_of(config_of(cold, *flags, vllm()[1]), tmp_path)
    assert trainers_difference(learner, sampler.sample(1, Stopwatch()).sequences) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": []}, r"choices is \[\], not a list of at least 1 objects"),
        ({"token_ids": [-1, 31]}, "token_ids is .* not a list of whole numbers"),
        ({"token_ids": [10**400, 31]}, "not a list of whole numbers"),
        ({"token_ids": [30]}, "one number for each token"),
        ({"logprobs": {"token_logprobs": [3.0, -1.0]}}, "not a list of log-probabilities"),
        ({"logprobs": {"token_logprobs": [10**400, -1.0]}}, "not a list of log-probabilities"),
        ({"logprobs": {"token_logprobs": [-(10**400), -1.0]}}, "not a list of log-probabilities"),
        ({"model": "other"}, "the model is 'other', not m"),
    ],
)
def test_a_completion_is_read_with_distrust(tmp_path, change, message):
    server = VllmServer(None, None, None, tmp_path)
    server.name = "m"
    choice = {"token_ids": [30, 31], "logprobs": {"token_logprobs": [-1, -1.5]}}

    def read(change):
        reply = {"model": "m", "choices": [choice | change]} | change
        return server._tokens(Record(reply, Source("")))

    assert read({}) == [(30, -1.0), (31, -1.5)]
    with pytest.raises(InvalidRecord, match=message):
        read(change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": "Qwen/Qwen2.5-0.5B"}, "serves Qwen/Qwen2.5-0.5B, but --model is tiny"),
        ({"longest": 512}, "--max-length is 1536, but .* takes at most 512 tokens\n  Pass --max-length 512"),
        (
            {"updating": False},
            "vLLM cannot load .*: status 404.*\n  Start it with: VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        ),
    ],
)
def test_a_vllm_that_does_not_fit_is_refused(cold, tmp_path, vllm, options, message):
    with pytest.raises(R3LiteError, match=message):
        sampler_of(config_of(cold, "--rollout-server", vllm(**options)[1]), tmp_path)[0].sample(1, Stopwatch())


def test_an_adapter_is_written_beside_the_file_that_a_server_has_mapped(tmp_path):
    """To write over a mapped file would end the server's process with a bus error."""
    AdapterFiles(b"{}\0weights").write(tmp_path)
    with open(tmp_path / "adapter_model.safetensors", "rb") as mapped:
        AdapterFiles(b"{}\0others").write(tmp_path)
        assert mapped.read() == b"weights"
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == b"others" and len(list(tmp_path.iterdir())) == 2
