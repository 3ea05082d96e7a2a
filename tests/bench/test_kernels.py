"""What bench.kernels counts, on tiny models, against numbers worked by hand; and the figures that are to be held."""

from functools import partial

import pytest
import torch
from torch.utils import flop_counter

from bench import counted, full_length, kernels, kernels_page, options, records
from bench.by_layer import PRODUCTS, Cost, Split, bytes_moved, cost, split
from bench.contest import CAPTURED, OURS
from bench.counted import MERGED, MODEL, PEFT, RECOMPUTED, Work
from bench.stress.simulation.counts import Counts
from r3lite.devices.cards import Speeds
from r3lite.devices.precision import dtype_name
from r3lite.memory import duration
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.config_file import read_config
from tests.bench import claims
from tests.half_products import fast_products

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real card is here: the bench simulates one")
TINY = ModelConfig(8192, 256, 512, 1, 4, 2)  # V, C, W, layers, H, K: D is 64
QKV, OUT, GATE_UP, DOWN = 512 * 256, 256 * 256, 1024 * 256, 256 * 512  # weights
WEIGHTS = QKV + OUT + GATE_UP + DOWN
FP32, BF16 = torch.float32, torch.bfloat16
SFT_TOKENS = 160  # two chunks of logits


def import_peers() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    try:
        flop_counter.sdpa_flop_count((1, 4, 8, 8), (1, 2, 8, 8), (1, 2, 8, 8))
    except AssertionError:
        pytest.skip("this PyTorch does not count operations of attention with grouped heads")
    counted.import_peers()


def counts(work, dtype=BF16) -> dict[tuple[str, str], Split]:
    """By the name of the work and who did it, of models as wide as TINY."""
    with pytest.MonkeyPatch.context() as patch, fast_products():
        patch.setattr(full_length, "ORDINARY", (300, TINY.vocab_size))
        splits = split(work, TINY, TINY.vocab_size, dtype)
    return {(piece.name, piece.by): both for piece, both in splits.items()}


@pytest.fixture(scope="module")
def decoded() -> dict[tuple[str, str], Split]:
    import_peers()
    return counts(partial(counted.decode, batches=(1,)))


@pytest.fixture(scope="module", params=[FP32, BF16], ids=dtype_name)
def trained(request) -> tuple[torch.dtype, list[dict]]:
    """Records of SFT in one precision."""
    import_peers()
    dtype, work = request.param, partial(counted.training, tokens=SFT_TOKENS)
    with pytest.MonkeyPatch.context() as patch, fast_products():
        patch.setattr(full_length, "ORDINARY", (300, TINY.vocab_size))
        splits = split(work, TINY, TINY.vocab_size, dtype)
    return dtype, [kernels.record(piece, both, "0.5B", dtype) for piece, both in splits.items()]


# The arithmetic


def test_a_layer_is_what_a_second_one_adds_and_the_rest_is_outside():
    """Work that adds one number to another 3 times, and for each layer 16 to 16 twice, in fp32."""

    def work(card, folder, precision):
        small, large = (torch.ones(n, device=precision.device) for n in (1, 16))
        counts_before = card.so_far()
        for x, times in ((small, 3), (large, 2 * read_config(folder).num_hidden_layers)):
            for _ in range(times):
                x.add(x)
        return {Work("sums", OURS): card.so_far() - counts_before}

    ((_, split_counts),) = split(work, TINY, TINY.vocab_size, FP32).items()
    assert (split_counts.layer.kernels, bytes_moved(split_counts.layer)) == (2, 2 * 2 * 64)
    assert (split_counts.outside.kernels, bytes_moved(split_counts.outside)) == (3, 3 * 2 * 4)
    assert split_counts.layer.operators == {"add": 2} and split_counts.outside.operators == {"add": 3}


def test_figures_of_an_operator_may_be_below_zero():
    product = Counts()
    sums = Counts()
    product.kernel("mm", 10, 2, 5)
    for _ in range(2):
        sums.kernel("add", 4, 4, 0)
    difference = product - sums
    assert (difference.kernels, difference.read, difference.operators, difference.moved) == (
        -1,
        2,
        {"mm": 1, "add": -2},
        {"mm": 12, "add": -16},
    )


