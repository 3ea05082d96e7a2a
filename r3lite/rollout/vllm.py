"""Samples episodes with a vLLM server.

The turns come from its /v1/completions, which takes and returns token ids. The documents are retrieved here.

vLLM is started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and reads each adapter from a path that
both machines have. Each adapter is served under a model name of its own, so that a completion by another adapter is
noticed. The log-probabilities must be those of the distribution that was sampled from. At --temperature 1 they always
are. At other temperatures vLLM needs --logprobs-mode processed_logprobs: raw log-probabilities are computed before the
temperature is applied.
"""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from r3lite.core.episode import Retrieve
from r3lite.core.errors import R3LiteError
from r3lite.core.records import InvalidRecord, Record, shown
from r3lite.llm.http_client import Link, Unanswered, WrongReply
from r3lite.protocols.layout import Layout
from r3lite.rollout.fetcher import Fetcher
from r3lite.rollout.sequence import Sequence
from r3lite.rollout.wire import AdapterFiles, Ticket, log_probabilities, whole_numbers
from r3lite.settings import PpoConfig

COMMAND = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank R"
START = f"Start it with: {COMMAND}. It must see the run's --output at the same path."
RAW_REMEDY = "Start vLLM with --logprobs-mode processed_logprobs, or pass --temperature 1."
# Settings of each completion: no truncation and no penalties, and all sampled tokens are returned, with their ids and
# log-probabilities ("logprobs": 0 means those of the sampled tokens only).
NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "logprobs": 0,
}
UPDATE = "Update vLLM to a version with return_token_ids."
TRIES = 100  # maximum requests for one turn
ID_LIMIT = 1 << 31  # the token ids of any model are below this number


@dataclass(frozen=True)
class ServedModel:
    """The model of a server: its name there, its path or name on a hub, and the length of its context in tokens."""

    name: str
    root: str
    max_length: int


