"""Where base, tokenizer, lengths and adapter meet: what does not fit is refused in every command; the kept NF4 copy."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3lite import evaluate, ppo, sft
from r3lite.assembly import policy
from r3lite.core.files import shipped, sole_writer
from r3lite.devices.precision import Precision
from r3lite.models import lora, weights
from r3lite.models.config_file import is_nf4
from r3lite.settings import OptimizerSettings
from r3lite.training import optim
from tests.errors import shows
from tests.lfm2_models import in_file, switches

QUESTIONS = ["--data", str(shipped("data", "world", "train.jsonl")), "--limit", "2", "--encoder", "hashing"]
TINY = ["--preset", "tiny", "--device", "cpu"]


@pytest.fixture
def base(tmp_path):
    """A copy of the tiny checkpoint."""
    return shutil.copytree(shipped("checkpoints", "tiny"), tmp_path / "base")


@pytest.fixture
def commands(tmp_path, base):
    """The three commands that run a model, each with its arguments."""
    row = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann Lee. " * 200}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "1", **row}) + "\n")
    here = [*TINY, "--model", str(base), "--output", str(tmp_path / "out")]
    rows = ["--data", str(tmp_path / "rows.jsonl"), "--validation-fraction", "0"]
    learn = [*QUESTIONS, "--batch-size", "1", "--num-generations", "2"]
    return {
        "sft": (sft.main, [*here, *rows, "--max-steps", "1"]),
        "ppo": (ppo.main, [*here, *learn, "--max-steps", "1"]),
        "evaluate": (evaluate.main, [*here, *QUESTIONS]),
    }


def test_lora_plus_by_hand():
    """AdamW's first step is the learning rate, whatever the gradient's size: 0.01 for A, 16 times as much for B."""
    named = {f"x.lora_{m}.weight": torch.nn.Parameter(torch.ones(2)) for m in "AB"}
    for ratio, groups in ((1.0, 1), (16.0, 2)):
        param_groups = policy._adapter_groups(named, OptimizerSettings(learning_rate=0.01, lora_plus_ratio=ratio))
        assert len(param_groups) == groups and optim.parameters(optim.adamw(param_groups, 0.0)).keys() == named.keys()
    optimizer = optim.adamw(param_groups, 0.0)
    optim.set_rate(optimizer, 0.5)
    assert optim.current_rate(optimizer) == 0.005  # what is logged is A's
    sum((p * torch.tensor([3.0, -1e-3])).sum() for p in named.values()).backward()
    optimizer.step()
    assert named["x.lora_A.weight"].tolist() == pytest.approx([0.995, 1.005], abs=1e-6)
    assert named["x.lora_B.weight"].tolist() == pytest.approx([0.92, 1.08], abs=1e-5)


def test_sft_gives_b_its_own_rate(tmp_path, commands):
    """B begins at 0, and its first step is as many times as long."""
    main, arguments = commands["sft"]
    adapters = []
    for ratio in ("1", "4"):
        out = tmp_path / f"ratio-{ratio}"
        assert main([*arguments, "--output", str(out), "--lora-plus-ratio", ratio, "--dtype", "fp32"]) == 0
        adapters.append(load_file(out / "adapter" / "adapter_model.safetensors"))
    for name, one in adapters[0].items():
        assert torch.allclose(adapters[1][name], one * (4 if "lora_B" in name else 1), rtol=1e-4, atol=1e-9)
        assert one.abs().sum() > 0


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, change):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def add_one(name):
    return lambda tensors: tensors[name].add_(1)


def refused(capsys, command, *extra_flags) -> str:
    main, arguments = command
    assert main([*arguments, *extra_flags]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and "stopped: " in error
    return error.partition("stopped: ")[2]


def write_adapter(base, folder, **shape):
    model = weights.load_model(base, torch.float32, "cpu")
    lora.add_adapter(model, "a", **({"r": 4, "alpha": 8.0} | shape))
    lora.save_adapter(model, "a", folder, "the/first-base", weights.fingerprint(base))
    return str(folder)


@pytest.mark.parametrize("name", ["sft", "ppo", "evaluate"])
def test_token_ids_without_a_row_in_the_embedding_are_refused(base, commands, capsys, name):
    """They were an IndexError in the middle of the run."""
    change_config(base, vocab_size=1000)
    error = refused(capsys, commands[name])
    assert shows(error, "tokenizer-beyond-embedding", base, "1023", "vocab_size in config.json is 1000")


@pytest.mark.parametrize("name", ["sft", "ppo", "evaluate"])
def test_rows_longer_than_the_model_was_made_for_are_refused(base, commands, capsys, name):
    """max_position_embeddings was ignored."""
    change_config(base, max_position_embeddings=500)
    error = refused(capsys, commands[name])
    assert "max_position_embeddings in" in error and "config.json is 500\n" in error
    assert shows(error, "rows-beyond-positions", "500")


@pytest.mark.parametrize("name", ["sft", "ppo", "evaluate"])
def test_the_adapter_of_another_base_is_refused(base, commands, tmp_path, capsys, name):
    adapter = write_adapter(base, tmp_path / "adapter")
    first = weights.fingerprint(base)
    change_weights(base, add_one("model.layers.2.mlp.up_proj.weight"))
    error = refused(capsys, commands[name], "--adapter", adapter)
    assert f"trained on another base: the/first-base with the fingerprint {first}" in error
    assert shows(error, "base-differs", base, weights.fingerprint(base))


def test_the_adapter_of_a_run_has_the_fingerprint_of_its_base_and_goes_on(base, commands, tmp_path):
    main, arguments = commands["sft"]
    assert main(arguments) == 0
    assert lora.read_base(tmp_path / "out") == (str(base), weights.fingerprint(base))
    # Of the preset's rank, which is not the default: it was not asked for, and neither is refused.
    assert main([*arguments, "--adapter", str(tmp_path / "out"), "--output", str(tmp_path / "more")]) == 0
    other_adapter = write_adapter(base, tmp_path / "other", r=4)
    assert main([*arguments, "--adapter", other_adapter, "--output", str(tmp_path / "third")]) == 0
    assert lora.read_adapter_config(tmp_path / "third").r == 4


def test_an_adapter_without_a_fingerprint_is_taken(base, commands, tmp_path):
    """As PEFT and earlier versions write them."""
    adapter = tmp_path / "adapter"
    write_adapter(base, adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    change_weights(base, add_one("model.norm.weight"))
    main, arguments = commands["sft"]
    assert main([*arguments, "--adapter", str(adapter)]) == 0


@pytest.mark.parametrize("name", ["sft", "ppo"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora-r", "8"], "--lora-r is 8, but the adapter {} has 4"),
        (["--lora-alpha", "16"], "--lora-alpha is 16.0, but the adapter {} has 8.0"),
        (["--lora-dropout", "0.1"], "--lora-dropout is 0.1, but the adapter {} has 0.0"),
        (["--lora-targets", "q_proj,v_proj"], "--lora-targets is ('q_proj', 'v_proj'), but the adapter {} has"),
        (["--rslora"], "--rslora is True, but the adapter {} has False"),
    ],
)
def test_another_shape_beside_an_adapter_is_refused(base, commands, tmp_path, capsys, name, flags, words):
    """It was ignored in silence."""
    adapter = write_adapter(base, tmp_path / "adapter")
    if (name, flags[0]) == ("ppo", "--lora-dropout"):  # which has no use for it at all
        main, arguments = commands[name]
        assert main([*arguments, "--adapter", adapter, *flags]) == 2
        assert shows(capsys.readouterr().err, "setting-unused", "--lora-dropout", "0.1")
        return
    error = refused(capsys, commands[name], "--adapter", adapter, *flags)
    assert words.format(adapter) in error
    assert shows(error, "adapter-setting-differs")


def test_the_same_shape_beside_an_adapter_is_taken(base, commands, tmp_path):
    adapter = write_adapter(base, tmp_path / "adapter", targets=["q_proj", "v_proj"])
    main, arguments = commands["sft"]
    lora_flags = ["--lora-r", "4", "--lora-alpha", "8", "--lora-targets", "v_proj,q_proj"]
    assert main([*arguments, "--adapter", adapter, *lora_flags]) == 0


def test_the_same_partial_targets_are_taken_where_one_layer_is_several_projections(
    base, commands, tmp_path, capsys, small_model, write_folder
):
    """A convolution of LFM2 is adapted with q_proj. It was taken for k_proj and v_proj too, and q_proj was refused."""
    sizes = {"vocab_size": 1024, "max_position_embeddings": 4096}
    write_folder(small_model(**sizes, **switches(3)), base, **in_file(3))
    main, arguments = commands["sft"]
    targets = ["--lora-targets", "q_proj,down_proj"]
    assert main([*arguments, *targets]) == 0
    first = tmp_path / "out"
    assert lora.read_adapter_config(first).targets == ("q_proj", "in_proj", "w2")
    onward = ["--adapter", str(first), "--output"]
    assert main([*arguments, *onward, str(tmp_path / "onward"), *targets]) == 0
    other_targets = ["--lora-targets", "q_proj,v_proj,down_proj"]
    error = refused(capsys, commands["sft"], *onward, str(tmp_path / "other"), *other_targets)
    assert shows(error, "adapter-setting-differs", "('q_proj', 'in_proj', 'w2')")


def loads(base, cache):
    """The folders of NF4 weights that the cache holds after a start."""
    model = policy.load_frozen(base, Precision(torch.float32, torch.device("cpu")), True, str(cache))
    assert model.config.rope_theta == json.loads((base / "config.json").read_text())["rope_theta"]
    return sorted(path.name for path in cache.iterdir())


def change_in_place(folder):
    """Changes a weight file but neither its size nor its time."""
    stat_before = (folder / "model.safetensors").stat()
    change_weights(folder, add_one("model.layers.3.self_attn.q_proj.weight"))
    assert (folder / "model.safetensors").stat().st_size == stat_before.st_size
    os.utime(folder / "model.safetensors", ns=(stat_before.st_atime_ns, stat_before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: change_config(folder, rope_theta=5.0),
        lambda folder: change_config(folder, rms_norm_eps=1e-5),
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
        lambda folder: (folder / "chat_template.jinja").write_text("x"),
        lambda folder: change_weights(folder, add_one("model.norm.weight")),
        change_in_place,
    ],
)
def test_kept_nf4_weights_are_not_used_after_their_source_changed(base, tmp_path, change):
    """They were after config.json or the tokenizer had changed."""
    folders = loads(base, tmp_path / "cache")
    assert len(folders) == 1 and is_nf4(tmp_path / "cache" / folders[0])
    assert loads(base, tmp_path / "cache") == folders
    change(base)
    assert len(loads(base, tmp_path / "cache")) == 2


def test_what_a_kill_left_of_nf4_weights_goes_and_another_process_may_be_writing_them(base, tmp_path, capsys):
    """Each kill while they were written left a hidden folder as large as they are, for good."""
    (name,) = loads(base, tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache" / name)
    (tmp_path / "cache" / f".{name}.17.part").mkdir()
    assert loads(base, tmp_path / "cache") == [name]
    shutil.rmtree(tmp_path / "cache" / name)
    with sole_writer(tmp_path / "cache" / name, folder=False):  # a lock is of a descriptor, also within one process
        assert loads(base, tmp_path / "cache") == [f".{name}.lock"]
    assert "cannot cache the quantized weights in " in (error := capsys.readouterr().err) and "another process" in error


def test_an_adapter_fits_its_base_whether_in_nf4_or_not(base, tmp_path):
    loads(base, tmp_path / "cache")
    (nf4_folder,) = (tmp_path / "cache").iterdir()
    assert weights.fingerprint(nf4_folder) == weights.fingerprint(base)
