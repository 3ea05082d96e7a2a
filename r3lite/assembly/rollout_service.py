"""The service of a rollout worker. GET /version describes the model and settings, POST /adapter/HASH receives the
adapter of a round, POST /sample returns episodes that are sampled with it. `rollout/remote.py` is the other side.
"""

import hashlib
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

import r3lite
from r3lite.assembly import answering
from r3lite.assembly.policy import load_policy
from r3lite.core.config import flag
from r3lite.core.episode import Question, Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.core.files import folder_fingerprint
from r3lite.core.http_server import Peer, Server, UnknownPath
from r3lite.core.listening import listen, token_of, url_of
from r3lite.core.records import Record, shown
from r3lite.datasets.sources import protocols_of, read_questions_of
from r3lite.devices.precision import dtype_name
from r3lite.memory.plan import Plan
from r3lite.models import lora, weights
from r3lite.protocols.layout import Layout
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.retrieval import corpus, index
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.wire import AdapterFiles, EpisodeLimits, identity_of, sequence_to_json, tickets_from_json
from r3lite.settings import NewQuestionSettings, PpoConfig, RetrievalSettings, RolloutWorkerConfig

LARGEST = 900 << 20  # bytes of a request, mostly an adapter
AT_ONCE = 64  # episodes sampled at a time, if the memory suffices and --rollout-batch-size is not set
EXAMPLE = "Who wrote it, and when?"
# Settings that may differ between trainer and worker: paths on their disks, and their own limits.
LOCAL_SETTINGS = (
    "init_prompt",
    "step_prompt",
    "corpus",
    "index",
    "query_cache",
    "query_cache_mib",
    "web_cache",
    "web_rpm",
)


def facts_of(
    config: PpoConfig | RolloutWorkerConfig,
    base: str | None,
    nf4: bool,
    layouts: Mapping[str, Layout],
    setup: Setup,
) -> dict[str, str]:
    """Returns the facts that a trainer and its workers must have in common, by the names that an error gives them.

    Paths differ between machines. So if a retriever, an encoder or a format is a path, only its last part counts; of
    --rerank and --source-index, the content counts.
    """
    prompts = [(name, layout.protocol, layout.prompt(EXAMPLE)) for name, layout in sorted(layouts.items())]
    facts = {
        "the version of r3lite": r3lite.__version__,
        "--model": base or "unknown",
        "4 bits of --quantize": nf4,
        "--temperature": config.sampling.temperature,
        "--thinking": config.model.thinking,
    }
    for section in (config.protocol, config.lengths, config.retrieval):
        for name, value in vars(section).items():
            if name not in LOCAL_SETTINGS:
                facts[flag(name)] = value
    for name in ("retriever", "encoder"):
        facts[flag(name)] = Path(getattr(config.retrieval, name)).name
    facts["--format"] = Path(config.protocol.format).name
    facts["--rerank"] = _content_of_reranker(config.retrieval)
    facts["--source-index"] = _content_of_sources(config.retrieval)
    facts["the prompts, chat template or tokenizer"] = hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
    facts["the passages searched"] = _passages_fingerprint(setup)
    facts["--seed, for --noise-rate"] = config.common.seed if config.retrieval.noise_rate else None
    return {name: str(value) for name, value in facts.items()}


def _passages_fingerprint(setup: Setup) -> str | bool:
    """Returns the fingerprint of the passages that are searched on this machine; False if there are none."""
    settings = setup.settings
    if settings.retriever in ("none", "golden") or settings.is_remote or settings.is_web:
        return False
    if settings.index:
        indexed = _fingerprint_of_index(settings.index)
        if indexed:
            return indexed
    return corpus.fingerprint(setup.documents)


def _fingerprint_of_index(folder: str) -> str:
    """Returns the fingerprint of an index's passages."""
    return index.read_manifest(Path(folder)).text("fingerprint")


def _content_of_reranker(settings: RetrievalSettings) -> str | None:
    """Returns what --rerank is: a fingerprint if it is a folder, else the hub id, address or None of the settings."""
    if settings.rerank and Path(settings.rerank).is_dir():
        return f"a model with the fingerprint {folder_fingerprint(Path(settings.rerank))}"
    return settings.rerank


def _content_of_sources(settings: RetrievalSettings) -> str | None:
    """Returns each kind of --source-index with a fingerprint of its passages, or with its server or web service."""
    sources = []
    for kind, source_settings in sorted(settings.by_kind.items()):
        place = source_settings.retriever
        if source_settings.index:
            place = f"passages with the fingerprint {_fingerprint_of_index(source_settings.index)}"
        sources.append(f"{kind}={place}")
    return ", ".join(sources) or None


