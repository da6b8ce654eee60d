"""POST a client's request to a worker, and tell what a failure means.

In:  a worker's URL, a client's request.   Out: the worker's answer, or an error that says whose
fault it is: LostError is the worker's, ApiError the router's own or the answer's.

Engines close idle connections: uvicorn, and with it vLLM and SGLang, after 5 s. The router closes
them sooner. If the worker closed one just before it was used again, the same worker is asked once
more on a new connection.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace, TracebackType
from typing import Final, NamedTuple, Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from kvplug.api_errors import ApiError
from kvplug.http_service import RANK_HEADER, is_local_shortage
from kvplug.server.config import ServerConfig

_KEEPALIVE_S: Final = 2.0
_MAX_HEADER_BYTES: Final = 2**16
_LARGE_BYTES: Final = 2**16
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
# RFC 9110, 7.6.1: these concern one connection; length and host are set anew on each side.
_HOP_BY_HOP: Final = frozenset(
    (
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("host", "content-length", "expect"),
    )
)


class LostError(Exception):
    """The worker did not answer; `was_reached`: it may have begun to work on the request."""

    def __init__(self, reason: str, *, was_reached: bool) -> None:
        super().__init__(reason)
        self.was_reached = was_reached


class Outgoing(NamedTuple):
    """A client's request on its way to a worker; `dp_rank`: None if the worker has one rank."""

    worker: str
    dp_rank: int | None
    client: web.Request
    body: bytes


@dataclass(slots=True)
class _Attempt:
    was_reused: bool = False


class Upstream:
    """An async context manager; post; `session` for what the router asks on its own."""

    def __init__(self, config: ServerConfig) -> None:
        key = config.worker_api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.session = _session(config, aiohttp.TCPConnector(limit=0), headers)
        self._pooled = _session(
            config, aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        )
        self._unpooled = _session(config, aiohttp.TCPConnector(limit=0, force_close=True))

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(self.session)
            await opened.enter_async_context(self._pooled)
            await opened.enter_async_context(self._unpooled)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._opened.aclose()

    @asynccontextmanager
    async def post(self, request: Outgoing) -> AsyncIterator[aiohttp.ClientResponse]:
        """The worker's answer to the client's request; LostError, ApiError."""
        attempt = _Attempt()
        try:
            answer = await _post(self._pooled, request, attempt)
        except LostError:
            if not attempt.was_reused:
                raise
            answer = await _post(self._unpooled, request, attempt)
        async with answer:
            yield answer


async def _post(
    session: aiohttp.ClientSession, request: Outgoing, attempt: _Attempt
) -> aiohttp.ClientResponse:
    headers = passed_on(request.client.headers)
    headers.popall("Content-Encoding", None)  # the server has decoded the body
    headers["Accept-Encoding"] = "identity"  # the router reads the usage in the answer
    if request.dp_rank is not None:
        headers[RANK_HEADER] = str(request.dp_rank)
    url, body = URL(request.worker + request.client.path_qs, encoded=True), request.body
    with translated():
        return await session.post(
            url,
            # In pieces, between which others have their turn.
            data=io.BytesIO(body) if len(body) >= _LARGE_BYTES else body,
            headers=headers,
            allow_redirects=False,
            trace_request_ctx=attempt,
        )


def passed_on(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers that concern the other side, too, repeated ones included."""
    of_connection = {
        name.strip().lower()
        for value in headers.getall("Connection", ())
        for name in value.split(",")
    }
    dropped = _HOP_BY_HOP | of_connection
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in dropped
    )


@contextmanager
def translated() -> Iterator[None]:
    """Aiohttp's errors of the worker's side, as ours."""
    try:
        yield
    except aiohttp.SocketTimeoutError as error:
        # It took the request and is silent: sending it elsewhere would do the work twice.
        raise ApiError(504, "the worker did not answer in time", code="timeout") from error
    except aiohttp.ClientResponseError as error:
        message = f"the worker's answer is no HTTP that the router understands: {error.message}"
        raise ApiError(502, message, code="invalid_answer") from error
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        if is_local_shortage(error):
            message = f"the router cannot open a connection to a worker: {error.strerror}"
            raise ApiError(503, message, code="router_overloaded") from error
        raise LostError(_named(error), was_reached=False) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LostError(_named(error), was_reached=True) from error


def _named(error: Exception) -> str:
    return str(error) or type(error).__name__


def _session(
    config: ServerConfig, connector: aiohttp.TCPConnector, headers: Mapping[str, str] = _NO_HEADERS
) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=config.connect_timeout_s, sock_read=config.request_timeout_s
    )
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=connector,
        headers={"Accept-Encoding": "identity", **headers},  # as nothing is decoded
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=timeout,
        auto_decompress=False,  # what a worker sends goes to the client as it is
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
        trace_configs=[tracing],
    )


async def _note_reuse(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.was_reused = True