def of(*launched: tuple[str, int, int, int], times: int = 1) -> Counts:
    total = Counts()
    for kernel in launched * times:
        total.kernel(*kernel)
    return total


def test_predicted_seconds_by_hand():
    """A card of 100 bytes and 1,000 operations a second, 0.2 s a launch.

    A layer: a product of 30 + 20 bytes and 700 operations, attention of 10 bytes and 40, a sum of 6 bytes. Outside: a
    product of 100 bytes and 100 operations.
    """
    layer = of(("mm", 30, 20, 700), ("_attention_", 8, 2, 40), ("add", 4, 2, 0))
    split_counts = Split(layer, of(("addmm_", 90, 10, 100)))
    assert cost(split_counts, 1) == Cost(
        product_bytes=150, product_operations=800, attention_operations=40, other_bytes=16, kernels=4
    )
    card = Speeds("card", {"fp32": 100.0}, {"fp32": 1000.0}, 0.2, "here")
    # 2 layers: max(200 / 100, 1500 / 1000) for products, 80 / 1000 and 32 / 100 for the rest, 7 kernels
    assert cost(split_counts, 2).seconds(card, "fp32") == pytest.approx(2.0 + 0.08 + 0.32 + 1.4)
    # 10 layers: max(600 / 100, 7100 / 1000)
    assert cost(split_counts, 10).seconds(card, "fp32") == pytest.approx(7.1 + 0.4 + 1.6 + 6.2)


def test_passes_over_the_logits_leave_out_the_heads_weight():
    split_counts = Split(of(("mm", 5, 5, 1)), of(("mm", 400, 100, 1), ("exp", 4000, 4000, 0)))
    row = kernels.record(Work("SFT", OURS, logits=1000, head=300), split_counts, "0.5B", BF16)
    assert (row["passes"], row["head_passes"]) == (8.2, 0.3)
    assert (row["kernels_layer"], row["kernels_outside"], row["launches"]) == (1, 2, 0)


def test_a_record_is_of_the_whole_model():
    layer = Counts(kernels=5, launches=4, uploads=1)
    outside = Counts(kernels=7, launches=3, downloads=2)
    outside.wait("a copy")
    row = kernels.record(Work("decoding", PEFT), Split(layer, outside), "1.5B", BF16)  # of 28 layers
    assert (row["launches"], row["copies"], row["waits"]) == (3 + 28 * 4, 2 + 28, 1)


# What is counted


def test_bytes_of_a_decoding_step_of_one_layer(decoded):
    """In bf16, one token after 128: numbers of each kernel by hand, weights first, then what is read and written."""
    two_norms = 2 * (256 + 256 + 256)
    qkv = QKV + 256 + 512 + 512 + (24 * 256 + 256 + 24)  # with its bias; A of three adapters
    qkv += 8 * 512 + 3 * 8 + 2 * 512  # B of q, k and v, each with its 8 of A x, added in place
    rotated = (384 + 384) + (384 + 384 + 64) + (384 + 384 + 384 + 64)  # 6 heads: cat, mul_, addcmul_
    attended = 256 + 2 * 2 * 129 * 64 + 129 + 256  # q, keys and values, mask, output
    out = OUT + 256 + 256 + 256 + (8 * 256 + 256 + 8) + (8 * 256 + 8 + 2 * 256)  # with the residual
    gate_up = GATE_UP + 256 + 1024 + (16 * 256 + 256 + 16) + (8 * 1024 + 2 * 8 + 2 * 1024)
    swiglu = (512 + 512) + (512 + 512 + 512)
    down = DOWN + 512 + 256 + 256 + (8 * 512 + 512 + 8) + (8 * 256 + 8 + 2 * 256)
    numbers = two_norms + qkv + rotated + (256 + 256) + attended + out + gate_up + swiglu + down  # the cache's: 256
    indices, statistics = 2 * 8, 2 * 4 + 4 * 4  # int64 of a row and a slot; fp32 of the norms and of attention
    layer = decoded["decoding, batch 1", MODEL].layer
    assert bytes_moved(layer) == 2 * numbers + indices + statistics
    assert layer.computed["mm"] + layer.computed["addmm"] + layer.computed["addmm_"] == 2 * (WEIGHTS + adapters())