@dataclass(frozen=True)
class WatchfulSampler(Sampler):
    """Samples as long as the client is connected: raises Disconnected at the first token after it has left."""

    peer: Peer = field(kw_only=True)

    def __call__(self, logits: Tensor, uniforms: list[float]) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probabilities as Sampler does."""
        self.peer.check_connected()
        return super().__call__(logits, uniforms)


class RolloutService:
    """Samples with one adapter at a time, one request at a time."""

    largest = LARGEST
    raw = ("/adapter/",)  # requests to these paths are bytes, not JSON

    def __init__(
        self,
        engine: Engine,
        retrieve: Retrieve,
        facts: dict[str, str],
        token: str | None = None,
    ):
        self.engine = engine
        self.retrieve = retrieve
        self.facts = facts
        self.token = token
        self.version = ""  # the hash of the adapter; empty before the first one
        self.one_at_a_time = threading.Lock()

    def answer(self, path: str, request: Record | bytes | None, peer: Peer) -> dict:
        """Returns the reply to a request, as core.http_server.HttpService says."""
        if path == "/version":
            return {
                "r3lite": r3lite.__version__,
                "facts": self.facts,
                "adapter": self.version,
                "dtype": dtype_name(self.engine.model.head_weight.dtype),
            }
        with peer.holding(self.one_at_a_time):
            if isinstance(request, bytes):
                return self._receive(AdapterFiles(request), path.removeprefix("/adapter/"))
            if path == "/sample" and request:
                return self._sample(request, peer)
        raise UnknownPath(path)

    def _receive(self, adapter: AdapterFiles, version: str) -> dict:
        """Loads an adapter and samples with it from now on.

        Raises R3LiteError if its hash is not the `version` that was sent, or if it was trained on another base.
        """
        if adapter.version != version:
            raise R3LiteError(
                f"the adapter was damaged in transfer: its hash is {adapter.version}, not {shown(version)}",
                code="adapter-damaged",
            )
        if version != self.version:
            self._switch_to(adapter)
        return {"adapter": self.version}

    def _switch_to(self, adapter: AdapterFiles) -> None:
        """Loads an adapter in place of the one before; raises R3LiteError if it was trained on another base."""
        model = self.engine.model
        with tempfile.TemporaryDirectory(prefix="r3lite-") as folder:
            adapter.write(Path(folder))
            name, base = lora.read_base(folder)
            if base != self.facts["--model"]:
                cause = f"the adapter was trained on another base: {name} with the fingerprint {base}"
                raise R3LiteError(f"{cause}; the worker's --model has {self.facts['--model']}", code="base-differs")
            lora.load_adapter(model, adapter.version, folder, trainable=False)
        lora.set_adapter(model, adapter.version)
        if self.version:
            lora.remove_adapter(model, self.version)
        self.version = adapter.version

    def _sample(self, request: Record, peer: Peer) -> dict:
        """Returns the episodes of a request, or {"differs": True} if its trainer has other facts or another adapter."""
        requested = (request.text("identity"), request.text("adapter"))
        if requested != (identity_of(self.facts), self.version):
            return {"differs": True}
        engine = replace(self.engine, sampler=WatchfulSampler(**vars(self.engine.sampler), peer=peer))
        tickets = tickets_from_json(request, EpisodeLimits.of(engine.layout))
        sequences = [ticket.sequence() for ticket in tickets]
        for sequence in sequences:
            if not sequence.tokens:
                engine.layout_of(sequence).open(sequence)
        sequences = engine.grant.run_within_memory("sample", engine.finish, sequences, self.retrieve)
        episodes = [sequence_to_json(sequence) | {"adapter": self.version} for sequence in sequences]
        return {"episodes": episodes}


def plan_memory(config: RolloutWorkerConfig) -> Plan:
    """Returns the memory plan of a worker that samples --rollout-batch-size episodes at a time, by default AT_ONCE."""
    return answering.plan_memory(config, config.sampling.rollout_batch_size or AT_ONCE)


def build_service(config: RolloutWorkerConfig, token: str | None = None) -> RolloutService:
    """Returns the service of the settings, its model and retriever ready."""
    protocols = protocols_of(config.protocol, config.mixture)  # a bad prompt file is refused before a download
    plan = plan_memory(config)
    folder = weights.resolve_folder(config.model.model)
    data = NewQuestionSettings(**vars(config.data))
    questions: list[Question] = []
    if data.data or config.mixture.sources:
        questions = read_questions_of(data, config.mixture)
    searching = [question for question in questions if protocols[question.source].can_search]
    setup = Setup(
        config.retrieval,
        questions=searching or questions,
        seed=config.common.seed,
        skip_bad_rows=data.skip_bad_rows,
    )
    retrieve = build_retriever(setup)
    tokenizer = Tokenizer.load(folder, config.model.thinking)
    layouts = {name: Layout(tokenizer, protocol, config.lengths) for name, protocol in protocols.items()}
    policy = load_policy(folder, replace(config.model, adapter=None), memory=config.memory, plan=plan)
    engine = Engine(
        policy.model,
        layout=layouts[""],
        sampler=Sampler(config.sampling.temperature),
        grant=policy.grant,
        autocast=policy.precision.autocast,
        layouts=layouts,
        draft_tokens=config.sampling.draft_tokens,
    )
    facts = facts_of(
        config,
        base=weights.fingerprint(folder),
        nf4=policy.grant.memory.nf4,
        layouts=layouts,
        setup=setup,
    )
    return RolloutService(engine, retrieve, facts, token=token)


def serve(config: RolloutWorkerConfig) -> None:
    """Serves until it is interrupted."""
    host = config.listen.host
    port = config.listen.port
    token = token_of(host)
    with listen(host, port) as listening:  # before the model is loaded, so that a port in use shows at once
        service = build_service(config, token)
        server = Server(service, host, port, listening=listening)
        print(f"rollout worker: {url_of(listening)}, for ppo --rollout-server (Ctrl-C stops)", flush=True)
        with server:
            server.serve_forever()
