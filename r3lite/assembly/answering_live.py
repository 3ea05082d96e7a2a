"""Answers several people at once: modes and adapters on one model, and what is reported of an answer as it grows.

Sets up the lanes of `rollout/lanes.py` from the settings; the thread of the server in `serving/` runs them. Used by
serve.
"""

import contextlib
import itertools
import re
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from r3lite.assembly import policy
from r3lite.assembly.answering import answers_in_steps, plain_baseline, why_no_answer
from r3lite.core.config import UsageError, name_and_path
from r3lite.core.episode import CUT_OFF, Question, Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.datasets.qa import read_questions
from r3lite.memory.plan import Plan, make_plan
from r3lite.memory.workloads import evaluate_workload
from r3lite.models import lora, weights
from r3lite.protocols.base import Protocol as StepFormat
from r3lite.protocols.chat import Chat
from r3lite.protocols.layout import OPENINGS, Layout
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.tokenizer import Tokenizer
from r3lite.retrieval.procedures import Finder
from r3lite.rollout.fetcher import Fetcher
from r3lite.rollout.lanes import LaneEngine, Lanes, Visitor
from r3lite.rollout.sampling import Sampler
from r3lite.rollout.sequence import Listener
from r3lite.rollout.uniforms import Uniforms
from r3lite.serving.asks import MODES, Ask, Message, ServedAnswer, Tell
from r3lite.serving.telling import GrowingAnswer
from r3lite.settings import ServeConfig
from r3lite.training.earlier_run import settings_of

PLAIN = "plain"  # the layout of a chat, with an adapter that has not learned steps
RAG = "rag"  # the layout of one search and a short answer, with an adapter that has not learned steps
BASE = "base"  # the name of the bare base among the adapters
EXAMPLES = 3  # questions that the page offers
ROWS = 32  # answers sampled at a time, if the memory allows it and --rollout-batch-size is not set


def adapters_of(config: ServeConfig) -> dict[str, str | None]:
    """Returns the folder of each adapter by its name, in the order of the settings; the bare base has None.

    Raises UsageError for a name that is missing, unusable or given twice.
    """
    names_and_folders: list[tuple[str, str | None]] = []
    if config.model.adapter:
        names_and_folders.append(("", config.model.adapter))
    for entry in config.modes.adapters or ():
        names_and_folders.append((BASE, None) if entry == BASE else name_and_path(entry))
    folders: dict[str, str | None] = {}
    for name, folder in names_and_folders:
        if not name and folder:
            name = _name_of(Path(folder))
        if not re.fullmatch(r"[\w-]{1,64}", name, re.ASCII):
            raise UsageError(
                f"the adapter {folder} needs a name of letters, digits, - and _: pass --adapters NAME=FOLDER",
                code="adapter-unnamed",
            )
        if name == BASE and folder is not None:
            raise UsageError(
                f"the adapter {folder} cannot be named {BASE}: that is the bare model; pass --adapters NAME=FOLDER",
                code="adapter-named-base",
            )
        if name in folders:
            raise UsageError(f"two adapters are named {name}: pass --adapters NAME=FOLDER", code="adapter-name-twice")
        folders[name] = folder
    return folders or {BASE: None}


def _name_of(folder: Path) -> str:
    """Returns an adapter's name, made from its folder: reinforce-baseline for reinforce++-baseline/adapter."""
    name = folder.parent.name if folder.name == "adapter" else folder.name
    return re.sub(r"[^\w-]+", "", name, flags=re.ASCII)[:64]


def adapters_in_steps(config: ServeConfig, adapters: Collection[str]) -> set[str]:
    """Returns the names of the adapters that answer in steps: none with --steps off, else all adapters.

    The bare base is among them only if `answers_in_steps` says so.
    """
    if config.answers.steps == "off":
        return set()
    bare = replace(config, model=replace(config.model, adapter=None))
    base_in_steps = answers_in_steps(bare)
    return {name for name in adapters if name != BASE or base_in_steps}


def modes_of(config: ServeConfig, adapters: Collection[str], searches: bool) -> dict[str, str]:
    """Returns the name of the adapter of each mode. Raises UsageError if the settings name an unknown adapter.

    The mode search is left out if there is nothing to search, and reasoning if its adapter does not answer in steps.
    """
    names = list(adapters)
    in_steps = adapters_in_steps(config, adapters)
    candidates = [name for name in names if name in in_steps] or names
    steps_adapter = "rl" if "rl" in candidates else candidates[-1]
    defaults = {
        "chat": "sft" if "sft" in names else names[0],
        "reasoning": steps_adapter,
        "search": steps_adapter,
    }
    by_mode = {mode: getattr(config.modes, f"{mode}_adapter") or defaults[mode] for mode in MODES}
    for mode, name in by_mode.items():
        if name not in names:
            raise UsageError(
                f"--{mode}-adapter is {name}; choose from {', '.join(names)}, or add it to --adapters",
                code="mode-adapter-unknown",
            )
    if not searches:
        del by_mode["search"]
    if by_mode["reasoning"] not in in_steps:
        del by_mode["reasoning"]
    return by_mode


