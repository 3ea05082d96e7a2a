"""A strict imitation of vLLM's server, after the source of its 0.33: it refuses what vLLM does not know and what has
another type, samples from the tiny model, and has LoRA adapters only as they are loaded."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from r3lite.core.errors import R3LiteError
from r3lite.models import lora
from r3lite.models.kv_cache import KVCache, Prefill
from r3lite.models.weights import load_model, resolve_folder
from r3lite.protocols.tokenizer import Tokenizer

# Fields of CompletionRequest that this server has, by type. vLLM ignores others, which would hide a misspelled one.
FIELDS = {
    "model": str, "prompt": list, "max_tokens": int, "logprobs": int, "return_token_ids": bool, "seed": int,
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float,
    "presence_penalty": float, "frequency_penalty": float, "stop": list, "include_stop_str_in_output": bool,
    "stop_token_ids": list, "ignore_eos": bool, "skip_special_tokens": bool,
}  # fmt: skip
NEUTRAL = {"top_p": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_p": 0}


class Bad(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class FakeVllm(ThreadingHTTPServer):
    """`raw`: --logprobs-mode raw_logprobs, the default of vLLM; `updating`: VLLM_ALLOW_RUNTIME_LORA_UPDATING."""

    def __init__(self, raw: bool = False, updating: bool = True, longest: int = 4096, root: str = "tiny"):
        folder = resolve_folder("tiny")
        self.model, self.tokenizer = load_model(folder, torch.float32, torch.device("cpu")), Tokenizer.load(folder)
        self.raw, self.updating, self.longest, self.root = raw, updating, longest, root
        self.loaded, self.log, self.lock = {}, [], threading.Lock()
        self.stop_early = 0  # completions that end after a token, as at an abort
        super().__init__(("127.0.0.1", 0), Handler)

    def answer(self, path: str, body: dict | None) -> dict | str:
        if body is None:
            cards = [{"id": "base", "root": self.root, "max_model_len": self.longest, "object": "model"}]
            return {"/version": {"version": "0.33.0"}, "/v1/models": {"object": "list", "data": cards}}[path]
        with self.lock:
            if path == "/v1/load_lora_adapter" and self.updating:
                return self._load(**body)
            if path == "/v1/unload_lora_adapter" and self.updating:
                return self._unload(**body)
            if path == "/v1/completions":
                return self._complete(body)
        raise Bad(404, "Not Found")

    def _load(self, lora_name: str, lora_path: str) -> str:
        if lora_name in self.loaded:
            raise Bad(400, f"The lora adapter '{lora_name}' has already been loaded.")
        if not Path(lora_path).is_dir():
            raise Bad(404, f"No adapter found for {lora_name} at {lora_path}")
        try:
            lora.load_adapter(self.model, lora_name, lora_path, trainable=False)
        except R3LiteError as error:
            raise Bad(500, error.cause) from error
        self.loaded[lora_name] = lora_path
        self.log.append(f"load {lora_name}")
        return f"Success: LoRA adapter '{lora_name}' added successfully."

    def _unload(self, lora_name: str) -> str:
        if lora_name not in self.loaded:
            raise Bad(404, f"The lora adapter '{lora_name}' cannot be found.")
        lora.remove_adapter(self.model, lora_name)
        del self.loaded[lora_name]
        self.log.append(f"unload {lora_name}")
        return f"Success: LoRA adapter '{lora_name}' removed successfully."

    @torch.no_grad()
    def _complete(self, body: dict) -> dict:
        for key, value in body.items():
            if key not in FIELDS:
                raise Bad(400, f"unknown field {key}")
            if type(value) is not FIELDS[key] and not (FIELDS[key] is float and type(value) is int):
                raise Bad(400, f"{key}: Input should be a valid {FIELDS[key].__name__}")
            if key in NEUTRAL and value != NEUTRAL[key]:
                raise Bad(400, f"{key} is {value}: this imitation samples from the whole distribution")
        name, ids, max_tokens = body["model"], list(body["prompt"]), body["max_tokens"]
        if name not in self.loaded and name != "base":
            raise Bad(404, f"The model `{name}` does not exist.")
        if not ids or not all(type(i) is int and i >= 0 for i in ids) or not 0 < max_tokens <= self.longest - len(ids):
            raise Bad(400, "the prompt must be token ids, and max_tokens fit into the context")
        if body.get("stop") and not body.get("include_stop_str_in_output"):
            raise Bad(400, "the text would lack the stop string that its tokens have")
        generated, logprobs, reason = [], [], "length"
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        cache = KVCache.of(self.model, 1)
        with lora.use_adapter(self.model, None if name == "base" else name):
            if len(ids) > 1:
                prefill = Prefill(cache, [(0, ids[:-1])])
                self.model(prefill.tokens, prefill)
            for _ in range(max_tokens):
                last = [*ids, *generated][-1]
                hidden = self.model(torch.tensor([[last]]), cache.decode(1))[0, -1]
                logits = (hidden @ self.model.head_weight.T).float()[: self.tokenizer.size]
                scaled = torch.log_softmax(logits / body["temperature"], -1)
                if body.get("top_k", -1) == 1:
                    token = int(scaled.argmax())
                else:
                    token = int(torch.multinomial(scaled.exp(), 1, generator=generator))
                reported = torch.log_softmax(logits, -1) if self.raw else scaled
                generated.append(token)
                logprobs.append(float(reported[token]))
                text = self.tokenizer.decode(generated)
                if token in body.get("stop_token_ids", []) or any(stop in text for stop in body.get("stop", [])):
                    reason = "stop"
                    break
                if self.stop_early:
                    self.stop_early -= 1
                    break
        self.log.append(f"complete {name}")
        choice = {"index": 0, "text": text, "finish_reason": reason, "stop_reason": None}
        choice["logprobs"] = {"token_logprobs": logprobs, "tokens": [], "text_offset": [], "top_logprobs": []}
        choice["token_ids"] = generated if body.get("return_token_ids") else None
        return {"id": "cmpl-1", "object": "text_completion", "model": name, "choices": [choice], "usage": {}}


class Handler(BaseHTTPRequestHandler):
    server: FakeVllm

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _reply(self, body: dict | None) -> None:
        try:
            status, reply = 200, self.server.answer(self.path, body)
        except Bad as error:
            status, reply = (
                error.status,
                {"error": {"message": str(error), "type": "BadRequestError", "code": error.status}},
            )
        except KeyError:
            status, reply = 404, {"detail": "Not Found"}
        data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments) -> None:
        pass
