"""The HTTP client of remote models, retrievers and rollout servers.

Replies are bounded, and every fault is one of a few errors. `Link` asks servers of JSON: retrievers, web search and
rollout servers.

The HTTP library is the one that google-genai and huggingface_hub use: httpx2, or httpx where an older version of these
packages is installed.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from r3lite.core.errors import R3LiteError, explained
from r3lite.core.records import InvalidRecord, Record, Source, parse
from r3lite.llm.transport import Calls, NoReply, redacted

try:
    import httpx2 as httpx
except ImportError:
    try:
        import httpx
    except ImportError as error:
        cause = "HTTP requests need the package httpx2, a dependency of google-genai and huggingface_hub"
        raise R3LiteError(cause, "Install it with: pip install httpx2", code="package-missing") from error

MAX_REPLY = 4 << 20  # bytes
CONNECT = 10.0  # seconds
T = TypeVar("T")


class BoundedClient(httpx.AsyncClient):
    """Reads at most `max_bytes` of a reply. Raises NoReply for a longer one, another status than 200, or no reply.

    The client follows no redirect: httpx would send the key along to another server.
    """

    def __init__(self, max_bytes: int = MAX_REPLY, headers: dict[str, str] | None = None):
        # Replies must not be compressed: a few bytes may unpack to any size.
        super().__init__(headers={"accept-encoding": "identity", **(headers or {})}, follow_redirects=False)
        self._max_bytes = max_bytes

    def build_request(self, *arguments: Any, **options: Any) -> httpx.Request:
        remedy = "Check the address (of a judge or teacher: --judge-base-url) and --judge-model."
        with explained(httpx.InvalidURL, "invalid address", remedy, code="bad-address"):
            return super().build_request(*arguments, **options)

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        try:
            response = await self._read(request, **(options | {"stream": True}))
        except httpx.HTTPError as error:
            kind = "timeout" if isinstance(error, httpx.TimeoutException) else "connection"
            sent = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            raise NoReply(kind, f"{type(error).__name__}: {error}", sent) from error
        if response.status_code != 200:
            retry_after = response.headers.get("retry-after", "")
            raise NoReply("status", response.text, status=response.status_code, retry_after=retry_after)
        return response

    async def _read(self, request: httpx.Request, **options: Any) -> httpx.Response:
        response = await super().send(request, **options)
        body = bytearray()
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise httpx.DecodingError("the reply is compressed, although the request forbids it", request=request)
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > self._max_bytes:
                    raise NoReply("too_large", f"more than {self._max_bytes >> 20} MiB")
        finally:
            await response.aclose()
        reply = httpx.Response(response.status_code, headers=response.headers, content=bytes(body), request=request)
        # The charset that the server names is ignored: Python would take zlib, which may unpack to any size, or hex,
        # which raises an error of its own.
        reply.encoding = "utf-8"
        return reply


class Unanswered(R3LiteError):
    """A request without a reply. If `is_transient`, another try or another server may give one.

    `status` is that of the server's refusal, 0 without one; `pause` the seconds that it asks to wait before a new try.
    """

    def __init__(
        self,
        cause: str,
        remedy: str,
        is_transient: bool,
        status: int = 0,
        pause: float = 0.0,
        *,
        code: str,
    ):
        super().__init__(cause, remedy, code=code)
        self.is_transient = is_transient
        self.status = status
        self.pause = pause


class WrongReply(R3LiteError):
    """A reply that is not what the server should send; the server's next reply may be right."""


class Link:
    """Sends requests to one server; each may take `seconds`, and its reply may have `max_bytes`.

    `remedy` is what to do if a request fails; the values of `headers` are keys, which are never shown.
    """

    def __init__(self, url: str, remedy: str, seconds: float, max_bytes: int, headers: dict[str, str] | None = None):
        self.url = url
        self.remedy = remedy
        self.limits = (CONNECT, seconds, seconds, seconds)  # seconds to connect, read, write, and get a connection
        self._client = BoundedClient(max_bytes, headers)
        self.calls = Calls(seconds)
        self._keys = [value.removeprefix("Bearer ") for value in (headers or {}).values()]

    def text(self, path: str = "", content: dict | bytes | None = None) -> str:
        """Returns the body of the reply to a POST of `content`, or to a GET if it is None. Raises Unanswered."""
        method = "GET"
        body = {}
        if content is not None:
            method = "POST"
            body = {"content": content} if isinstance(content, bytes) else {"json": content}
        try:
            response = self.calls.run(
                lambda: self._client.request(method, self.url + path, timeout=self.limits, **body)
            )
            return response.text
        except NoReply as error:
            raise self._unanswered(error) from error

    def _unanswered(self, error: NoReply) -> Unanswered:
        """Returns the error of a call without a reply, with what the server says, and without keys."""
        status = error.status
        reason = " ".join(redacted(str(error), *self._keys).split())
        is_transient = error.kind in ("timeout", "connection") or status in (408, 429) or status >= 500
        verb = "sends"
        if status:
            verb = "refuses:"
            reason = f"status {status}: {reason[:500]}"
        if is_transient:
            verb = "does not answer:"
        pause = float(error.retry_after) if error.retry_after.isdecimal() else 0.0
        return Unanswered(
            f"{self.url} {verb} {reason}",
            self.remedy,
            is_transient=is_transient,
            status=status,
            pause=pause,
            code="no-reply",
        )

    def ask(
        self, path: str, content: dict | None, server: str, read: Callable[[Record], T], remedy: str | None = None
    ) -> T:
        """Returns what `read` makes of the reply, a JSON object.

        Raises Unanswered, or WrongReply if `read` raises InvalidRecord. Its message names the kind of `server`
        that was expected.
        """
        text = self.text(path, content)
        try:
            return read(Record(parse(text), Source("the reply")))
        except InvalidRecord as error:
            cause = f"{self.url}{path} did not reply like {server}: {error.cause}"
            raise WrongReply(cause, remedy or self.remedy, code=error.code) from error
