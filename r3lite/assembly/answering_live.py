"""Answers several people at once: modes and adapters on one model, and what is reported of an answer as it grows.

Sets up the lanes of `rollout/lanes.py` as the settings say and gives them to `serving/` as what answers. Used by serve.
"""

import itertools
import random
import re
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from r3lite.assembly import policy
from r3lite.assembly.answering import why_no_answer
from r3lite.core.config import UsageError
from r3lite.core.episode import Question, Retrieve
from r3lite.memory.plan import Plan, make_plan
from r3lite.memory.workloads import evaluate_workload
from r3lite.models import lora, weights
from r3lite.protocols.base import Protocol as StepFormat
from r3lite.protocols.chat import Chat
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.protocols.transcript import OPENINGS, Layout
from r3lite.retrieval.procedures import Finder
from r3lite.rollout.lanes import LaneEngine, Lanes, Visitor
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.sequence import Listener
from r3lite.serving.asks import MODES, Answer, Ask, Message, Tell
from r3lite.serving.telling import Growing
from r3lite.settings import ServeConfig

PLAIN = "plain"  # the layout of a chat without steps
BASE = "base"  # the name of the bare base among the adapters
ROWS = 32  # answers sampled at a time, if the memory has room and nothing else is said


def adapters_of(config: ServeConfig) -> dict[str, str | None]:
    """The folder of each adapter by its name, in order; None: the bare base."""
    named: dict[str, str | None] = {}
    for entry in (*((config.model.adapter,) if config.model.adapter else ()), *(config.modes.adapters or ())):
        name, _, folder = entry.rpartition("=")
        path = Path(folder)
        if not name:  # that of the folder, such as reinforce-baseline of reinforce++-baseline
            last = path.parent.name if path.name == "adapter" else path.name
            name = re.sub(r"[^\w-]+", "", last, flags=re.ASCII)[:64]
        if not re.fullmatch(r"[\w-]{1,64}", name, re.ASCII):
            raise UsageError(f"the adapter {folder} needs a name of letters, digits, - and _: pass NAME=FOLDER")
        if name == BASE and entry != BASE:
            raise UsageError(f"the adapter {folder} cannot be named {BASE}: that is the bare model; pass NAME=FOLDER")
        if name in named:
            raise UsageError(f"two adapters are named {name}: pass NAME=FOLDER")
        named[name] = None if entry == BASE else folder
    return named or {BASE: None}


def modes_of(config: ServeConfig, adapters: Collection[str], searches: bool) -> dict[str, str]:
    """The name of the adapter of each mode; search only if there is something to search."""
    settings, names = config.modes, list(adapters)
    usual = {"chat": "sft" if "sft" in names else names[0]}
    usual |= dict.fromkeys(("reasoning", "search"), "rl" if "rl" in names else names[-1])
    chosen = {mode: getattr(settings, f"{mode}_adapter") or usual[mode] for mode in MODES}
    for mode, name in chosen.items():
        if name not in names:
            raise UsageError(f"--{mode}-adapter is {name}; choose from {', '.join(names)}, or add it to --adapters")
    return chosen if searches else {mode: name for mode, name in chosen.items() if mode != "search"}


def plan_lanes(config: ServeConfig) -> Plan:
    """The memory plan of answering ROWS questions at a time with all adapters."""
    folders = [folder for folder in adapters_of(config).values() if folder]
    model = replace(config.model, adapter=folders[0] if folders else None)
    workload = evaluate_workload(model, config.lengths, config.retrieval, config.sampling.rollout_batch_size or ROWS)
    return make_plan(replace(workload, adapters=len(folders)), config.memory, config.sampling)


def layouts_of(config: ServeConfig, tokenizer: Tokenizer, protocol: StepFormat) -> dict[str, Layout]:
    """The layout of every mode, and of a chat without steps."""
    layouts = {PLAIN: Layout(tokenizer, Chat(config.protocol.system_prompt), config.lengths)}
    for mode, opening in (("chat", "no-retrieval"), ("reasoning", "none"), ("search", "none")):
        hops = config.lengths.max_hops if mode in config.modes.retrieving_modes else 0
        layouts[mode] = Layout(tokenizer, protocol, replace(config.lengths, max_hops=hops), OPENINGS[opening])
    return layouts


