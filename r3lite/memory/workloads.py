"""From a command's settings to its workload: what the run computes, in the sizes that the planner takes."""

from dataclasses import replace
from pathlib import Path

import torch

from r3lite.core.config import UsageError
from r3lite.core.errors import R3LiteError, nearest
from r3lite.core.grant import Memory
from r3lite.devices.cards import CARDS, card
from r3lite.devices.precision import DTYPES, dtype_name, resolve_dtype
from r3lite.memory.cuda_parts import LAPTOP, of_this_card
from r3lite.memory.known_models import KNOWN
from r3lite.memory.planner import linears
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

PROMPT = 512  # tokens of instructions and question; documents may be more
MARKUP = 16  # tokens around a document
JUDGE_PREFILL = 1024  # tokens of requests that --judge local reads at once


def shape_of(model: str) -> tuple[ModelConfig, int, Packed | None]:
    """Sizes of a model and of its vocabulary, and how its weights are packed; those of KNOWN are known offline."""
    known = {name.lower(): sizes for name, sizes in KNOWN.items()}  # the hub does not mind capitals
    if model.lower() in known and not Path(model).is_dir():
        return *known[model.lower()], None
    folder = resolve_folder(model)
    # A plan needs no weights.
    sizes = model_config(folder) if any(folder.glob("*.safetensors")) else read_config(folder)
    return sizes, vocabulary_of(folder), _packed(folder)