def plan_lanes(config: ServeConfig) -> Plan:
    """Returns the memory plan of answering --rollout-batch-size questions (default: ROWS) at a time with all adapters.

    Each adapter is counted with the highest rank and all the projections that any of them has, so adapters of different
    shapes take less than planned. The plan allows for requests that set their own temperature, top-k and top-p.
    """
    names = adapters_of(config)
    folders = [folder for folder in names.values() if folder]
    workload = evaluate_workload(
        model=replace(config.model, adapter=folders[0] if folders else None),
        lengths=config.lengths,
        retrieval=config.retrieval,
        questions=config.sampling.rollout_batch_size or ROWS,
        draft_tokens=config.sampling.draft_tokens,
        truncates=True,
    )
    adapters = [adapter for folder in folders if (adapter := lora.read_adapter_config(folder))]
    if adapters:
        targets = dict.fromkeys(name for adapter in adapters for name in adapter.targets)
        workload = replace(workload, lora_r=max(adapter.r for adapter in adapters), targets=tuple(targets))
    workload = replace(workload, adapters=len(folders), lanes=len(names), own_samplers=True)
    return make_plan(workload, config.memory, config.sampling)


def layouts_of(config: ServeConfig, tokenizer: Tokenizer, protocol: StepFormat) -> dict[str, Layout]:
    """Returns the layout of every mode by its name, and PLAIN and RAG for adapters that have not learned steps."""
    plain = OPENINGS[plain_baseline(config)]
    layouts = {
        PLAIN: Layout(tokenizer, Chat(config.protocol.system_prompt), config.lengths),
        RAG: Layout(
            tokenizer,
            protocol=build_protocol(config.protocol, plain),
            lengths=replace(config.lengths, max_hops=1),
            opening=plain,
        ),
    }
    # In chat the answer is forced at once. In a mode that does not retrieve, the answer is forced at the first query.
    for mode, opening in (("chat", "no-retrieval"), ("reasoning", "none"), ("search", "none")):
        max_hops = config.lengths.max_hops if mode in config.modes.retrieving_modes else 0
        layouts[mode] = Layout(
            tokenizer,
            protocol=protocol,
            lengths=replace(config.lengths, max_hops=max_hops),
            opening=OPENINGS[opening],
        )
    return layouts


def examples_of(config: ServeConfig, folders: Collection[str | None]) -> list[str]:
    """Returns the first questions of --examples.

    Without it, returns those of the file that an adapter was trained on: of the last adapter whose file can be read.
    """
    if config.modes.examples:
        return [question.text for question in read_questions(config.modes.examples, EXAMPLES)]
    for folder in reversed(list(folders)):
        data = settings_of(folder).get("data") if folder else None
        if isinstance(data, str) and Path(data).is_file():
            with contextlib.suppress(R3LiteError):  # the file has conversations, or has changed since
                return [question.text for question in read_questions(data, EXAMPLES)]
    return []


def name_of_documents(config: ServeConfig) -> str:
    """Returns the name of what is searched, without the folders that lead to it."""
    settings = config.retrieval
    if not settings.has_passages:
        return settings.retriever
    return Path(settings.index or settings.corpus or "").name


