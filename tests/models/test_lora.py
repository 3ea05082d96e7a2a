"""Adapters: arithmetic, switching, PEFT's adapters in ours and ours in PEFT, merging."""

import math

import pytest
import torch

from r3lite.models.lora import (
    PROJECTIONS,
    LoraLinear,
    adapter_parameters,
    add_adapter,
    add_mean,
    cast_once,
    load_adapter,
    merge_adapter,
    remove_adapter,
    save_adapter,
    set_adapter,
    switch_of,
    use_adapter,
)
from r3lite.models.saving import save_merged
from r3lite.models.weights import fingerprint, load_model

IDS = torch.arange(5, 45)[None]


def shaken(model, name: str, seed: int = 1):
    """Gives an adapter weights that matter: a fresh one has B = 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(model, name).values():
        parameter.data.normal_(0, 0.05, generator=generator)


@torch.no_grad()
def logits(model, name=None):
    with use_adapter(model, name):
        return model.logits(model(IDS))


def test_one_layer_by_hand():
    base = torch.nn.Linear(2, 2).requires_grad_(False)
    base.weight.data, base.bias.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 0.0])
    model = torch.nn.Module()
    model.q_proj = base
    add_adapter(model, "a", r=1, alpha=3, targets=["q_proj"])
    model.q_proj.lora_A["a"].data = torch.tensor([[1.0, -1.0]])
    model.q_proj.lora_B["a"].data = torch.tensor([[2.0], [0.0]])
    x = torch.tensor([[3.0, 1.0]])
    assert model.q_proj(x).tolist() == [[5.5, 13.0]]
    with use_adapter(model, "a"):  # A x = 2, B A x = [4, 0], times 3
        assert model.q_proj(x).tolist() == [[17.5, 13.0]]


def test_a_fresh_adapter_changes_nothing_and_is_of_peft_s_size(small_model):
    model = small_model()
    base_logits = logits(model)
    add_adapter(model, "policy", 8, 16, seed=3)
    assert torch.equal(logits(model, "policy"), base_logits)
    parameters = adapter_parameters(model, "policy")
    assert len(parameters) == 3 * 7 * 2
    assert all(p.requires_grad and p.dtype == torch.float32 for p in parameters.values())
    a = parameters["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"]
    assert a.shape == (8, 96) and 0.9 / math.sqrt(96) < a.abs().max() <= 1 / math.sqrt(96)  # kaiming, a = sqrt(5)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if ".lora_" in n
    }
    second_model = small_model()
    add_adapter(second_model, "policy", 8, 16, seed=3)
    assert all(torch.equal(p, parameters[k]) for k, p in adapter_parameters(second_model, "policy").items())


def test_a_mean_by_hand():
    """Of adapters that differ in rank, scale and targets."""
    model = torch.nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        linear = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
        linear.weight.data = torch.zeros(2, 2)
        model.add_module(name, linear)
    add_adapter(model, "a", r=1, alpha=3, targets=["q_proj"])
    model.q_proj.lora_A["a"].data = torch.tensor([[1.0, -1.0]])
    model.q_proj.lora_B["a"].data = torch.tensor([[2.0], [0.0]])  # 3 B A = [[6, -6], [0, 0]]
    add_adapter(model, "b", r=4, alpha=4, dropout=0.1, targets=["q_proj", "k_proj"], rslora=True)
    for layer in (model.q_proj, model.k_proj):
        layer.lora_A["b"].data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [5.0, 5.0]])
        layer.lora_B["b"].data = torch.tensor([[0.0, 1.0, 7.0, 0.0], [1.0, 0.0, 7.0, 0.0]])  # 2 B A = [[0, 2], [2, 0]]
    add_mean(model, "mean", ["a", "b"])
    config = switch_of(model).configs["mean"]
    assert (config.r, config.scale, config.targets) == (5, 3, ("q_proj", "k_proj"))
    assert (config.dropout, config.rslora, switch_of(model).active) == (0, False, None)
    assert not any(parameter.requires_grad for parameter in adapter_parameters(model, "mean").values())
    merge_adapter(model, "mean")
    torch.testing.assert_close(model.q_proj.base.weight.data, torch.tensor([[3.0, -2.0], [1.0, 0.0]]))
    torch.testing.assert_close(model.k_proj.base.weight.data, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    assert isinstance(model.v_proj, torch.nn.Linear)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 16 / 4), (True, 16 / 2)])
def test_scale(small_model, rslora, scale):
    model = small_model()
    add_adapter(model, "a", 4, 16, rslora=rslora)
    shaken(model, "a")
    expected = small_model()
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            expected.get_submodule(path).weight.data += scale * module.lora_B["a"] @ module.lora_A["a"]
    assert (logits(model, "a") - logits(expected)).abs().max() < 1e-4


@pytest.mark.parametrize("target", PROJECTIONS)
def test_each_projection_can_have_one_alone(small_model, target):
    model = small_model()
    base_logits = logits(model)
    add_adapter(model, "a", 2, 4, targets=[target])
    shaken(model, "a")
    assert {key.split(".")[-3] for key in adapter_parameters(model, "a")} == {target}
    assert not torch.allclose(logits(model, "a"), base_logits)


def test_adapters_are_switched_and_switched_back(small_model):
    model = small_model()
    add_adapter(model, "policy", 4, 8)
    add_adapter(model, "reference", 2, 4, targets=["q_proj", "up_proj"])
    shaken(model, "policy", 1), shaken(model, "reference", 2)
    base, policy, reference = logits(model), logits(model, "policy"), logits(model, "reference")
    assert not torch.equal(policy, reference) and not torch.equal(base, reference)
    set_adapter(model, "policy")
    with use_adapter(model, "reference"):
        assert torch.equal(model.logits(model(IDS)), reference)
        with use_adapter(model, None):
            assert torch.equal(model.logits(model(IDS)), base)
        with pytest.raises(ZeroDivisionError), use_adapter(model, "policy"):
            _ = 1 / 0
        assert torch.equal(model.logits(model(IDS)), reference)
    assert torch.equal(model.logits(model(IDS)), policy)
    with pytest.raises(AssertionError, match="no adapter is named 'polcy'"):
        use_adapter(model, "polcy")
    remove_adapter(model, "policy")
    assert torch.equal(logits(model, "reference"), reference)
    assert torch.equal(model.logits(model(IDS)), base)
    remove_adapter(model, "reference")
    assert not any(isinstance(m, LoraLinear) for m in model.modules())


def test_what_is_looked_up_once_is_that_of_the_adapter_that_is_on(small_model):
    """Within `cast_once` switching, dropout and other adapters count as ever; after it, so do changed weights."""
    model = small_model()
    for seed, name in enumerate(("policy", "other")):
        add_adapter(model, name, 4, 8, dropout=0.5)
        shaken(model, name, seed)
    names = ("policy", None, "other", "policy")
    model.eval()
    expected = {name: logits(model, name) for name in names}
    with cast_once(model, torch.float32):
        assert all(torch.equal(logits(model, name), expected[name]) for name in names)
        assert not torch.equal(logits(model.train(), "policy"), expected["policy"])
        add_adapter(model, "third", 2, 4, targets=["k_proj"])
        shaken(model, "third")
        third = logits(model.eval(), "third")
        with cast_once(model, torch.float32):
            assert torch.equal(logits(model, "third"), third)
        remove_adapter(model, "third")
        assert all(torch.equal(logits(model, name), expected[name]) for name in names)
    shaken(model, "policy", 7)
    for name, parameter in adapter_parameters(model, "other").items():  # as another tensor
        layer = model.get_submodule(name.removeprefix("base_model.model.").rpartition(".lora_")[0])
        side = layer.lora_A if ".lora_A." in name else layer.lora_B
        side["other"] = torch.nn.Parameter(parameter.detach() * 2)
    assert torch.equal(logits(model), expected[None])
    changed = {name: logits(model, name) for name in ("policy", "other")}
    with cast_once(model, torch.float32):
        for name, changed_logits in changed.items():
            assert torch.equal(logits(model, name), changed_logits) and not torch.equal(changed_logits, expected[name])


@torch.no_grad()
@pytest.mark.parametrize("targets", [PROJECTIONS, ["v_proj", "up_proj"]])  # the latter are not the first of their stack
def test_an_adapter_that_is_cast_once_gives_the_same_to_the_bit(small_model, targets):
    model = small_model().to(torch.bfloat16)
    add_adapter(model, "a", 4, 8, targets=targets)
    shaken(model, "a")
    with use_adapter(model, "a"), torch.autocast("cpu", torch.bfloat16):
        expected = model(IDS)
        with cast_once(model, torch.bfloat16):
            assert torch.equal(model(IDS), expected)
            stacks = switch_of(model).stacks.values()
            casts = [B.dtype for stack in stacks for A, Bs in stack.casts.values() for B in Bs]
            assert set(casts) == {torch.bfloat16} and len(casts) == len(targets) * model.config.num_hidden_layers
        for parameter in adapter_parameters(model, "a").values():
            parameter.mul_(2)
        assert not torch.equal(model(IDS), expected)  # nothing of it is left


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_for_few_rows_products_are_in_fp32(rows):
    """Without gradients: the adapter's part is rounded once; for more rows, and in training, it is of half products."""
    model = torch.nn.Sequential()
    model.add_module("q_proj", torch.nn.Linear(512, 256, bias=False, dtype=torch.bfloat16).requires_grad_(False))
    torch.nn.init.zeros_(model.q_proj.weight)  # so that the adapter is all there is
    add_adapter(model, "a", 4, 8, targets=["q_proj"])
    shaken(model, "a")
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    A, B = adapter_parameters(model, "a").values()
    exact = (2 * (x.double() @ A.double().t() @ B.double().t())).to(torch.bfloat16)
    with use_adapter(model, "a"), cast_once(model, torch.bfloat16):
        learning = model(x).detach()
        with torch.no_grad():
            sampling = model(x)
    assert torch.equal(sampling, learning) == (rows == 9)
    assert ((sampling == exact).float().mean() > 0.99) == (rows < 9)
    assert torch.nn.functional.cosine_similarity(sampling.float(), exact.float(), dim=-1).min() > 0.999