def _packed(folder: Path) -> Packed | None:
    """How the layers of a folder are packed, from the names of its tensors; None if it is not in NF4."""
    if quant_method(folder) != bitsandbytes_weights.METHOD:
        return Packed() if is_nf4(folder) else None
    config = read_config(folder)
    weights = {name: out * into for name, (out, into) in linears(config).items()}
    paths = bitsandbytes_weights.packed_layers(tensor_places(folder))
    packed = sum(weights.get(path.rpartition(".")[2], 0) for path in paths)
    return Packed(dense=config.num_hidden_layers * sum(weights.values()) - packed, wide=packed // nf4.BLOCK)


def sft_workload(config: SftConfig, longest: int | None = None, **known: float | None) -> Workload:
    """SFT over rows of at most `longest` tokens, by default --max-length.

    `known` are fields of Workload that are known once the rows are read, such as how many tokens they have in the mean.
    """
    longest, full = min(config.sft.max_length, longest or config.sft.max_length), config.lora.no_lora
    if full and config.model.adapter:
        cause = f"--adapter is {config.model.adapter}, but --no-lora does not take one"
        raise UsageError(f"{cause}: merge it with r3lite.export and pass --model")
    base = _base(config.model)
    if full and base["packed"]:
        cause = f"--no-lora cannot train {config.model.model}, whose weights are in 4 bits"
        raise R3LiteError(cause, "Pass the unquantized model, or remove --no-lora.")
    return Workload(
        **base,
        **({"full": True, "lora_r": 0} if full else _adapter(config.model, config.lora)),
        **known,
        row_tokens=longest,
        rows=config.rows_per_step if full else config.sft.batch_size,
        step_rows=config.rows_per_step,
    )


def rl_workload(
    config: PpoConfig,
    shared: int = 0,
    steps: int | None = None,
    *,
    critic: bool,
    ratios_first: bool = False,
    off_policy: int = 0,
    replays: bool = False,
) -> Workload:
    """A round whose episodes all reach --max-length and begin with `shared` equal tokens, with a critic or without.

    At most `off_policy` episodes join those that are sampled. If there are `replays`, a pass over what the buffer holds
    of their questions finds them.
    """
    if config.lora.no_lora:
        raise UsageError("--no-lora works with sft only")
    model, rl, lengths, validation = config.model, config.rl, config.lengths, config.validation
    episodes = config.episodes_of_round
    sampling = _sampling(lengths, config.retrieval, episodes, shared)
    contexts = None
    if rl.learn == "answer":
        whole = _sampling(lengths, config.retrieval, rl.batch_size, shared)
        contexts = Workload(**_base(model), **_adapter(model, config.lora), **whole, shared=shared, trains=False)
        # Of an end one turn is sampled; all before it is given, and the same for all ends of a context.
        writes = min(lengths.max_new_tokens, lengths.max_length - 1)
        shared = lengths.max_length - writes
        sampling |= {"writes": writes, "reads": shared, "mean_tokens": lengths.max_length}
    validated = validation.eval_data is not None
    expanded = min(rl.expand_limit, episodes)
    learned = episodes + expanded + off_policy
    most = min(rl.micro_batch_size or learned, learned)
    of_step = min(rl.mini_batch_size, episodes + expanded) + off_policy  # all of which may be in one mini-batch
    return Workload(
        **_base(model),
        **_adapter(model, config.lora),
        **sampling,
        rows=min(most, of_step),
        step_rows=of_step,
        scored_rows=most,
        off_policy=off_policy,
        shared=min(shared, lengths.max_length),
        scores=rl.has_reference + (rl.old_logprobs == "trainer") + replays * rl.replay_share,
        adapters=2 if rl.has_reference and model.adapter else 1,  # without --adapter, the bare base is the reference
        keeps_step=rl.kl_budget is not None,
        critic=critic,
        guided=bool(rl.teacher or rl.teacher_logprobs),
        teacher=_teacher(rl) if rl.teacher else None,
        judge=judge_work(config.judge, model),
        epochs=rl.update_epochs,
        ratios_first=ratios_first,
        contexts=contexts,
        expanded=expanded,
        expanded_writes=max(1, sampling["writes"] - lengths.max_new_tokens),  # a turn at least is shared
        refills=rl.refill_limit,
        held_out=validation.eval_questions if validated else 0,
        validate_every=validation.eval_every if validated else 1,
        steps=steps,
    )


def _teacher(rl: RLSettings) -> TeacherWork:
    sizes, vocabulary, packed = shape_of(rl.teacher)
    quantized = rl.teacher_quantize == "nf4" or packed is not None
    adapter = _adapter(ModelSettings(adapter=rl.teacher_adapter), LoraSettings()) if rl.teacher_adapter else {}
    return TeacherWork(sizes, quantized, min(rl.teacher_top, vocabulary), bool(adapter), **adapter, packed=packed)


def judge_work(judge: JudgeSettings, model: ModelSettings) -> JudgeWork | None:
    """What --judge local computes, in figures of its own, whatever the run is granted; None with another judge."""
    if judge.judge != "local":
        return None
    name = judge.local_model or model.model
    sizes, vocabulary, packed = shape_of(name)
    quantized = judge.judge_quantize == "nf4" or packed is not None
    memory = Memory(nf4=quantized, micro_batch_tokens=JUDGE_PREFILL, rollout_batch_size=judge.judge_concurrency)
    return JudgeWork(sizes, vocabulary, memory, min(judge.judge_max_length, sizes.max_position_embeddings), packed)


def read_workload(model: ModelSettings, longest: int, rows: int) -> Workload:
    """Reading `rows` rows of at most `longest` tokens each without gradients, as a teacher does."""
    adapter = _adapter(model, LoraSettings()) if model.adapter else {}
    work = {"trains": False, "scores": 1, "scored_rows": rows, "step_rows": rows, "adapters": bool(adapter)}
    return Workload(**_base(model), **adapter, **work, row_tokens=longest)


def evaluate_workload(
    model: ModelSettings,
    lengths: LengthSettings,
    retrieval: RetrievalSettings,
    questions: int,
    judge: JudgeSettings | None = None,
) -> Workload:
    """Answering `questions` questions, and judging the answers if there is a judge."""
    adapter = _adapter(model, LoraSettings()) if model.adapter else {}
    work = judge_work(judge, model) if judge else None
    return Workload(**_base(model), **adapter, **_sampling(lengths, retrieval, questions), trains=False, judge=work)


def on_card(workload: Workload, name: str, dtype: str) -> Workload:
    """The same work on a card of the table, in the dtype of --dtype."""
    found = card(name)
    if found is None:
        known = [card.name for card in CARDS]
        raise UsageError(f"unknown --card {name}{nearest(name, known)}; choose from {', '.join(known)}")
    if dtype == "auto":
        dtype = "bf16" if "bf16" in found.flops else "fp16"
    element = DTYPES[dtype].itemsize
    return replace(workload, element=element, dtype=dtype, on_cuda=True, beside=LAPTOP, speeds=found)


def _base(model: ModelSettings) -> dict:
    sizes, vocabulary, packed = shape_of(model.model)
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = model.device if model.device != "auto" else next(name for name, found in here.items() if found)
    # A device that is not in this machine can be planned for: it has 16-bit numbers, whichever they are.
    elsewhere = not here[kind] and model.dtype == "auto"
    dtype = torch.float16 if elsewhere else resolve_dtype(model.dtype, torch.device(kind))
    return {
        "model": sizes,
        "vocabulary": vocabulary,
        "packed": packed,
        "element": dtype.itemsize,
        "on_cuda": kind == "cuda",
        "beside": of_this_card(),
        "dtype": dtype_name(dtype),
        "device": kind if here[kind] else None,
    }


def _adapter(model: ModelSettings, lora: LoraSettings) -> dict:
    """Rank and projections of the adapter to start from, or of a fresh one if it does not exist yet."""
    if model.adapter and (found := read_adapter_config(model.adapter)):
        return {"lora_r": found.r, "targets": found.targets}
    return {"lora_r": lora.lora_r, "targets": lora.lora_targets}


def _sampling(lengths: LengthSettings, retrieval: RetrievalSettings, episodes: int, shared: int = 0) -> dict:
    retrieves = retrieval.retriever != "none"
    found = retrieval.top_k * (lengths.max_document_tokens + MARKUP) if retrieves else 0
    reads = max(1, min(lengths.max_length - lengths.max_new_tokens, max(PROMPT, found)))
    # As much is sampled as can be: documents get what is left.
    turns = lengths.most_turns * lengths.max_new_tokens
    prompt = shared or max(1, min(PROMPT, lengths.max_length - lengths.max_new_tokens))
    writes = max(1, min(turns, lengths.max_length - prompt))
    return {
        "episodes": episodes,
        "row_tokens": lengths.max_length,
        "reads": reads,
        "retrieves": retrieves,
        "mean_tokens": min(lengths.max_length, prompt + turns + lengths.max_hops * found),
        "writes": writes,
    }