def adapters() -> int:
    return 8 * (256 * 7 + 256 + (256 + 128 + 128) + 256 + (512 + 512) + 256)  # A of seven, down's twice as long; B


def test_products_of_a_layer_by_whom(decoded):
    """Seven without an adapter, three times as many with one by itself; r3lite has 4, 4 for A and 7 for B."""
    products = {
        by: sum(split_counts.layer.operators[name] for name in PRODUCTS) for (_, by), split_counts in decoded.items()
    }
    assert products == {OURS: 15, MODEL: 15, PEFT: 21, MERGED: 7}
    for (_, by), split_counts in decoded.items():
        assert split_counts.layer.operators["_scaled_dot_product_flash_attention_for_cpu"] == 1, by
    assert decoded["decoding, batch 1", PEFT].layer.kernels > decoded["decoding, batch 1", MERGED].layer.kernels


def test_a_graph_is_one_launch(decoded):
    """The engine launches the graph and what comes before and after it; transformers, every kernel."""
    ours, theirs = decoded["decoding, batch 1", OURS], decoded["decoding, batch 1", PEFT]
    assert ours.layer.launches == 0 and 1 < ours.outside.launches < ours.outside.kernels
    assert theirs.layer.launches == theirs.layer.kernels and theirs.outside.launches == theirs.outside.kernels


def test_prefill_reads_the_weights_once(decoded):
    prefilled = counts(partial(counted.prefill, tokens=64))
    assert {by for _, by in prefilled} == {OURS, PEFT, MERGED}
    for (_, by), split_counts in prefilled.items():
        weights = 2 * WEIGHTS * (1 if by == MERGED else 1.02)
        products = sum(split_counts.layer.moved[name] for name in PRODUCTS)
        assert weights < products < weights + 64 * 30_000, by
        extra = {OURS: adapters(), PEFT: adapters(), MERGED: 0}[by]
        assert sum(split_counts.layer.computed[name] for name in PRODUCTS) == 64 * 2 * (WEIGHTS + extra), by


# What is to be held, see GOALS of bench/kernels_page.py


def test_decoding_launches_no_more_than_was_reached(decoded):
    model = decoded["decoding, batch 1", MODEL]
    ours = decoded["decoding, batch 1", OURS]
    assert model.layer.kernels == ours.layer.kernels <= 24 == duration.FORWARD_KERNELS
    assert model.outside.kernels < ours.outside.kernels <= 30
    assert not model.layer.waits and not ours.layer.waits
    assert not model.outside.waits and ours.outside.waits.total() == 1  # for what was sampled