class VllmServer:
    """A vLLM server. It batches all requests that it has at the same time."""

    slots = 2  # calls of `sample` at a time; with one server, a round consists of two

    def __init__(
        self,
        link: Link,
        config: PpoConfig,
        layout_of: Callable[[Sequence], Layout],
        output: Path,
    ):
        self.link = link
        self.config = config
        self.layout_of = layout_of
        self.adapters = output.absolute() / "served"
        self.name = ""  # model name of the adapter that vLLM has loaded; empty if it may have none
        self._loading = threading.Lock()
        self._retrieving = threading.Lock()

    def check(self) -> str:
        """Returns the server's address and version; raises R3LiteError if it would not sample as the trainer does."""
        url = self.link.url
        model = self.config.model.model
        max_length = self.config.lengths.max_length

        def read(reply: Record) -> ServedModel:
            first = reply.records("data", minimum=1)[0]
            name = first.text("id")
            return ServedModel(name, first.text("root", name), first.whole("max_model_len", max_length))

        served = self.link.ask("/v1/models", None, server="vLLM", read=read, remedy=START)
        if Path(served.root).name != Path(model).name:
            raise R3LiteError(
                f"{url} serves {served.root}, but --model is {model}",
                "Start vLLM with the same model.",
                code="vllm-model-differs",
            )
        if served.max_length < max_length:
            cause = f"--max-length is {max_length}, but {url} takes at most {served.max_length} tokens"
            remedy = f"Pass --max-length {served.max_length}, or start vLLM with a larger --max-model-len."
            raise R3LiteError(cause, remedy, code="vllm-length")
        self._check_logprobs(served.name)
        version = self.link.ask("/version", None, server="vLLM", read=lambda reply: reply.text("version"))
        return f"{url} (vLLM {version})"

    def _check_logprobs(self, model: str) -> None:
        """Raises R3LiteError if log-probabilities are raw, that is, the same at two temperatures.

        A log-probability of 0 would be the same in both modes, so it proves nothing.
        """
        if self.config.sampling.temperature == 1:
            return
        request = {"model": model, "prompt": [0], "max_tokens": 1, "logprobs": 1, "top_k": 1}
        logprobs = []
        for temperature in (1.0, self.config.sampling.temperature):
            body = request | {"temperature": temperature}
            logprobs.append(self.link.ask("/v1/completions", body, server="vLLM", read=_logprobs))
        at_one, at_temperature = logprobs
        if at_one == at_temperature and at_temperature != [0.0]:
            raise R3LiteError(
                f"{self.link.url} returns log-probabilities without --temperature", RAW_REMEDY, code="vllm-raw-logprobs"
            )

    def sample(
        self,
        tickets: list[Ticket],
        adapter: AdapterFiles,
        retrieve: Retrieve,
    ) -> list[Sequence]:
        """Returns the episodes of tickets. Each episode has a thread; only one thread at a time asks the retriever."""
        with self._loading:
            self._load(adapter)
        sequences = [ticket.sequence() for ticket in tickets]
        try:
            with closing(Fetcher(retrieve)) as fetcher, ThreadPoolExecutor(len(tickets), "turns") as pool:
                # `list` waits for all episodes, and raises the first error.
                list(pool.map(lambda sequence: self._finish(sequence, fetcher), sequences))
        except Unanswered as error:
            self.name = ""  # vLLM may have been restarted, and then has no adapter
            error.is_transient = True
            raise
        return sequences

    def _load(self, adapter: AdapterFiles) -> None:
        """Makes vLLM load an adapter and unload the one before; does nothing if it has loaded this one already."""
        name = f"r3lite-{adapter.version[:16]}"
        if name == self.name:
            return
        folder = self.adapters / name
        adapter.write(folder)
        try:
            self.link.text("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except Unanswered as error:
            if error.is_transient:
                raise
            if "already been loaded" not in error.cause:
                raise R3LiteError(f"vLLM cannot load {folder}: {error.cause}", START, code=error.code) from error
        if self.name:
            try:
                self.link.text("/v1/unload_lora_adapter", {"lora_name": self.name})
            except Unanswered as error:
                if error.status != 404:  # 404: vLLM was restarted and does not know the old adapter
                    raise
            shutil.rmtree(self.adapters / self.name, ignore_errors=True)
        self.name = name

    def _finish(self, sequence: Sequence, fetcher: Fetcher) -> None:
        """Samples an episode to its end, as Engine.finish does."""
        layout = self.layout_of(sequence)
        if not sequence.tokens:
            layout.open(sequence)
        while sequence.finish is None:
            if sequence.pending:
                with self._retrieving:
                    ((_, documents),) = fetcher.fetch([sequence])
                layout.splice(sequence, documents)
            else:
                self._sample_turn(sequence, layout)
                layout.close_turn(sequence)

    def _sample_turn(self, sequence: Sequence, layout: Layout) -> None:
        """Samples a turn. Asks vLLM again if its completion ends before the turn does.

        A completion is also cut before a token id of the model's padding rows, which is no token of the vocabulary.
        """
        for _ in range(TRIES):
            for token, logprob in self._completion(sequence, layout):
                if token >= layout.tokenizer.size:
                    break
                sequence.write([token])
                sequence.logprobs.append(logprob)
                sequence.values.append(0.0)
                if layout.turn_is_over(sequence):
                    return
        raise WrongReply(
            f"{self.link.url} cuts a turn of question {sequence.question.id} {TRIES} times", START, code="vllm-cut-turn"
        )

    def _completion(self, sequence: Sequence, layout: Layout) -> list[tuple[int, float]]:
        """Returns the tokens with which vLLM continues a sequence, and their log-probabilities."""
        turn_tokens = layout.lengths.max_new_tokens - len(sequence.turn)
        episode_tokens = layout.lengths.max_length - len(sequence.tokens)
        request = NEUTRAL | {
            "model": self.name,
            "prompt": sequence.tokens,
            "max_tokens": max(1, min(turn_tokens, episode_tokens)),
            "seed": sequence.stream.source.getrandbits(62),  # a new seed for each request, drawn from the stream
            "temperature": self.config.sampling.temperature,
            "stop": list(layout.protocol.stop_strings),
            "stop_token_ids": [layout.tokenizer.stop_id],
        }
        return self.link.ask("/v1/completions", request, server="vLLM", read=self._tokens, remedy=UPDATE)

    def _tokens(self, reply: Record) -> list[tuple[int, float]]:
        """Returns token ids with their log-probabilities. The ids may be those of padding rows (see `_sample_turn`)."""
        model = reply.text("model")
        if model != self.name:
            raise InvalidRecord(f"the model is {shown(model)}, not {self.name}", code="vllm-model-differs")
        completion = reply.records("choices", minimum=1)[0]
        ids = whole_numbers(completion, "token_ids", ID_LIMIT)
        logprobs = _logprobs(reply)
        if len(ids) != len(logprobs):
            raise InvalidRecord(
                "token_ids and token_logprobs must have one number for each token", code="vllm-logprob-count"
            )
        return list(zip(ids, logprobs, strict=True))


def _logprobs(reply: Record) -> list[float]:
    completion = reply.records("choices", minimum=1)[0]
    return log_probabilities(completion.record("logprobs"), "token_logprobs")
