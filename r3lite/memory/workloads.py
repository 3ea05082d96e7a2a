"""Makes the workload of a command from its settings: what the run computes, in the sizes that the planner takes."""

from dataclasses import replace
from pathlib import Path

import torch

from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError, nearest
from r3lite.core.grant import Memory
from r3lite.devices.cards import CARDS, card, similar_names
from r3lite.devices.precision import DTYPES, dtype_name, resolve_dtype
from r3lite.memory.cuda_parts import beside_of_card, beside_of_this_card
from r3lite.memory.known_models import KNOWN
from r3lite.memory.layer_tensors import layer_taps, layer_tensors
from r3lite.memory.work import JudgeWork, TeacherWork, Workload
from r3lite.models import bitsandbytes_weights, nf4
from r3lite.models.causal_lm import ModelConfig
from r3lite.models.config_file import is_nf4, quant_method, read_config
from r3lite.models.lora import read_adapter_config
from r3lite.models.nf4 import Packed
from r3lite.models.weights import model_config, resolve_folder, tensor_places
from r3lite.protocols.tokenizer_files import vocabulary_of
from r3lite.settings import (
    JudgeSettings,
    LengthSettings,
    LoraSettings,
    ModelSettings,
    PpoConfig,
    RetrievalSettings,
    RLSettings,
    SftConfig,
)

PROMPT = 512  # tokens of instructions and question, assumed if they are not known
MARKUP = 16  # tokens around a document
JUDGE_PREFILL = 1024  # tokens of requests that --judge local reads at once


def shape_of(model: str) -> tuple[ModelConfig, int, Packed | None]:
    """Returns a model's config, the number of its tokenizer's ids, and how its weights are packed (None: not in NF4).

    For a model of KNOWN nothing is read or downloaded. `model` is a folder or a name of the hub, which ignores case.
    """
    published = {name.lower(): known for name, known in KNOWN.items()}
    if model.lower() in published and not Path(model).is_dir():
        config, vocabulary = published[model.lower()]
        return config, vocabulary, None
    folder = resolve_folder(model)
    if any(folder.glob("*.safetensors")):
        config = model_config(folder)
    else:
        config = read_config(folder)  # a plan needs no weights
    return config, vocabulary_of(folder), _packed(folder)


