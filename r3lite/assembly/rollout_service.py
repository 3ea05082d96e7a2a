"""The service of a rollout worker. GET /version describes the model and settings, POST /adapter/HASH receives the
adapter of a round, POST /sample returns episodes that are sampled with it. `rollout/remote.py` is the other side.
"""

import hashlib
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import r3lite
from r3lite.assembly import answering
from r3lite.assembly.policy import load_policy
from r3lite.core.config import flag
from r3lite.core.episode import Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.core.http_server import Server, UnknownPath
from r3lite.core.listening import listen, token_of, url_of
from r3lite.core.records import Record
from r3lite.datasets.sources import protocols_of, read_questions_of
from r3lite.devices.precision import dtype_name
from r3lite.memory.plan import Plan
from r3lite.models import lora, weights
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import Layout
from r3lite.retrieval import corpus, index
from r3lite.retrieval.retriever import build_retriever
from r3lite.retrieval.setup import Setup
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.wire import Adapter, Bounds, identity_of, sequence_to_json, tickets_from_json
from r3lite.settings import NewQuestionSettings, PpoConfig, RolloutWorkerConfig

LARGEST = 900 << 20  # bytes of a request, mostly an adapter
AT_ONCE = 64  # episodes, if the memory has room and nothing else is said
EXAMPLE = "Who wrote it, and when?"
# Settings of which the two sides may have different ones: places on their disks, and how much they keep and ask there.
APART = ("init_prompt", "step_prompt", "corpus", "index", "query_cache", "query_cache_mib", "web_cache", "web_rpm")


def facts_of(
    config: PpoConfig | RolloutWorkerConfig, base: str | None, nf4: bool, layouts: Mapping[str, Layout], setup: Setup
) -> dict[str, str]:
    """What a trainer and its workers must have in common, by the names that an error gives it.

    Of a retriever, an encoder and a format the last part is compared: the place before it is each machine's own.
    """
    shown = [(name, layout.protocol, layout.prompt(EXAMPLE)) for name, layout in sorted(layouts.items())]
    facts = {"the version of r3lite": r3lite.__version__, "--model": base or "unknown", "4 bits of --quantize": nf4}
    facts |= {"--temperature": config.sampling.temperature, "--thinking": config.model.thinking}
    for section in (config.protocol, config.lengths, config.retrieval):
        facts |= {flag(name): value for name, value in vars(section).items() if name not in APART}
    facts |= {flag(name): Path(getattr(config.retrieval, name)).name for name in ("retriever", "encoder")}
    facts["--format"] = Path(config.protocol.format).name
    facts["the prompts, chat template or tokenizer"] = hashlib.sha256(repr(shown).encode()).hexdigest()[:16]
    settings = config.retrieval
    here = not (settings.retriever in ("none", "golden") or settings.is_remote or settings.is_web)
    indexed = here and settings.index and index.read_manifest(Path(settings.index)).text("fingerprint")
    facts["the passages searched"] = indexed or (here and corpus.fingerprint(setup.documents))
    facts["--seed, for --noise-rate"] = config.common.seed if settings.noise_rate else None
    return {name: str(value) for name, value in facts.items()}


class RolloutService:
    """Samples with one adapter at a time, one request at a time."""

    largest, raw = LARGEST, ("/adapter/",)

    def __init__(self, engine: Engine, retrieve: Retrieve, facts: dict[str, str], token: str | None = None):
        self.engine, self.retrieve, self.facts, self.token = engine, retrieve, facts, token
        self.version = ""  # of the adapter
        self.one_at_a_time = threading.Lock()

    def answer(self, path: str, request: Record | bytes | None) -> dict:
        """The reply to a request, as core.http_server.HttpService says."""
        if path == "/version":
            dtype = dtype_name(self.engine.model.head_weight.dtype)
            return {"r3lite": r3lite.__version__, "facts": self.facts, "adapter": self.version, "dtype": dtype}
        with self.one_at_a_time:
            if isinstance(request, bytes):
                return self._take(Adapter(request), path.removeprefix("/adapter/"))
            if path == "/sample" and request:
                return self._sampled(request)
        raise UnknownPath(path)

    def _take(self, adapter: Adapter, sent: str) -> dict:
        """Switches an adapter on, unless it is of another base, or is not what was sent."""
        if adapter.version != sent:
            raise R3LiteError(f"the adapter was damaged in transfer: its hash is {adapter.version}, not {sent}")
        if adapter.version != self.version:
            model = self.engine.model
            with tempfile.TemporaryDirectory(prefix="r3lite-") as folder:
                adapter.write(Path(folder))
                name, base = lora.read_base(folder)
                if base != self.facts["--model"]:
                    cause = f"the adapter was trained on another base: {name} with the fingerprint {base}"
                    raise R3LiteError(f"{cause}; the worker's --model has {self.facts['--model']}")
                lora.load_adapter(model, adapter.version, folder, trainable=False)
            lora.set_adapter(model, adapter.version)
            if self.version:
                lora.remove_adapter(model, self.version)
            self.version = adapter.version
        return {"adapter": self.version}

    def _sampled(self, request: Record) -> dict:
        if (request.text("identity"), request.text("adapter")) != (identity_of(self.facts), self.version):
            return {"differs": True}
        engine = self.engine
        sequences = [ticket.sequence() for ticket in tickets_from_json(request, Bounds.of(engine.layout))]
        for sequence in sequences:
            if not sequence.tokens:
                engine.layout_of(sequence).open(sequence)
        done = engine.grant.attempt("sample", engine.finish, sequences, self.retrieve)
        return {"episodes": [sequence_to_json(sequence) | {"adapter": self.version} for sequence in done]}


def plan_memory(config: RolloutWorkerConfig) -> Plan:
    """The memory plan of a worker that samples as much at a time as fits."""
    return answering.plan_memory(config, config.sampling.rollout_batch_size or AT_ONCE)


def build(config: RolloutWorkerConfig, token: str | None = None) -> RolloutService:
    """The service of the settings, its model and retriever ready."""
    protocols = protocols_of(config.protocol, config.mixture)  # a bad prompt file is refused before a download
    plan, folder = plan_memory(config), weights.resolve_folder(config.model.model)
    data = NewQuestionSettings(**vars(config.data))
    questions = read_questions_of(data, config.mixture) if data.data or config.mixture.sources else []
    asking = [question for question in questions if protocols[question.source].searches] or questions
    setup = Setup(config.retrieval, asking, config.common.seed, skip_bad_rows=data.skip_bad_rows)
    retrieve = build_retriever(setup)
    tokenizer = Tokenizer.load(folder, config.model.thinking)
    layouts = {name: Layout(tokenizer, protocol, config.lengths) for name, protocol in protocols.items()}
    policy = load_policy(folder, replace(config.model, adapter=None), config.memory, plan)
    sampler, precision = Sampler(config.sampling.temperature), policy.precision
    engine = Engine(policy.model, layouts[""], sampler, policy.grant, None, precision.autocast, None, layouts)
    facts = facts_of(config, weights.fingerprint(folder), policy.grant.memory.nf4, layouts, setup)
    return RolloutService(engine, retrieve, facts, token)


def serve(config: RolloutWorkerConfig) -> None:
    """Serves until it is interrupted."""
    host, port = config.listen.host, config.listen.port
    token = token_of(host)
    with listen(host, port) as listening:  # before the model is loaded, so that a port in use shows at once
        server = Server(build(config, token), host, port, listening)
        print(f"rollout worker: {url_of(listening)}, for ppo --rollout-server (Ctrl-C stops)", flush=True)
        with server:
            server.serve_forever()
