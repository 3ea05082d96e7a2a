"""The HTTP client of remote models and retrievers: replies are bounded, and what goes wrong is one of few errors.

It is that of the packages google-genai and huggingface_hub: httpx2, or httpx where an older one of them is installed.
"""

from typing import Any

from r3lite.core.errors import R3LiteError, explained
from r3lite.llm.transport import Broken, Refused, TooLarge

try:
    import httpx2 as httpx
except ImportError:
    try:
        import httpx
    except ImportError as error:
        cause = "requests over HTTP need the package httpx2, which google-genai and huggingface_hub install"
        raise R3LiteError(cause, "Install it with: pip install httpx2") from error

MAX_REPLY = 4 << 20  # bytes


class BoundedClient(httpx.AsyncClient):
    """Reads at most `most` bytes of a reply, and raises what `transport.py` has.

    It follows no redirect: httpx would send the key along to another server.
    """

    def __init__(self, most: int = MAX_REPLY, headers: dict[str, str] | None = None):
        # A few bytes of a compressed reply may unpack to any size.
        super().__init__(headers={"accept-encoding": "identity", **(headers or {})}, follow_redirects=False)
        self._most = most

    def build_request(self, *given: Any, **options: Any) -> httpx.Request:
        remedy = "Check the address, which for a judge or teacher is --judge-base-url, and --judge-model."
        with explained(httpx.InvalidURL, "no request can be sent to this address", remedy):
            return super().build_request(*given, **options)

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        try:
            whole = await self._read(request, **(options | {"stream": True}))
        except httpx.HTTPError as error:
            kind = "timeout" if isinstance(error, httpx.TimeoutException) else "connection"
            sent = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            raise Broken(f"{type(error).__name__}: {error}", kind, sent) from error
        if whole.status_code != 200:
            raise Refused(whole.status_code, whole.text, whole.headers.get("retry-after", ""))
        return whole

    async def _read(self, request: httpx.Request, **options: Any) -> httpx.Response:
        response, body = await super().send(request, **options), bytearray()
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise httpx.DecodingError("the reply is compressed, which was not asked for", request=request)
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > self._most:
                    raise TooLarge(f"more than {self._most >> 20} MiB")
        finally:
            await response.aclose()
        return httpx.Response(response.status_code, headers=response.headers, content=bytes(body), request=request)