def _packed(folder: Path) -> Packed | None:
    """Returns how the layers of a folder are packed, from the names of its tensors; None if it is not in NF4."""
    if quant_method(folder) != bitsandbytes_weights.METHOD:
        return Packed() if is_nf4(folder) else None
    config = read_config(folder)
    paths = bitsandbytes_weights.packed_layers(tensor_places(folder))
    all_weights = 0
    packed = 0
    for layer, taps in enumerate(layer_taps(config)):
        packed_names = {path.rpartition(".")[2] for path in paths if path.startswith(f"model.layers.{layer}.")}
        for name, (out_features, in_features) in layer_tensors(config, taps).linears.items():
            weights = out_features * in_features
            all_weights += weights
            if name in packed_names:
                packed += weights
    return Packed(dense_weights=all_weights - packed, fp32_blocks=packed // nf4.BLOCK)


def sft_workload(config: SftConfig, longest: int | None = None, **of_rows: float | None) -> Workload:
    """Returns SFT over rows of at most `longest` tokens, by default --max-length.

    `of_rows` are fields of Workload that are known once the rows are read, such as `mean_tokens`.
    """
    longest = min(config.sft.max_length, longest or config.sft.max_length)
    full = config.lora.no_lora
    if full and config.model.adapter:
        cause = f"--adapter is {config.model.adapter}, but --no-lora does not take one"
        raise UsageError(f"{cause}: merge it with r3lite.export and pass --model", code="model-is-adapter")
    base = _base(config.model)
    if full and base["packed"]:
        cause = f"--no-lora cannot train {config.model.model}, whose weights are in 4 bits"
        raise R3LiteError(cause, "Pass the unquantized model, or remove --no-lora.", code="no-lora-quantized")
    trained = {"full_tuning": True, "lora_r": 0} if full else _adapter(config.model, config.lora)
    return Workload(
        **base,
        **trained,
        **of_rows,
        row_tokens=longest,
        rows=config.rows_per_step if full else config.sft.batch_size,
        step_rows=config.rows_per_step,
        captures=config.sft.cuda_graphs,
    )


def rl_workload(
    config: PpoConfig,
    shared: int = 0,
    steps: int | None = None,
    *,
    critic: bool,
    off_policy: int = 0,
    replays: bool = False,
    right_answers: bool = False,
) -> Workload:
    """Returns a round whose episodes all reach --max-length and share their first `shared` tokens.

    At most `off_policy` episodes join the sampled ones. With `replays`, some of those that join are chosen from the
    replay buffer, by a pass over the episodes that it has of their questions. With `right_answers`, a pass over the
    right answers measures their probabilities.
    """
    if config.lora.no_lora:
        raise UsageError("--no-lora works with sft only", code="no-lora-sft-only")
    model = config.model
    rl = config.rl
    lengths = config.lengths
    episodes = config.episodes_of_round
    adapter = _adapter(model, config.lora)
    sampling = _sampling(lengths, config.retrieval, episodes, shared)
    contexts = None
    if rl.learn == "answer":
        full_episodes = _sampling(lengths, config.retrieval, rl.batch_size, shared)
        contexts = Workload(**_base(model), **adapter, **full_episodes, shared=shared, trains=False)
        # Only the last turn is sampled. The tokens before it are given, and all episodes of a context share them.
        writes = min(lengths.max_new_tokens, lengths.max_length - 1)
        shared = lengths.max_length - writes
        sampling["writes"] = writes
        sampling["reads"] = shared
        sampling["mean_tokens"] = lengths.max_length
    validation = config.validation
    validated = validation.eval_data is not None
    expanded = min(rl.expand_limit, episodes)
    learned = episodes + expanded + off_policy
    rows_per_pass = min(rl.micro_batch_size or learned, learned)
    # One mini-batch may have all off-policy episodes.
    step_rows = min(rl.mini_batch_size, episodes + expanded) + off_policy
    scores = float(rl.has_reference)
    if rl.old_logprobs == "trainer":
        scores += 1
    if replays:
        scores += rl.replay_share
    if right_answers:
        scores += 1
    return Workload(
        **_base(model),
        **adapter,
        **sampling,
        rows=min(rows_per_pass, step_rows),
        step_rows=step_rows,
        scored_rows=rows_per_pass,
        off_policy=off_policy,
        shared=min(shared, lengths.max_length),
        draft_tokens=config.sampling.draft_tokens,
        scores=scores,
        adapters=2 if rl.has_reference and model.adapter else 1,  # without --adapter, the reference is the bare base
        keeps_step=rl.kl_budget is not None,
        critic=critic,
        guided=bool(rl.teacher or rl.teacher_logprobs),
        teacher=_teacher(rl) if rl.teacher else None,
        judge=judge_work(config.judge, model),
        epochs=rl.update_epochs,
        contexts=contexts,
        demonstrated_contexts=bool(rl.contexts),
        expanded=expanded,
        refills=rl.refill_limit,
        held_out=validation.eval_questions if validated else 0,
        validate_every=validation.eval_every if validated else 1,
        steps=steps,
    )


def _teacher(rl: RLSettings) -> TeacherWork:
    """Returns what --teacher computes."""
    config, vocabulary, packed = shape_of(rl.teacher)
    adapter = {}
    if rl.teacher_adapter:
        adapter = _adapter(ModelSettings(adapter=rl.teacher_adapter), LoraSettings())
    return TeacherWork(
        model=config,
        nf4=rl.teacher_quantize == "nf4" or packed is not None,
        top=min(rl.teacher_top, vocabulary),
        adapters=bool(adapter),
        **adapter,
        packed=packed,
    )


def judge_work(judge: JudgeSettings, model: ModelSettings) -> JudgeWork | None:
    """Returns what --judge local computes, with memory figures of its own; None with another --judge."""
    if judge.judge != "local":
        return None
    config, vocabulary, packed = shape_of(judge.local_model or model.model)
    memory = Memory(
        nf4=judge.judge_quantize == "nf4" or packed is not None,
        micro_batch_tokens=JUDGE_PREFILL,
        rollout_batch_size=judge.judge_concurrency,
    )
    return JudgeWork(
        model=config,
        vocabulary=vocabulary,
        memory=memory,
        row_tokens=min(judge.judge_max_length, config.max_position_embeddings),
        packed=packed,
    )


def read_workload(model: ModelSettings, longest: int, rows: int) -> Workload:
    """Returns the work of reading `rows` rows of at most `longest` tokens each without gradients, as a teacher does."""
    adapter = _adapter(model, LoraSettings()) if model.adapter else {}
    return Workload(
        **_base(model),
        **adapter,
        row_tokens=longest,
        trains=False,
        scores=1,
        scored_rows=rows,
        step_rows=rows,
        adapters=bool(adapter),
    )


def evaluate_workload(
    model: ModelSettings,
    lengths: LengthSettings,
    retrieval: RetrievalSettings,
    questions: int,
    draft_tokens: int = 0,
    truncates: bool = False,
    judge: JudgeSettings | None = None,
) -> Workload:
    """Returns the work of answering `questions` questions, and of judging the answers if there is a judge.

    `draft_tokens`: the most tokens of a draft. `truncates`: tokens are sampled with top-k or top-p.
    """
    adapter = _adapter(model, LoraSettings()) if model.adapter else {}
    return Workload(
        **_base(model),
        **adapter,
        **_sampling(lengths, retrieval, questions),
        draft_tokens=draft_tokens,
        truncates=truncates,
        trains=False,
        judge=judge_work(judge, model) if judge else None,
    )


def on_card(workload: Workload, name: str, dtype: str) -> Workload:
    """Returns the same work on a card of devices/cards.py, in the dtype of --dtype."""
    speeds = card(name)
    if speeds is None:
        choices = ", ".join(known_card.name for known_card in CARDS)
        raise UsageError(
            f"unknown --card {name}{nearest(name, similar_names(name))}; for the memory alone pass --device cuda "
            f"--vram-budget SIZE, or choose from {choices}",
            code="unknown-card",
        )
    if dtype == "auto":
        dtype = "bf16" if "bf16" in speeds.flops else "fp16"
    return replace(
        workload,
        element=DTYPES[dtype].itemsize,
        dtype=dtype,
        on_cuda=True,
        beside=beside_of_card(speeds.name),
        device=None,
        speeds=speeds,
    )


def _base(model: ModelSettings) -> dict:
    """Returns the fields of a workload that its model and its device decide, by name."""
    config, vocabulary, packed = shape_of(model.model)
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    kind = model.device
    if kind == "auto":
        kind = next(name for name, is_here in available.items() if is_here)
    if available[kind] or model.dtype != "auto":
        dtype = resolve_dtype(model.dtype, torch.device(kind))
    else:
        # The plan is for a device that is not in this machine. It will compute in fp16 or bf16, which are as large.
        dtype = torch.float16
    return {
        "model": config,
        "vocabulary": vocabulary,
        "packed": packed,
        "element": dtype.itemsize,
        "on_cuda": kind == "cuda",
        "beside": beside_of_this_card(),
        "dtype": dtype_name(dtype),
        "device": kind if available[kind] else None,
    }


def _adapter(model: ModelSettings, lora: LoraSettings) -> dict:
    """Returns the fields `lora_r` and `targets`: of the adapter to start from, or of a new one if there is none."""
    config = read_adapter_config(model.adapter) if model.adapter else None
    if config:
        return {"lora_r": config.r, "targets": config.targets}
    return {"lora_r": lora.lora_r, "targets": lora.lora_targets}


def _sampling(lengths: LengthSettings, retrieval: RetrievalSettings, episodes: int, shared: int = 0) -> dict:
    """Returns the fields of a workload that sampling decides; `shared`: the tokens of the prompt, 0 if not known."""
    retrieves = retrieval.retriever != "none"
    document_tokens = 0  # of one retrieval
    if retrieves:
        document_tokens = retrieval.top_k * (lengths.max_document_tokens + MARKUP)
    before_turn = lengths.max_length - lengths.max_new_tokens  # the most tokens before a turn of maximum length
    # All turns are taken to have the maximum length; documents get the tokens that remain.
    turn_tokens = lengths.most_turns * lengths.max_new_tokens  # of all turns
    prompt = shared or max(1, min(PROMPT, before_turn))
    return {
        "episodes": episodes,
        "row_tokens": lengths.max_length,
        "reads": max(1, min(before_turn, max(PROMPT, document_tokens))),
        "retrieves": retrieves,
        "mean_tokens": min(lengths.max_length, prompt + turn_tokens + lengths.max_hops * document_tokens),
        "writes": max(1, min(turn_tokens, lengths.max_length - prompt)),
    }
