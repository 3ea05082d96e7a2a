"""Models that think, from reasoning traces to an answer: sft, ppo, evaluate, ask and serve on a Qwen3 and an R1.

The models are small and random. SFT teaches them one trace by heart, so that what is shown, scored and learned from is
known: a thought, then the answer `Oslo`.
"""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from r3lite import ask, evaluate, ppo, sft
from tests.cold_start import logged
from tests.protocols.test_chat_template import SPECIAL, TEMPLATES

CHATML = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
FAMILIES = {"qwen3": "qwen3", "r1": "qwen2"}
THINKS = {"qwen3": ["--thinking", "on"], "r1": []}  # what makes a model think
TAUGHT = "--dtype fp32 --max-steps 24 --batch-size 2 --learning-rate 2e-2 --lora-r 32 --validation-fraction 0"
ROUND = "--dtype fp32 --algorithm grpo --batch-size 2 --num-generations 4 --max-steps 1 --max-new-tokens 40 "
ROUND += "--retriever none --outcome-em 1 --format-reward 0 --process-recall 0 --lora-r 32"
ASKED = "--dtype fp32 --max-length 2000 --max-new-tokens 30"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def base(family, small_model, write_folder, tmp_path_factory) -> Path:
    """A model folder whose tokens are bytes and the two ends of a thought, as Qwen3 and R1 have them."""
    kind = {"qk_norm": True, "qkv_bias": False} if family == "qwen3" else {}
    folder = write_folder(small_model(**kind), tmp_path_factory.mktemp(family), model_type=FAMILIES[family])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = SPECIAL.get(family, CHATML)
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(end, special=False, normalized=False) for end in ("<think>", "</think>")])
    backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATES[family], "bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A config file with a source of traces."""
    folder = tmp_path_factory.mktemp("sources")
    rows = [{"question": f"Capital {i}?", "reasoning": "Norway.", "answer": "Oslo"} for i in range(8)]
    (folder / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = f'[[sources]]\nfile = {json.dumps(str(folder / "traces.jsonl"))}\ntype = "r1"\n'
    (folder / "sources.toml").write_text(source, encoding="utf-8")
    return folder / "sources.toml"


@pytest.fixture(scope="module")
def taught(family, base, sources, tmp_path_factory) -> Path:
    """The run folder of SFT on the traces."""
    output = tmp_path_factory.mktemp("taught") / "sft"
    flags = ["--model", str(base), "--config", str(sources), "--output", str(output), *THINKS[family]]
    assert sft.main([*TAUGHT.split(), *flags]) == 0
    assert logged(output, "metrics.jsonl")[-1]["loss"] < 0.2
    return output


@pytest.fixture(scope="module")
def trained(family, base, sources, taught, tmp_path_factory) -> Path:
    """The run folder of a round of GRPO from there."""
    output = tmp_path_factory.mktemp("trained") / "ppo"
    flags = ["--model", str(base), "--adapter", str(taught), "--config", str(sources), "--output", str(output)]
    assert ppo.main([*ROUND.split(), *flags, *THINKS[family]]) == 0
    return output


def test_a_round_of_rl_scores_what_follows_the_thought(trained):
    episodes = logged(trained, "episodes.jsonl")
    well_formed = [e for e in episodes if e["finish"] == "answered" and not e["steps"][0].get("faults")]
    assert len(episodes) == 8 and well_formed
    assert all(e["rewards"]["em"] == (e["prediction"] == "Oslo") for e in episodes)
    assert any(e["steps"][0]["analysis"] == "Norway." and e["prediction"] == "Oslo" for e in well_formed)
    assert not any("think>" in e["prediction"] for e in episodes)


def test_thoughts_to_train_on_where_they_are_switched_off_are_refused(family, base, sources, taught, tmp_path, capsys):
    """The template would end each thought before the reply begins: a row would have two, an episode no answer."""
    if family == "r1":
        pytest.skip("its template has no switch")
    flags = ["--model", str(base), "--config", str(sources), "--output", str(tmp_path / "run")]
    assert sft.main([*TAUGHT.split(), *flags]) == 1
    assert "thinking is off in the chat template\n  Pass --thinking on" in capsys.readouterr().err
    assert ppo.main([*ROUND.split(), *flags, "--adapter", str(taught), "--thinking", "off"]) == 1
    stderr = capsys.readouterr().err
    assert f"{taught} was trained on --thinking on (here auto)" in stderr and "\n  Pass --thinking on" in stderr


@pytest.mark.parametrize("thinking", ["on", "off", "auto"])
def test_a_question_is_answered_without_showing_the_thought(family, base, trained, tmp_path, capsys, thinking):
    """In steps, which the model was not taught; what it says instead is shown without its thought and is no answer."""
    (tmp_path / "questions.jsonl").write_text('{"id": "1", "question": "Capital 3?", "answer": "Oslo"}\n', "utf-8")
    (tmp_path / "prompt.txt").write_text("{question}", "utf-8")
    model = ["--model", str(base), "--adapter", str(trained), "--thinking", thinking, *ASKED.split()]
    model += ["--retriever", "none", "--init-prompt", str(tmp_path / "prompt.txt")]
    scored = ["--data", str(tmp_path / "questions.jsonl"), "--output", str(tmp_path / "evaluation")]
    codes = ask.main(["Capital 3?", *model]), evaluate.main([*scored, *model])
    stdout, stderr = capsys.readouterr()
    if (family, thinking) == ("r1", "off"):
        assert codes == (1, 1) and stderr.count("does not support --thinking off") == 2
        return
    assert codes == (0, 0) and stderr.count("was trained on chats without steps (here --format r3)") == 2
    assert ("--thinking on (here auto)" in stderr) == (family == "qwen3" and thinking != "on")
    if family == "r1" or thinking == "on":  # as it was taught
        assert stdout.startswith("Oslo\n\nno answer: step 1 does not open with `Step k:`")
    (row,) = logged(tmp_path / "evaluation", "predictions.jsonl")
    assert not any("Norway" in text or "think>" in text for text in (row["prediction"], row["steps"][0]["analysis"]))


def test_a_thought_that_is_cut_off_is_no_answer(family, base, trained, tmp_path, capsys):
    """The rest of the turn is the answer that is forced, after the end of the thought; see tests/protocols."""
    (tmp_path / "prompt.txt").write_text("{question}", "utf-8")
    model = ["--model", str(base), "--adapter", str(trained), *THINKS[family], *ASKED.split(), "--max-new-tokens", "4"]
    assert ask.main(["Capital 3?", *model, "--retriever", "none", "--init-prompt", str(tmp_path / "prompt.txt")]) == 0
    out = capsys.readouterr().out
    assert out.lstrip().startswith("The final answer:") and "Nor" not in out


def test_serve_answers_in_a_plain_chat(family, base, trained):
    served = ["--model", str(base), "--adapter", str(trained), "--retriever", "none", "--chat-style", "plain"]
    served += ["--rollout-batch-size", "2"]
    command = [sys.executable, "-m", "r3lite.serve", "--port", "0", *served, *ASKED.split(), *THINKS[family]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = next(line for line in process.stdout if "http://" in line).split()[0]
            complete, cut = (replied(f"{url}/v1/chat/completions", max_tokens) for max_tokens in (30, 4))
        finally:
            process.terminate()
    assert (complete["message"]["content"], complete["finish_reason"]) == ("Oslo", "stop")
    assert (cut["message"]["content"] or "", cut["finish_reason"]) == ("", "length")


def replied(url: str, max_tokens: int) -> dict:
    messages = [{"role": "user", "content": "Capital 3?"}]
    body = json.dumps({"model": "chat", "messages": messages, "max_tokens": max_tokens}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["choices"][0]