def test_only_the_adapter_that_is_on_gets_gradients(small_model):
    model = small_model()
    add_adapter(model, "policy", 4, 8)
    add_adapter(model, "other", 4, 8)
    shaken(model, "policy")
    with use_adapter(model, "policy"):
        model(IDS).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapter_parameters(model, "policy").values())
    assert all(p.grad is None for p in adapter_parameters(model, "other").values())
    assert all(p.grad is None for n, p in model.named_parameters() if ".lora_" not in n)


def test_dropout_is_for_training_only_and_from_the_global_stream(small_model):
    model = small_model()
    add_adapter(model, "a", 4, 8, dropout=0.5)
    shaken(model, "a")
    still = logits(model.eval(), "a")
    assert torch.equal(logits(model, "a"), still)
    model.train()
    torch.manual_seed(0)
    first = logits(model, "a")
    second = logits(model, "a")
    torch.manual_seed(0)
    assert torch.equal(logits(model, "a"), first)
    assert not torch.equal(first, second) and not torch.equal(first, still)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [True, False])
def test_narrow_bases_with_wide_adapters(small_model, dtype, autocast):
    """The base is in half precision, the adapter in fp32: with autocast, as in training, and without."""
    exact = small_model()
    add_adapter(exact, "a", 4, 8)
    shaken(exact, "a")
    model = small_model().to(dtype)
    add_adapter(model, "a", 4, 8)
    shaken(model, "a")
    with torch.autocast("cpu", dtype, enabled=autocast), use_adapter(model, "a"):
        hidden = model(IDS)
        hidden.float().square().mean().backward()
    with use_adapter(exact, "a"):
        assert torch.nn.functional.cosine_similarity(hidden.float(), exact(IDS), dim=-1).min() > 0.99
    for parameter in adapter_parameters(model, "a").values():
        assert parameter.dtype == parameter.grad.dtype == torch.float32 and torch.isfinite(parameter.grad).all()