class LiveAnswers:
    """The model behind the server; implements `serving.asks.Answering`."""

    def __init__(self, config: ServeConfig, retrieve: Retrieve, finder: Finder | None = None):
        """`retrieve` and `finder` are those of the settings. With --retriever none there is no search mode."""
        self.config = config
        self.retrieve = retrieve
        self.finder = finder
        protocol = build_protocol(config.protocol)
        folders = adapters_of(config)
        plan = plan_lanes(config)
        self.searches = protocol.can_search and config.retrieval.retriever != "none"
        self.modes = modes_of(config, folders, self.searches)
        self.in_steps = adapters_in_steps(config, folders)
        self.adapters = list(folders)
        folder = weights.resolve_folder(config.model.model)
        tokenizer = Tokenizer.load(folder, config.model.thinking)
        loaded = load_adapters(
            folder,
            config=config,
            folders=folders,
            plan=plan,
        )
        self.layouts = layouts_of(config, tokenizer, protocol)
        self.engine = LaneEngine(
            loaded.model,
            layout=self.layouts[PLAIN],
            sampler=Sampler(),
            grant=loaded.grant,
            autocast=loaded.precision.autocast,
            layouts=self.layouts,
            draft_tokens=config.sampling.draft_tokens,
        )
        self.rows = plan.workload.lane_rows(loaded.grant.memory.rollout_batch_size)
        documents = name_of_documents(config) if self.searches else None
        self.about = {
            "model": Path(config.model.model).name,
            "adapters": [name for name in folders if name != BASE],
            "documents": documents,
            "examples": examples_of(config, folders.values()),
        }
        self.numbers = itertools.count()  # of the asks
        self.growing: dict[int, GrowingAnswer] = {}  # the unfinished answers, by the id() of their sequences
        self.lanes = self._lanes()

    def prepare(self, ask: Ask, tell: Tell | None) -> GrowingAnswer:
        """Returns the ask with its opened sequence.

        If the conversation is too long, its first messages are left out.
        """
        layout_name = self._layout(ask)
        layout = self.layouts[layout_name]
        number = next(self.numbers)
        seed = f"{self.config.common.seed}/{number}" if ask.seed is None else f"{ask.seed}"
        question = Question(id=f"{number}", text=ask.text, answers=(), source=layout_name)
        if self.finder:
            question = self.finder.with_procedure(question)  # adds the procedure that fits the question
        sequence = Visitor(
            replace(question, earlier=self._earlier(ask, layout_name, question.procedure)),
            stream=Uniforms(seed),
            adapter=self._adapter_in_model(ask.adapter),
            sampler=self._sampler(ask),
            max_tokens=ask.max_tokens,
        )
        layout.open(sequence)
        growing = GrowingAnswer(
            ask,
            transcript=sequence,
            protocol=layout.protocol,
            tell=tell,
        )
        sequence.listener = Listener(growing.take_text, growing.take_step)
        if sequence.pending:
            self._search_first(sequence, layout)
        return growing

    def _search_first(self, sequence: Visitor, layout: Layout) -> None:
        """Retrieves what a layout searches before the model's first turn, and appends the documents."""
        with contextlib.closing(Fetcher(self.retrieve)) as fetcher:
            ((_, documents),) = fetcher.fetch([sequence])
        layout.splice(sequence, documents)
        sequence.listener.on_step(sequence)

    def warm_up(self) -> None:
        """With every adapter, answers as many questions as it has rows, limited to 1, 2, 3, ... tokens.

        So one answer ends after each iteration, and passes over every number of rows are run. What a device prepares
        for each number takes time and memory: it is prepared here, before anyone waits for an answer.
        """
        for adapter in self.adapters:
            mode = "reasoning" if adapter in self.in_steps else "chat"
            for max_tokens in range(1, self.rows + 1):
                ask = Ask("Hello", mode, adapter, max_tokens=max_tokens)
                self.join(self.prepare(ask, None))
        while self.growing:
            self.iterate()

    def join(self, growing: GrowingAnswer) -> None:
        """Begins an answer, or lets it wait until a row is free."""
        self.lanes.join(growing.transcript)
        self.growing[id(growing.transcript)] = growing

    def leave(self, growing: GrowingAnswer) -> None:
        """Lets an answer end soon, unfinished."""
        growing.transcript.leaving = True

    def iterate(self) -> list[tuple[GrowingAnswer, ServedAnswer | None]]:
        """Samples a token of every row; returns the answers that are finished, None for one that has failed."""
        finished = []
        for sequence in self.lanes.iterate():
            growing = self.growing.pop(id(sequence))
            answer = None
            if sequence.error:
                print(f"an answer was given up: {sequence.error}", file=sys.stderr)
            else:
                answer = growing.answer(why_unanswered(sequence, growing.protocol))
            finished.append((growing, answer))
        return finished

    def restart(self) -> None:
        """Forgets all that joined, after `iterate` failed."""
        self.lanes.close()
        self.growing.clear()
        self.lanes = self._lanes()

    def close(self) -> None:
        """Ends the lanes."""
        self.lanes.close()

    @property
    def learned_modes(self) -> list[str]:
        """The modes that `auto` chooses from.

        Reasoning is left out if the server can search but this mode does not retrieve: its adapter has learned to
        search, and without documents it would guess.
        """
        if not self._reasons_as_learned():
            return [mode for mode in self.modes if mode != "reasoning"]
        return list(self.modes)

    def _reasons_as_learned(self) -> bool:
        """Returns whether reasoning mode works as its adapter has learned to."""
        return not self.searches or "reasoning" in self.config.modes.retrieving_modes

    @property
    def notes(self) -> dict[str, str]:
        """What a person who chooses a mode should know, by mode."""
        notes = {}
        adapter = self.modes["chat"]
        if self._layout(Ask("", "chat", adapter)) != PLAIN:
            notes["chat"] = f"The adapter {adapter} is trained on steps, not on chat: it gives a short answer at once"
        adapter = self.modes.get("reasoning")
        if adapter and not self._reasons_as_learned():
            notes["reasoning"] = f"The adapter {adapter} has learned to search: without documents it guesses"
        adapter = self.modes.get("search")
        if adapter and adapter not in self.in_steps:
            notes["search"] = "Plain RAG: one search and a short answer, as the model is not trained on steps"
        return notes

    @property
    def missing(self) -> dict[str, str]:
        """Why a mode is not offered, by mode."""
        reasons = {
            "reasoning": "The model has not learned to answer in steps",
            "search": "This server cannot search",
        }
        return {mode: reason for mode, reason in reasons.items() if mode not in self.modes}

    def _layout(self, ask: Ask) -> str:
        """Returns the name of the layout in which an ask is answered."""
        has_learned_steps = ask.adapter in self.in_steps
        if ask.mode == "search" and not has_learned_steps:
            return RAG
        style = "auto"
        if ask.mode == "chat":
            style = self.config.modes.chat_style
        if style == "plain" or (style == "auto" and not has_learned_steps):
            return PLAIN
        return ask.mode

    def _sampler(self, ask: Ask) -> Sampler:
        """Returns the sampler of the settings, with what the ask sets itself."""
        temperature = self.config.sampling.temperature
        if ask.temperature is not None:
            temperature = ask.temperature
        top_k = self.config.truncation.top_k_sampling
        if ask.top_k is not None:
            top_k = max(ask.top_k, 0)
        top_p = self.config.truncation.top_p
        if ask.top_p is not None:
            top_p = ask.top_p
        return Sampler(temperature, top_k, top_p)

    def _earlier(self, ask: Ask, layout_name: str, procedure: str) -> tuple[Message, ...]:
        """Returns the earlier messages for the model: as many of the last ones as fit.

        With them, the whole prompt takes at most half of --max-length. If some are left out, the conversation begins
        with a message of the user, as chat templates expect.
        A system message of the client is used in plain chats only: a step format has its own.
        """
        layout = self.layouts[layout_name]
        system: tuple[Message, ...] = ()
        if layout_name == PLAIN:
            system = tuple(message for message in ask.earlier[:1] if message["role"] == "system")
        turns: tuple[Message, ...] = ()
        if ask.mode in self.config.modes.memory_modes:
            turns = tuple(message for message in ask.earlier if message["role"] != "system")
        limit = layout.lengths.max_length // 2
        while turns and len(layout.prompt(ask.text, system + turns, procedure)) > limit:
            turns = turns[1:]
            while turns and turns[0]["role"] != "user":
                turns = turns[1:]
        return system + turns

    def _lanes(self) -> Lanes:
        return Lanes(
            self.engine,
            adapters=[self._adapter_in_model(name) for name in self.adapters],
            rows=self.rows,
            retrieve=self.retrieve,
        )

    def _adapter_in_model(self, name: str) -> str | None:
        """Returns the name of an adapter as the model knows it: None for the bare base."""
        return None if name == BASE else name


def why_unanswered(sequence: Visitor, protocol: StepFormat) -> str:
    """Returns why a finished sequence has no answer: the limit of its request, or what `why_no_answer` says."""
    if sequence.finish == CUT_OFF and sequence.tokens_left <= 0:
        # The step that was under way is not among the sequence's steps.
        return f"step {len(sequence.steps) + 1} was not finished within the request's {sequence.max_tokens} tokens"
    return why_no_answer(sequence.episode(), protocol.faults)


def load_adapters(folder: Path, config: ServeConfig, folders: dict[str, str | None], plan: Plan) -> policy.Policy:
    """Returns the base with all adapters, each checked to be of this base."""
    loaded = policy.load_policy(
        folder,
        settings=replace(config.model, adapter=None),
        memory=config.memory,
        plan=plan,
    )
    fingerprint = weights.fingerprint(folder)
    for name, adapter in folders.items():
        policy.warn_of_other_format(adapter, config)
        policy.warn_of_short_sft(adapter)
        if adapter is not None:
            policy.check_base(replace(config.model, adapter=adapter), fingerprint)
            lora.load_adapter(
                loaded.model,
                name=name,
                folder=adapter,
                trainable=False,
            )
    return loaded
