"""A model on this device that is asked what remote models are asked: the same requests, replies, cache and caps; used
by evaluate, ppo and tune_prompt.

It is loaded whenever there is something to ask, beside the run's own model, and dropped then, as the memory plan of the
run counts it (`memory.work.JudgeWork`). So its weights cost memory only while it replies, and loading them costs
some seconds each time.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

from r3lite.assembly.policy import check_lengths, load_frozen
from r3lite.core.episode import CUT_OFF, Question
from r3lite.core.grant import Grant
from r3lite.devices.precision import Precision, dtype_name, resolve_device, resolve_dtype
from r3lite.llm.client import CachingClient, Client
from r3lite.llm.limits import Budget
from r3lite.llm.replies import Reply, Request, parse
from r3lite.memory.workloads import judge_work
from r3lite.models import activation_checkpointing, weights
from r3lite.protocols.chat import Chat
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import ANSWER_ROOM, Layout
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.sequence import Listener, Sequence
from r3lite.settings import JudgeSettings, LengthSettings, MemorySettings, ModelSettings

FORM = """\
Reply with one JSON object and nothing else: no other word before or after it, no code fence. It must be valid under \
this JSON schema:
{schema}"""


def client_maker(model: ModelSettings, memory: MemorySettings) -> Callable[[JudgeSettings, Path], CachingClient]:
    """What makes the client that --judge names, of its settings and the folder of its cache.

    A local one runs on the device and in the dtype of the run's `model`, which it also is if none is named.
    """

    def make(settings: JudgeSettings, cache: Path) -> CachingClient:
        return LocalClient(settings, cache, model, memory) if settings.judge == "local" else Client(settings, cache)

    return make


class LocalClient(CachingClient):
    """Asks the model of a folder. Replies are greedy, or at --judge-temperature, each from a stream of its own."""

    def __init__(self, settings: JudgeSettings, cache: Path | None, model: ModelSettings, memory: MemorySettings):
        super().__init__(settings, cache, Budget(settings.judge_max_calls))
        self.work = judge_work(settings, model)
        self.folder = weights.resolve_folder(settings.local_model or model.model)
        self.tokenizer = Tokenizer.load(self.folder)
        check_lengths(self.folder, self.tokenizer.size, self.work.row_tokens)
        device = resolve_device(model.device)
        self.precision = Precision(resolve_dtype(model.dtype, device), device)
        self.nf4_cache = memory.nf4_cache

    @functools.cached_property
    def circumstances(self) -> dict:
        """What a reply depends on beside the request."""
        model = {"service": "local", "model": weights.fingerprint(self.folder) or str(self.folder.resolve())}
        model |= {"nf4": self.work.memory.nf4, "dtype": dtype_name(self.precision.dtype)}
        return model | {"temperature": self.settings.judge_temperature, "max_length": self.work.row_tokens}

    def _ask_all(self, requests: dict[str, Request], take: Callable[[str, Reply], None]) -> None:
        """Asks those that can be asked together; those that cannot come last: `take` may raise at one."""
        hindrances = {key: self._hindrance(request) for key, request in requests.items()}
        if asked := {key: request for key, request in requests.items() if hindrances[key] is None}:
            self._ask(asked, take)
        for key, reply in hindrances.items():
            if reply is not None:
                take(key, self._kept(key, reply))

    def _hindrance(self, request: Request) -> Reply | None:
        """Why a request cannot be asked, if it cannot; else it counts as asked."""
        question = as_question(request)
        prompt = len(self.tokenizer.open_chat(question.text, None, question.earlier))
        if prompt + max(request.max_output_tokens, ANSWER_ROOM) > self.work.row_tokens:
            room = f"{prompt} tokens and room for {request.max_output_tokens} are more than {self.work.row_tokens}"
            return Reply(failure="too_long", detail=room)
        if cap := self.budget.reserve(0.0):
            return Reply(failure="capped", detail=cap)
        self._counts["input_tokens"] += prompt
        return None

    def _ask(self, requests: dict[str, Request], take: Callable[[str, Reply], None]) -> None:
        """Gives `take` the reply to each request, by its key, as soon as it is there."""

        def over(key: str, sequence: Sequence) -> None:
            take(key, self._kept(key, self._reply(sequence, requests[key])))

        longest = max(request.max_output_tokens for request in requests.values())
        lengths = LengthSettings(max_new_tokens=longest, max_length=self.work.row_tokens)
        grant, sampler = Grant(self.work.memory), Sampler(self.settings.judge_temperature or 0.0)
        model = load_frozen(self.folder, self.precision, self.work.memory.nf4, self.nf4_cache).eval()
        activation_checkpointing.enable(model, grant)
        autocast = self.precision.autocast
        engine = Engine(model, Layout(self.tokenizer, Chat(), lengths), sampler, grant, autocast=autocast)
        listeners = [Listener(lambda text: None, functools.partial(over, key)) for key in requests]
        questions = [as_question(request) for request in requests.values()]
        engine.run(questions, list(requests), lambda pairs: [[] for _ in pairs], listeners=listeners)

    def _reply(self, sequence: Sequence, request: Request) -> Reply:
        """The reply that a finished sequence is. What it may write is its own limit, whatever others may."""
        written = sum(sequence.action_mask)
        self._counts["output_tokens"] += written
        if sequence.finish == CUT_OFF or written > request.max_output_tokens:
            return Reply(failure="cut", detail=f"{request.max_output_tokens} tokens")
        text = sequence.steps[-1].answer
        return parse(text, request) if text else Reply(failure="empty")


def as_question(request: Request) -> Question:
    """A request as the chat that the model is given, in which the schema of the reply stands as text."""
    form = FORM.format(schema=json.dumps(request.schema)) if request.schema else None
    system = "\n\n".join(text for text in (request.system, form) if text)
    pairs = [("system", system)] * bool(system) + request.turns("assistant")[:-1]
    return Question("request", request.prompt, (), earlier=tuple({"role": r, "content": text} for r, text in pairs))