def peft_model(folder, **config):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


ADAPTERS = {
    "all seven": {"r": 8, "lora_alpha": 16, "target_modules": list(PROJECTIONS)},
    "rslora": {"r": 4, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    "all-linear": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "lora_dropout": 0.1},
    "all but some": {"r": 2, "target_modules": list(PROJECTIONS), "exclude_modules": ["o_proj", "up_proj"]},
    "all but a pattern": {"r": 2, "target_modules": "all-linear", "exclude_modules": ".*mlp.*"},
    "a pattern": {"r": 2, "target_modules": r".*\.(q_proj|mlp\.down_proj)"},
    "paths": {"r": 2, "target_modules": [f"model.layers.{i}.self_attn.k_proj" for i in range(3)]},
    "ends of paths": {"r": 2, "target_modules": ["self_attn.v_proj", "down_proj", "c_attn"]},
    "all layers by number": {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [0, 1, 2]},
    "eva": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "eva"},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_peft_in_ours(small_model, write_folder, tmp_path, name):
    folder = write_folder(small_model(), tmp_path / "base")
    theirs = peft_model(folder, **ADAPTERS[name])
    theirs.save_pretrained(tmp_path / "adapter")
    model = load_model(folder, torch.float32, "cpu")
    load_adapter(model, "a", tmp_path, trainable=False)  # found in the folder's adapter/, as a run has it
    assert not any(p.requires_grad for p in model.parameters())
    assert (logits(model, "a") - theirs(IDS).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("layers", [1, 2])
def test_what_peft_writes_for_a_small_model_is_read(small_model, write_folder, tmp_path, layers):
    """Below 20 linear layers "all-linear" is written as their paths, which were refused."""
    folder = write_folder(small_model(num_hidden_layers=layers), tmp_path / "base")
    theirs = peft_model(folder, target_modules="all-linear")
    theirs.save_pretrained(tmp_path / "adapter")
    model = load_model(folder, torch.float32, "cpu")
    load_adapter(model, "a", tmp_path, trainable=False)
    assert (logits(model, "a") - theirs(IDS).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("rslora", [False, True])
def test_our_adapters_in_peft(small_model, write_folder, tmp_path, rslora):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = write_folder(small_model(), tmp_path / "base")
    model = load_model(folder, torch.float32, "cpu")
    add_adapter(model, "a", 8, 12, 0.05, ["v_proj", "gate_proj", "q_proj"], rslora)
    shaken(model, "a")
    save_adapter(model, "a", tmp_path / "adapter", str(folder), fingerprint(folder))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert (logits(model, "a") - theirs(IDS).logits).abs().max() <= 1e-5
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert (logits(model, "a") - auto(IDS).logits).abs().max() <= 1e-5


def test_adapters_both_ways_at_the_real_size(qwen_dir, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = load_model(qwen_dir, torch.float32, "cpu")
    add_adapter(model, "a", 8, 16)
    shaken(model, "a")
    save_adapter(model, "a", tmp_path / "ours", str(qwen_dir))
    base = transformers.AutoModelForCausalLM.from_pretrained(qwen_dir, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    with torch.no_grad():
        expected = theirs(IDS).logits
    assert (logits(model, "a") - expected).abs().max() <= 1e-5
    theirs.save_pretrained(tmp_path / "theirs")
    load_adapter(model, "b", tmp_path / "theirs", trainable=True)
    assert torch.equal(logits(model, "a"), logits(model, "b"))


@pytest.mark.parametrize("tied", [True, False])
def test_merged_in_transformers(small_model, write_folder, tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    folder = write_folder(small_model(tie_word_embeddings=tied), tmp_path / "base")
    model = load_model(folder, torch.float32, "cpu")
    add_adapter(model, "a", 8, 16)
    shaken(model, "a")
    expected = logits(model, "a")
    merge_adapter(model, "a")
    assert not any(isinstance(m, LoraLinear) for m in model.modules())
    save_merged(model, folder, tmp_path / "merged")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert (theirs(IDS).logits - expected).abs().max() <= 1e-4


def test_merging_one_of_two_keeps_the_other(small_model):
    model = small_model()
    add_adapter(model, "a", 4, 8)
    add_adapter(model, "b", 4, 8)
    shaken(model, "a", 1), shaken(model, "b", 2)
    merged = logits(model, "a")
    weights_before = {key: parameter.clone() for key, parameter in adapter_parameters(model, "b").items()}
    merge_adapter(model, "a")
    assert (logits(model) - merged).abs().max() < 1e-4
    assert (logits(model, "b") - merged).abs().max() > 1e-2
    weights = adapter_parameters(model, "b")
    assert weights.keys() == weights_before.keys() and all(
        torch.equal(weights[key], weights_before[key]) for key in weights
    )


def test_a_half_precision_base_is_merged_in_fp32():
    """Added in fp16, a product B A of many small terms loses what it is made of."""
    model = torch.nn.Module()
    model.q_proj = torch.nn.Linear(4, 3, bias=False).half().requires_grad_(False)
    weight = model.q_proj.weight.clone()
    add_adapter(model, "a", 2, 2, targets=["q_proj"])
    shaken(model, "a")
    a, b = model.q_proj.lora_A["a"].detach(), model.q_proj.lora_B["a"].detach()
    merge_adapter(model, "a")
    assert torch.equal(model.q_proj.weight, (weight.float() + b @ a).half())


def test_a_loaded_adapter_goes_on_training_as_it_was_saved(small_model, tmp_path):
    model = small_model()
    add_adapter(model, "a", 8, 16, 0.25, rslora=True)
    shaken(model, "a")
    save_adapter(model, "a", tmp_path, "x")
    load_adapter(model, "b", tmp_path, trainable=True)
    assert model.lora.configs["a"] == model.lora.configs["b"]
    assert torch.equal(logits(model, "a"), logits(model, "b"))
    assert all(p.requires_grad and p.dtype == torch.float32 for p in adapter_parameters(model, "b").values())
