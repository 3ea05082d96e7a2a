"""python -m r3lite.export: what is written is read by other programs' own readers, and says what the model said."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from r3lite import evaluate, export
from r3lite.assembly import exporter
from r3lite.assembly.exporter import parity
from r3lite.core.files import read_record, shipped
from r3lite.models import lora
from r3lite.models.tensor_files import read_tensors
from r3lite.models.weights import checkpoint_tensors, fingerprint, load_model, resolve_folder
from r3lite.protocols.tokenizer import Tokenizer

TEXTS = [
    "Who directed Blue Harbor?",
    "x = 1\n\n  don't, I'll 42 ünïcødé 漢字 🙂\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
]
TINY = ["--preset", "tiny", "--model", "tiny"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with an adapter that changes what the tiny model says."""
    folder = tmp_path_factory.mktemp("runs") / "sft"
    model = load_model(resolve_folder("tiny"), torch.float32, "cpu")
    torch.manual_seed(0)
    lora.add_adapter(model, "policy", 8, 16)
    for name, parameter in lora.adapter_parameters(model, "policy").items():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter) * 0.05
    lora.save_adapter(model, "policy", folder / "adapter", "tiny")
    (folder / "config.toml").write_text('[sft]\nmax_steps = 7\nlora_r = 8\nresume = "none"\n', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """Exports once for each form and kind of weights."""
    outputs = {}

    def write(form: str, weights: str):
        if (form, weights) not in outputs:
            output = tmp_path_factory.mktemp("out") / f"{form}-{weights}"
            flags = [*TINY, "--adapter", str(run), "--form", form, "--weights", weights, "--prompts", "6"]
            assert export.main([*flags, "--output", str(output)]) == 0
            outputs[form, weights] = output
        return outputs[form, weights]

    return write


def rows() -> torch.Tensor:
    return torch.randint(0, 1000, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def expected(run):
    """Logits of the base with the adapter, by transformers and peft."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(resolve_folder("tiny"), dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, run / "adapter")
    with torch.no_grad():
        return model(rows()).logits


def by_transformers(folder, **options) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        return model(rows()).logits


def test_the_folder_says_in_transformers_what_base_and_adapter_say(exported, expected):
    assert (by_transformers(exported("folder", "fp32")) - expected).abs().max() <= 1e-4
    assert (by_transformers(exported("folder", "bf16")) - expected).abs().max() <= 0.5
    config = read_record(exported("folder", "bf16") / "config.json", "")
    assert config.text("torch_dtype") == "bfloat16"


def test_shards_are_read_by_transformers(run, expected, tmp_path):
    flags = [*TINY, "--adapter", str(run), "--weights", "fp32", "--prompts", "3", "--max-shard-size", "2MB"]
    assert export.main([*flags, "--output", str(tmp_path / "x")]) == 0
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = sorted((tmp_path / "x").glob("*.safetensors"))
    assert len(files) > 2 and {f.name for f in files} == set(index["weight_map"].values())
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(f.stat().st_size < 2e6 + 1e4 for f in files)  # and a header
    one = load_model(tmp_path / "x", torch.float32, "cpu")
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in one.parameters())
    assert (by_transformers(tmp_path / "x") - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(("weights", "rslora"), [("fp32", False), ("fp32", True), ("fp16", False), ("bf16", False)])
def test_the_gguf_adapter_is_that_of_llama_cpps_converter(run, tmp_path, weights, rslora):
    """Names, keys and shapes as convert_lora_to_gguf writes them; what llama.cpp computes from them, by its formula, is
    what peft adds to a weight."""
    gguf, peft = pytest.importorskip("gguf"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": rslora}))
    flags = [*TINY, "--adapter", str(tmp_path / "run"), "--form", "gguf-adapter", "--weights", weights]
    assert export.main([*flags, "--prompts", "3", "--output", str(tmp_path / "x")]) == 0
    assert {p.name for p in (tmp_path / "x").iterdir()} == {"adapter.gguf", "README.md"}
    card = (tmp_path / "x" / "README.md").read_text(encoding="utf-8")
    assert "--lora adapter.gguf" in card and "A LoRA adapter of tiny" in card
    reader = gguf.GGUFReader(tmp_path / "x" / "adapter.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter" and fields["general.architecture"] == "qwen2"
    assert fields["adapter.type"] == "lora"
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    kinds = {t.tensor_type.name for t in reader.tensors}
    assert kinds == {{"fp32": "F32", "fp16": "F16", "bf16": "BF16"}[weights]}
    assert len(tensors) == 4 * 7 * 2  # layers, projections, A and B
    assert {"blk.0.attn_q.weight.lora_a", "blk.3.ffn_down.weight.lora_b"} <= tensors.keys()
    base = AutoModelForCausalLM.from_pretrained(resolve_folder("tiny"), dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")
    for name, module in {
        "attn_q": "self_attn.q_proj",
        "ffn_down": "mlp.down_proj",
        "attn_output": "self_attn.o_proj",
    }.items():
        layer = theirs.base_model.model.model.layers[2].get_submodule(module)
        a, b = (torch.tensor(tensors[f"blk.2.{name}.weight.lora_{side}"]) for side in "ab")
        delta = fields["adapter.lora.alpha"] / b.shape[1] * (b @ a)  # llama.cpp: alpha over the columns of B
        wanted = layer.get_delta_weight("default")
        close = 1e-6 if weights == "fp32" else 0.01
        assert (delta - wanted).norm() <= close * wanted.norm()


@pytest.mark.parametrize(("weights", "tolerance"), [("fp32", 0.0), ("bf16", 0.05)])
def test_the_adapter_alone_says_in_peft_what_it_said(run, expected, tmp_path, capsys, weights, tolerance):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = resolve_folder("tiny")
    output = tmp_path / "x"
    flags = ["--preset", "tiny", "--model", str(base), "--adapter", str(run), "--form", "adapter"]
    flags += ["--weights", weights, "--prompts", "3", "--output", str(output)]
    assert export.main([*flags, "--push", "me/mine"]) == 0
    stdout = capsys.readouterr().out
    assert "on 3 prompts" in stdout and {p.name for p in output.iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors"
    }  # fmt: skip
    assert "nothing was uploaded" in stdout and "adapter_model.safetensors" in stdout
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), output
    )
    with torch.no_grad():
        difference = (model(rows()).logits - expected).abs().mean()
    assert difference <= tolerance if tolerance else difference == 0
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "library_name: peft" in card and "A LoRA adapter of tiny, weights" in card and "--adapter FOLDER" in card
    if weights != "fp32":  # once is enough: it takes seconds
        return
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("base = 'tiny'", f"base = {str(base)!r}")
    done = subprocess.run([sys.executable, "-c", code], cwd=output, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Run folders of three adapters that differ in rank, scale and targets."""
    folder = tmp_path_factory.mktemp("seeds")
    model = load_model(resolve_folder("tiny"), torch.float32, "cpu")
    shapes = [{"r": 8, "alpha": 16}, {"r": 4, "alpha": 6, "rslora": True}, {"r": 2, "alpha": 2, "targets": ["v_proj"]}]
    for seed, shape in enumerate(shapes):
        name = f"seed-{seed}"
        torch.manual_seed(seed)
        lora.add_adapter(model, name, seed=seed, **shape)
        for key, parameter in lora.adapter_parameters(model, name).items():
            if "lora_B" in key:
                parameter.data = torch.randn_like(parameter) * 0.05
        lora.save_adapter(model, name, folder / name / "adapter", "tiny", fingerprint(resolve_folder("tiny")))
        text = f"[sft]\nmax_steps = 7\nseed = {seed}\n"
        (folder / name / "config.toml").write_text(text, encoding="utf-8")
    return [folder / name for name in ("seed-0", "seed-1", "seed-2")]


def test_the_average_says_in_peft_what_the_mean_of_the_dense_changes_says(seeds, tmp_path, capsys):
    """Averages of A and of B apart would be another model."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    output = tmp_path / "mean"
    average = ["--average", ",".join(map(str, seeds))]
    assert export.main([*TINY, *average, "--prompts", "2", "--output", str(output)]) == 0
    assert "logits differ by 0 on average" in capsys.readouterr().out
    config = read_record(output / "adapter_config.json", "").values
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (14, 28, "tiny")

    def base():
        return transformers.AutoModelForCausalLM.from_pretrained(resolve_folder("tiny"), dtype=torch.float32)

    # In fp64, as sums in another order differ by more than 1e-5 in fp32.
    dense = base().double()
    base_weights = dict(base().double().named_parameters())
    averaged = peft.PeftModel.from_pretrained(base(), output).double()
    with torch.no_grad():
        unchanged = dense(rows()).logits
        for seed in seeds:
            merged = peft.PeftModel.from_pretrained(base(), seed / "adapter").double().merge_and_unload()
            for name, weight in merged.named_parameters():
                dense.get_parameter(name).add_((weight - base_weights[name]) / 3)
        expected = dense(rows()).logits
        assert (averaged(rows()).logits - expected).abs().max() <= 1e-5
    assert (expected - unchanged).abs().max() > 0.1
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "The mean of 3 LoRA adapters of tiny" in card and "All were trained with: max_steps 7.\n" in card
    assert export.main([*TINY, *average, "--form", "folder", "--prompts", "0", "--output", str(tmp_path / "x")]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float64)
    with torch.no_grad():
        assert (merged(rows()).logits - expected).abs().max() <= 1e-5


def test_an_average_is_taken_by_other_commands(seeds, tmp_path, capsys):
    average = ["--average", ",".join(map(str, seeds[:2])), "--prompts", "0"]
    assert export.main([*TINY, *average, "--output", str(tmp_path / "mean")]) == 0
    data = ["--data", str(shipped("data", "world", "dev.jsonl")), "--limit", "1", "--max-new-tokens", "8"]
    flags = [*TINY, *data, "--adapter", str(tmp_path / "mean"), "--baseline", "closed-book"]
    assert evaluate.main([*flags, "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "scores.json").exists() and "warning" not in capsys.readouterr().err


def test_an_average_of_adapters_of_other_formats_is_warned_of(seeds, run, tmp_path, capsys):
    shutil.copytree(seeds[0], tmp_path / "tags")
    (tmp_path / "tags" / "config.toml").write_text('[sft]\nformat = "tags"\n', encoding="utf-8")
    average = ["--average", f"{seeds[1]},{tmp_path / 'tags'}", "--prompts", "0"]
    assert export.main([*TINY, *average, "--output", str(tmp_path / "mean")]) == 0
    assert f"warning: {tmp_path / 'tags'} was trained on --format tags (here r3)" in capsys.readouterr().err


def test_nf4_is_read_back_by_r3lite(exported, expected):
    model = load_model(exported("folder", "nf4"), torch.float32, "cpu")
    with torch.no_grad():
        logits = model.logits(model(rows()))
        merged = load_model(exported("folder", "fp32"), torch.float32, "cpu", quantize=True)
        assert torch.equal(logits, merged.logits(merged(rows())))
    # Without the adapter they would be 0.53 away, and without NF4 not at all.
    assert 0.01 < (logits - expected).abs().mean() < 0.5


def test_layers_of_an_nf4_base_without_an_adapter_are_written_dense_and_rounded_once(exported, tmp_path):
    """They were written in fp32, from an absmax that had been rounded to bf16."""
    base = exported("folder", "nf4")
    model = load_model(base, torch.float32, "cpu")
    lora.add_adapter(model, "policy", 4, 8, targets=["v_proj"])
    lora.save_adapter(model, "policy", tmp_path / "adapter", str(base))
    flags = ["--preset", "tiny", "--model", str(base), "--adapter", str(tmp_path / "adapter"), "--prompts", "0"]
    assert export.main([*flags, "--weights", "bf16", "--output", str(tmp_path / "out")]) == 0
    tensors = read_tensors(tmp_path / "out" / "model.safetensors")
    wanted = checkpoint_tensors(model)
    assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[n], wanted[n].bfloat16()) for n in tensors)


@pytest.mark.parametrize(("weights", "tolerance"), [("fp32", 1e-4), ("fp16", 0.02), ("bf16", 0.5), ("q8_0", 0.5)])
def test_the_gguf_file_says_in_transformers_what_base_and_adapter_say(exported, expected, weights, tolerance):
    pytest.importorskip("gguf")
    logits = by_transformers(exported("gguf", weights), gguf_file="model.gguf")
    assert (logits - expected).abs().max() <= tolerance


def test_the_tokenizer_of_the_gguf_file_gives_the_same_tokens(exported):
    gguf = pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    folder, ours = exported("gguf", "fp32"), Tokenizer.load(resolve_folder("tiny"))
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    for text in TEXTS[:2]:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    reader = gguf.GGUFReader(folder / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    record = read_record(resolve_folder("tiny") / "tokenizer.json", "")
    by_id = {id: token for token, id in record.record("model").record("vocab").values.items()}
    added = {token.whole("id"): token.text("content") for token in record.records("added_tokens")}
    names = [(by_id | added).get(i, f"[PAD{i}]") for i in range(1024)]
    assert fields["tokenizer.ggml.tokens"] == names and len(added) == 3
    kinds = fields["tokenizer.ggml.token_type"]
    assert all(kinds[i] == gguf.TokenType.CONTROL for i in added) and kinds[5] == gguf.TokenType.NORMAL
    assert fields["tokenizer.ggml.eos_token_id"] == 1023 and fields["tokenizer.ggml.pre"] == "qwen2"
    assert fields["tokenizer.ggml.add_bos_token"] is False and fields["general.architecture"] == "qwen2"
    template = read_record(resolve_folder("tiny") / "tokenizer_config.json", "").text("chat_template")
    assert fields["tokenizer.chat_template"] == template


def test_norms_and_biases_stay_in_fp32(exported):
    gguf = pytest.importorskip("gguf")
    tensors = {t.name: t for t in gguf.GGUFReader(exported("gguf", "q8_0") / "model.gguf").tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert (
        kinds["blk.0.attn_norm.weight"] == kinds["blk.3.attn_q.bias"] == "F32" and kinds["token_embd.weight"] == "Q8_0"
    )
    assert "output.weight" not in kinds  # tied to the embedding


def test_parity_by_hand(exported, run, tmp_path, capsys):
    logits_before = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    logits_after = torch.tensor([[1.5, 2.0], [0.0, 1.0]])
    assert parity(logits_before, logits_after) == (3.0, pytest.approx(4.5 / 4), 1)
    flags = [*TINY, "--adapter", str(run), "--weights", "fp32", "--prompts", "3", "--output", str(tmp_path / "x")]
    assert export.main(flags) == 0
    stdout = capsys.readouterr().out
    largest = float(re.search(r"average, (\S+) at most; the most likely next token is the same for 3\n", stdout)[1])
    assert 0 < largest < 1e-4 and "on 3 prompts: " in stdout


def test_the_cards_snippet_works_in_its_folder(exported):
    pytest.importorskip("transformers")
    folder = exported("folder", "fp32")
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "max_steps 7, lora_r 8" in card and "resume" not in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_scores_and_licence_are_in_the_card(run, tmp_path):
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    scores = {
        "n": 9,
        "em": {"value": 0.5, "low": 0.25, "high": 0.75},
        "combined": {"value": None, "low": None, "high": None},
    }
    (evaluation / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
    flags = [*TINY, "--adapter", str(run), "--prompts", "0", "--evaluation", str(evaluation), "--license", "mit"]
    assert export.main([*flags, "--output", str(tmp_path / "x")]) == 0
    card = (tmp_path / "x" / "README.md").read_text(encoding="utf-8")
    assert "| exact match | 0.500 | 0.250 | 0.750 |" in card and "On 9 questions" in card and "| combined" not in card
    assert card.startswith("---\nlibrary_name: transformers\nlicense: mit\n")


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--output", "x", "--form", "adapter"], 2, "--adapter is missing"),
        (["--adapter", "RUN"], 2, "--output is missing"),
        (["--adapter", "RUN", "--output", "x", "--weights", "q8_0"], 2, "q8_0 needs --form gguf"),
        (["--adapter", "RUN", "--output", "x", "--weights", "nf4", "--form", "gguf"], 2, "nf4 needs --form folder"),
        (["--adapter", "RUN", "--output", "x", "--weights", "q8_0", "--form", "gguf-adapter"], 2, "q8_0 needs --form"),
        (["--adapter", "RUN", "--output", "x", "--max-shard-size", "5"], 2, "--max-shard-size 5 is not an amount"),
        (["--adapter", "nowhere", "--output", "x"], 1, "nowhere"),
        (["--adapter", "RUN", "--average", "a,b", "--output", "x"], 2, "--adapter and --average are both given"),
        (["--average", "a", "--output", "x"], 2, "--average has one adapter only"),
        (["--average", "nowhere,elsewhere", "--output", "x"], 1, "nowhere"),
        (["--adapter", "RUN", "--output", "TAKEN"], 1, "already exists"),
        (["--adapter", "RUN", "--output", "x", "--evaluation", "nowhere"], 1, "--evaluation nowhere: no such folder"),
    ],
)
def test_what_is_refused_writes_nothing(run, tmp_path, monkeypatch, capsys, flags, status, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    flags = [{"RUN": str(run), "TAKEN": "taken"}.get(flag, flag) for flag in flags]
    assert export.main([*TINY, *flags]) == status
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("form", "weights"), [("folder", "fp32"), ("folder", "nf4"), ("gguf", "q8_0"), ("adapter", "fp32")]
)
def test_what_was_killed_is_not_there_and_the_same_command_writes_it(run, tmp_path, monkeypatch, form, weights):
    """A kill before the card left a folder that looked like an export, and that the same command then refused."""
    pytest.importorskip("gguf")
    flags = [*TINY, "--adapter", str(run), "--form", form, "--weights", weights, "--prompts", "0"]
    output = ["--output", str(tmp_path / "x")]

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(exporter, "card", killed)
        patched.setattr(exporter.shutil, "rmtree", lambda *_, **__: None)  # as a kill would leave it
        assert export.main([*flags, *output]) == 130
    assert not (tmp_path / "x").exists() and list(tmp_path.iterdir())
    assert export.main([*flags, *output]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x" / "README.md").exists()


def test_a_full_disk_ends_a_gguf_file_with_one_message(run, tmp_path, monkeypatch, capsys):
    """NumPy's error of it has neither number nor path, and was taken for a bug."""
    gguf = pytest.importorskip("gguf")

    def full(writer):
        raise OSError("139264 requested and 46816 written")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    flags = [*TINY, "--adapter", str(run), "--form", "gguf", "--prompts", "0", "--output", str(tmp_path / "x")]
    assert export.main(flags) == 1
    assert re.search(r"model\.gguf: .*46816 written\n  Check the disk space", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_the_adapter_of_another_base_is_refused(run, tmp_path, capsys):
    """Merged into other weights it would say nothing of what it learned."""
    model, folder = load_model(resolve_folder("tiny"), torch.float32, "cpu"), tmp_path / "adapter"
    lora.load_adapter(model, "policy", run, trainable=False)
    lora.save_adapter(model, "policy", folder, "other", "0123456789abcdef")
    assert export.main([*TINY, "--adapter", str(folder), "--prompts", "0", "--output", str(tmp_path / "x")]) == 1
    assert "was trained on another base: other" in capsys.readouterr().err and not (tmp_path / "x").exists()