class LiveAnswers:
    """What answers for the server; see `serving.asks.Answering`."""

    def __init__(self, config: ServeConfig, retrieve: Retrieve, finder: Finder | None = None):
        """`retrieve` and `finder` are those of the settings; with --retriever none there is no mode search."""
        protocol, folders, plan = build_protocol(config.protocol), adapters_of(config), plan_lanes(config)
        searches = protocol.searches and config.retrieval.retriever != "none"
        self.modes, self.adapters = modes_of(config, folders, searches), list(folders)
        folder = weights.resolve_folder(config.model.model)
        tokenizer = Tokenizer.load(folder, config.model.thinking)
        loaded = load_adapters(folder, config, folders, plan)
        self.config, self.layouts = config, layouts_of(config, tokenizer, protocol)
        autocast, plain = loaded.precision.autocast, self.layouts[PLAIN]
        self.engine = LaneEngine(loaded.model, plain, Sampler(), loaded.grant, autocast=autocast, layouts=self.layouts)
        self.retrieve, self.finder = retrieve, finder
        self.rows = max(1, loaded.grant.memory.rollout_batch_size // len(folders))
        self.asked = itertools.count()
        self.growing: dict[int, Growing] = {}  # by the id of its sequence
        self.lanes = self._lanes()

    def prepare(self, ask: Ask, tell: Tell | None) -> Growing:
        """The ask with its opened sequence. The first messages of a conversation that leave no room are left out."""
        kind = self._layout(ask)
        default, layout = self.config.truncation, self.layouts[kind]
        temperature = self.config.sampling.temperature if ask.temperature is None else ask.temperature
        top_k = default.top_k_sampling if ask.top_k is None else max(ask.top_k, 0)
        sampler = Sampler(temperature, top_k, default.top_p if ask.top_p is None else ask.top_p)
        number = next(self.asked)
        seed = f"{self.config.common.seed}/{number}" if ask.seed is None else f"{ask.seed}"
        question = Question(f"{number}", ask.text, (), source=kind)
        if self.finder:
            question = self.finder.before(question)
        question = replace(question, earlier=self._earlier(ask, kind, question.procedure))
        stream, adapter = random.Random(seed), self._switch(ask.adapter)
        sequence = Visitor(question, stream=stream, adapter=adapter, sampler=sampler, most=ask.max_tokens)
        layout.open(sequence)
        growing = Growing(ask, sequence, layout.protocol, tell)
        sequence.listener = Listener(growing.hear, growing.look)
        return growing

    def warm_up(self) -> None:
        """Answers a question in each row, each a token shorter, so that products of every size are met before someone
        waits: what a device prepares for a size takes time, and memory."""
        for most in range(1, self.rows + 1):
            self.join(self.prepare(Ask("Hello", "reasoning", self.modes["reasoning"], max_tokens=most), None))
        while self.growing:
            self.iterate()

    def join(self, growing: Growing) -> None:
        self.lanes.join(growing.transcript)
        self.growing[id(growing.transcript)] = growing

    def leave(self, growing: Growing) -> None:
        growing.transcript.leaving = True

    def iterate(self) -> list[tuple[Growing, Answer | None]]:
        ended = []
        for sequence in self.lanes.iterate():
            growing, answer = self.growing.pop(id(sequence)), None
            if sequence.error:
                print(f"an answer was given up: {sequence.error}", file=sys.stderr)
            else:
                answer = growing.answer(why_no_answer(sequence.episode(), growing.protocol.faults))
            ended.append((growing, answer))
        return ended

    def restart(self) -> None:
        self.lanes.close()
        self.growing.clear()
        self.lanes = self._lanes()

    def close(self) -> None:
        self.lanes.close()

    @property
    def notes(self) -> dict[str, str]:
        """By mode, what a person should know who chooses it."""
        adapter = self.modes["chat"]
        if self._layout(Ask("", "chat", adapter)) == PLAIN:
            return {}
        return {"chat": f"The adapter {adapter} is trained on steps, not on chat: it gives a short answer at once"}

    def _layout(self, ask: Ask) -> str:
        style = self.config.modes.chat_style
        if style == "auto":
            style = "plain" if ask.adapter == BASE else "answer"
        return PLAIN if ask.mode == "chat" and style == "plain" else ask.mode

    def _earlier(self, ask: Ask, kind: str, procedure: str) -> tuple[Message, ...]:
        """The earlier messages that are given to the model: the last ones, which leave half of an episode free.

        A step format has its own system message; one of the client's is for plain chats.
        """
        layout, remembers = self.layouts[kind], ask.mode in self.config.modes.memory_modes
        system = tuple(m for m in ask.earlier[:1] if m["role"] == "system" and kind == PLAIN)
        said = tuple(m for m in ask.earlier if m["role"] != "system" and remembers)
        while said and len(layout.prompt(ask.text, system + said, procedure)) > layout.lengths.max_length // 2:
            said = said[2:]
        return system + said

    def _lanes(self) -> Lanes:
        return Lanes(self.engine, [self._switch(name) for name in self.adapters], self.rows, self.retrieve)

    def _switch(self, name: str) -> str | None:
        return None if name == BASE else name


def load_adapters(folder: Path, config: ServeConfig, folders: dict[str, str | None], plan: Plan) -> policy.Policy:
    """The base with all adapters, each checked to be of this base."""
    loaded = policy.load_policy(folder, replace(config.model, adapter=None), config.memory, plan)
    fingerprint = weights.fingerprint(folder)
    for name, adapter in folders.items():
        policy.warn_of_other_format(adapter, config)
        if adapter is not None:
            policy.check_base(replace(config.model, adapter=adapter), fingerprint)
            lora.load_adapter(loaded.model, name, adapter, trainable=False)
    return loaded
