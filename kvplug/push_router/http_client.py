"""An engine's answer over HTTP as server-sent events.

In:  the URL of a worker, a body.   Out: events as bytes; WorkerLostError, RequestRefusedError.

Each request has a connection of its own, which closes with the answer: an engine aborts a request
whose connection closes, and no request is lost on an idle connection that the engine has closed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from types import TracebackType
from typing import ClassVar, Final, Self, TypeVar

import aiohttp
import msgspec

from kvplug.errors import ConfigError, RequestRefusedError, TransportError, WorkerLostError
from kvplug.events import Rank
from kvplug.http_service import RANK_HEADER, is_local_shortage
from kvplug.setting import ABOVE_0, shown

_Event = TypeVar("_Event")

_MAX_SHOWN: Final = 500


class HttpClient:
    """An async context manager that asks engines of one kind.

    A kind says the path, the body of a request and what an event of the answer means.
    """

    path: ClassVar[str]

    def __init__(
        self,
        urls: Mapping[str, str] | None = None,
        *,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        """`urls`: of workers by name; a worker without one is named by its URL.

        `read_timeout_s`: the longest silence within a request; then the worker counts as lost.
        ConfigError for a limit that is not above 0.
        """
        limits = {"connect_timeout_s": connect_timeout_s, "read_timeout_s": read_timeout_s}
        for name, limit in limits.items():
            if not ABOVE_0.fits(limit):
                raise ConfigError(f"{name} must be {ABOVE_0.expected}, got {shown(limit)}")
        self._urls = dict(urls or {})
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s
        )
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers=self._headers,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def _events(
        self, rank: Rank, body: Mapping[str, object], dp_rank: int | None
    ) -> AsyncGenerator[bytes, None]:
        """The data of each event, up to [DONE]; TransportError if this machine has no connection
        left.
        """
        url = self._urls.get(rank.worker, rank.worker).rstrip("/") + self.path
        headers = {} if dp_rank is None else {RANK_HEADER: str(dp_rank)}
        data = msgspec.json.encode(body)
        headers["Content-Type"] = "application/json"
        with _translated(rank):
            async with self._session.post(url, data=data, headers=headers) as response:
                if response.status != HTTPStatus.OK:
                    raise error_of(rank, response.status, await response.text(errors="replace"))
                async for event in _events_of(response.content):
                    yield event


async def _events_of(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    # Not by readline(), which has a limit: an event of SGLang repeats all tokens of the answer.
    begun = b""
    async for part in content.iter_any():
        *lines, begun = (begun + part).split(b"\n")
        for line in lines:
            field, _, value = line.partition(b":")
            if field == b"data":
                if (event := value.strip()) == b"[DONE]":
                    return
                yield event


def error_of(rank: Rank, status: int, text: str) -> RequestRefusedError | WorkerLostError:
    """What an HTTP status of an engine means: a request that another engine would refuse as well,
    or a worker that cannot serve it now.
    """
    message = f"{rank} answered with status {status}: {text[:_MAX_SHOWN]}"
    is_refused = 400 <= status < 500 and status not in _OF_WORKER
    return RequestRefusedError(message) if is_refused else WorkerLostError(message)


_OF_WORKER: Final = frozenset((HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS))


def decoded(rank: Rank, event: bytes, decoder: msgspec.json.Decoder[_Event]) -> _Event:
    """An event; WorkerLostError if it is none of this engine."""
    try:
        return decoder.decode(event)
    except msgspec.DecodeError as error:
        text = event[:_MAX_SHOWN].decode(errors="replace")
        message = f"{rank} sent an event that is not understood ({error}): {text}"
        raise WorkerLostError(message) from error


@contextmanager
def _translated(rank: Rank) -> Iterator[None]:
    """Aiohttp's errors as ours."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        if is_local_shortage(error):
            raise TransportError(f"cannot open a connection to {rank}: {error}") from error
        reason = str(error) or type(error).__name__
        raise WorkerLostError(f"the connection to {rank} failed: {reason}") from error