def test_sft_launches_no_more_than_was_reached(trained):
    dtype, rows = trained
    rows_by_work = {(row["work"], row["by"]): row for row in rows}
    storing, recomputing = (rows_by_work["SFT, 160 tokens" + suffix, OURS] for suffix in ("", RECOMPUTED))
    assert storing["kernels_layer"] <= 90
    assert storing["kernels_layer"] == pytest.approx(duration.FORWARD_KERNELS + duration.BACKWARD_KERNELS, rel=0.15)
    assert (
        storing["kernels_layer"] < recomputing["kernels_layer"] < rows_by_work["SFT, 160 tokens", PEFT]["kernels_layer"]
    )
    captured = rows_by_work["SFT, 160 tokens" + CAPTURED, OURS]
    assert captured["launches"] < 20 < 0.1 * storing["launches"]
    assert captured["kernels_layer"] < 1.2 * storing["kernels_layer"]  # they run within the graph
    assert storing["passes"] <= 8 < rows_by_work["SFT, 160 tokens", PEFT]["passes"]
    assert storing["head_passes"] == pytest.approx(2 * 2 * 8192 * 256 * dtype.itemsize / (4 * 160 * 8192))  # two chunks


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=dtype_name)
def test_nf4_launches_no_more_than_was_reached_and_moves_these_bytes(dtype):
    nf4, dense = counts(partial(counted.decode_nf4, batch=1), dtype).values()
    assert nf4.layer.kernels <= 40 and nf4.layer.kernels - dense.layer.kernels == duration.NF4_KERNELS
    assert not nf4.layer.waits
    element = dtype.itemsize
    codes = (0.5 + 2) + (2 + element)  # bytes of two become int32, which select two weights
    scaled = element + 4 / 64 + element  # by an fp32 number for 64
    absmax = 1 / 64 + 8 / (64 * 256) + 4 / 64  # of int8, and of a scale and a mean for 256 of them
    tables = 4 * 256 * 2 * element / WEIGHTS  # of two weights for each byte, once in each of four products
    bytes_a_weight = kernels.bytes_a_weight(nf4, dense, TINY, dtype)
    assert bytes_a_weight == pytest.approx(codes + scaled + absmax + tables + element, rel=1e-6)
    assert 0.5 < (4 + 2 * element) / (bytes_a_weight - tables) < 2  # what r3lite/memory/duration.py counts


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=dtype_name)
def test_a_compiler_makes_nf4_weights_dense_by_one_kernel(compiler, dtype):
    """It was two, with the codes of all weights written between them, as long as both of a byte were stacked."""
    bytes_written = 0.5 + 1 / 64 + 8 / (64 * 256) + dtype.itemsize  # codes, absmax with a scale and a mean; the weight
    bytes_read = dtype.itemsize  # by the product
    assert kernels.compiled_bytes_a_weight(TINY, dtype) == pytest.approx(bytes_written + bytes_read, rel=1e-3)


# The page


def test_works_are_found_by_their_names():
    works = ["decoding, batch 8", "decoding, batch 1, NF4", "SFT, 512 tokens", "SFT, 512 tokens" + RECOMPUTED]
    works.append("SFT, 512 tokens" + CAPTURED)
    operators = {"r3lite.rms_norm": [2, 0.5, 9, 9.0], "mm": [5, 0.25, 1, 1.0], "none": [0, 0.0, 4, 1.0]}
    common = {"by": OURS, "size": "3B", "operators": operators}
    rows = [{"work": work, "kernels_layer": i, "launches": 10 * i, **common} for i, work in enumerate(works, 20)]
    table = {row["what"]: row for row in kernels_page.reached(rows)}
    assert [row["counted"] for row in table.values()] == ["20", "22", "240", "21"]
    assert [row["met"] for row in table.values()] == ["yes", "yes", "no", "yes"]
    rows[0]["kernels_layer"] = 25
    assert kernels_page.reached(rows)[0] == {
        "what": "launches a layer, decoding", "at most": 24, "counted": "25", "met": "no",
        "of that": "5 `mm`, 2 `rms_norm`, 0 `none`",
    }  # fmt: skip
    rows[1]["bytes_a_weight"] = 12.6
    assert kernels_page.reached(rows)[-1]["of that"] == "0.5 MB `rms_norm`, 0.25 MB `mm`, 0 MB `none`"


PAGE = options.RESULTS / "kernels.md"


def test_the_committed_page_is_that_of_the_committed_runs():
    runs = records.read(PAGE.with_name("kernels-simulated.json"))
    assert PAGE.read_text(encoding="utf-8") == kernels_page.page(runs)
    assert {run["section"] for run in runs} <= set(kernels.KINDS)


def test_counts_in_the_documents_are_those_of_the_page():
    """Rows of the tables in the section on kernels are lines of the page."""
    text = (claims.ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    section = text[text.index("## Kernels and bytes") :].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) == 8  # the head, its rule, and six rows
    assert [row for row in rows if row not in PAGE.read_text(encoding="utf-8").splitlines()] == []
