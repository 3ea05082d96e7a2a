"""The client of a model on this device. Requests, replies, cache and caps are those of the client of a remote model.

Used by evaluate, ppo and tune_prompt. The model is loaded beside the run's own model whenever there is something to
ask, and dropped after its replies; the memory plan of the run allows for this (`memory.work.JudgeWork`). So its weights
take memory only while it replies, but loading them takes some seconds each time.
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
from r3lite.protocols.layout import Layout
from r3lite.protocols.observations import ANSWER_ROOM
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.rollout.engine import Engine
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.sequence import Listener, Sequence
from r3lite.settings import JudgeSettings, LengthSettings, MemorySettings, ModelSettings

FORM = """\
Reply with one JSON object and nothing else: no other word before or after it, no code fence. It must be valid under \
this JSON schema:
{schema}"""


def client_maker(model: ModelSettings, memory: MemorySettings) -> Callable[[JudgeSettings, Path], CachingClient]:
    """Returns a function that makes the client that --judge names, from its settings and the folder of its cache.

    A local client runs on the device and in the dtype of the run's `model`. Without --judge-model, it asks the base of
    that model.
    """

    def make(settings: JudgeSettings, cache: Path) -> CachingClient:
        if settings.judge == "local":
            return LocalClient(
                settings,
                cache=cache,
                model=model,
                memory=memory,
            )
        return Client(settings, cache)

    return make


class LocalClient(CachingClient):
    """Asks the model of a folder.

    Replies are greedy, or sampled at --judge-temperature, each from a random stream of its own.
    """

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
        """What a reply depends on besides the request."""
        return {
            "service": "local",
            "model": weights.fingerprint(self.folder) or str(self.folder.resolve()),
            "nf4": self.work.memory.nf4,
            "dtype": dtype_name(self.precision.dtype),
            "temperature": self.settings.judge_temperature,
            "max_length": self.work.row_tokens,
        }

    def _ask_all(self, requests: dict[str, Request], take: Callable[[str, Reply], None]) -> None:
        """Asks all answerable requests together. Refused requests come last, since `take` may raise at one of them."""
        answerable: dict[str, Request] = {}
        refusals: dict[str, Reply] = {}
        for key, request in requests.items():
            refusal = self._refusal(request)
            if refusal is None:
                answerable[key] = request
            else:
                refusals[key] = refusal
        if answerable:
            self._ask(answerable, take)
        for key, refusal in refusals.items():
            take(key, self._count_and_store(key, refusal))

    def _refusal(self, request: Request) -> Reply | None:
        """Returns the failed reply to a request that cannot be asked.

        If it can be asked, counts it as asked and returns None.
        """
        question = as_question(request)
        prompt_tokens = len(self.tokenizer.open_chat(question.text, None, question.earlier))
        output_tokens = request.max_output_tokens
        limit = self.work.row_tokens
        if prompt_tokens + max(output_tokens, ANSWER_ROOM) > limit:
            detail = f"{prompt_tokens} tokens and room for {output_tokens} are more than {limit}"
            return Reply(failure="too_long", detail=detail)
        cap = self.budget.reserve(0.0)
        if cap:
            return Reply(failure="capped", detail=cap)
        self._counts["input_tokens"] += prompt_tokens
        return None

    def _ask(self, requests: dict[str, Request], take: Callable[[str, Reply], None]) -> None:
        """Calls `take` with the key and the reply of each request as soon as the reply is there."""

        def take_sequence(key: str, sequence: Sequence) -> None:
            take(key, self._count_and_store(key, self._reply(sequence, requests[key])))

        engine = self._load(max(request.max_output_tokens for request in requests.values()))
        engine.run(
            questions=[as_question(request) for request in requests.values()],
            seeds=list(requests),
            retrieve=lambda pairs: [[] for _ in pairs],
            listeners=[Listener(lambda text: None, functools.partial(take_sequence, key)) for key in requests],
        )

    def _load(self, max_new_tokens: int) -> Engine:
        """Returns an engine with the model, which is loaded now."""
        memory = self.work.memory
        model = load_frozen(
            self.folder,
            precision=self.precision,
            nf4=memory.nf4,
            cache=self.nf4_cache,
        ).eval()
        grant = Grant(memory)
        activation_checkpointing.enable(model, grant)
        lengths = LengthSettings(max_new_tokens=max_new_tokens, max_length=self.work.row_tokens)
        return Engine(
            model,
            layout=Layout(self.tokenizer, Chat(), lengths),
            sampler=Sampler(self.settings.judge_temperature or 0.0),
            grant=grant,
            autocast=self.precision.autocast,
        )

    def _reply(self, sequence: Sequence, request: Request) -> Reply:
        """Returns a finished sequence as a reply.

        The limit of its tokens is that of its own request; the engine's is the highest of all requests.
        """
        output_tokens = sum(sequence.action_mask)
        self._counts["output_tokens"] += output_tokens
        if sequence.finish == CUT_OFF or output_tokens > request.max_output_tokens:
            return Reply(failure="cut", detail=f"{request.max_output_tokens} tokens")
        text = sequence.steps[-1].answer
        return parse(text, request) if text else Reply(failure="empty")


def as_question(request: Request) -> Question:
    """Returns a request as the chat that the model is given, in which the schema of the reply stands as text."""
    instructions = [request.system] if request.system else []
    if request.schema:
        instructions.append(FORM.format(schema=json.dumps(request.schema)))
    messages = []
    if instructions:
        messages.append({"role": "system", "content": "\n\n".join(instructions)})
    for role, text in request.turns("assistant")[:-1]:
        messages.append({"role": role, "content": text})
    return Question(id="request", text=request.prompt, answers=(), earlier=tuple(messages))
