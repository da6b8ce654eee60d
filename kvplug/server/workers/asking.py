"""What the router asks workers on its own: their health, models, event streams.

In:  a worker's URL, a path.   Out: an answer of aiohttp's.

Clients' requests go another way (proxy/upstream.py), without the key that is for these.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, Self

import aiohttp

from kvplug.server.config import ServerConfig
from kvplug.server.worker_spec import socket_of

_HOST: Final = "http://localhost"

Asked = AbstractAsyncContextManager[aiohttp.ClientResponse]


class WorkerSession:
    """An async context manager; get, post."""

    def __init__(self, config: ServerConfig) -> None:
        key = config.worker_api_key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=config.connect_timeout_s,
            sock_read=config.request_timeout_s,
        )
        self._tcp = self._session(aiohttp.TCPConnector(limit=0))
        self._by_socket: dict[str, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for session in (self._tcp, *self._by_socket.values()):
            await session.close()

    def get(self, url: str, path: str, *, timeout_s: float) -> Asked:
        """The worker's answer, within the time."""
        session, base = self._to(url)
        return session.get(base + path, timeout=aiohttp.ClientTimeout(total=timeout_s))

    def post(self, url: str, path: str, *, json: object, timeout_s: float) -> Asked:
        """The same for JSON that is sent."""
        session, base = self._to(url)
        return session.post(base + path, json=json, timeout=aiohttp.ClientTimeout(total=timeout_s))

    def _to(self, url: str) -> tuple[aiohttp.ClientSession, str]:
        path = socket_of(url)
        if path is None:
            return self._tcp, url
        if path not in self._by_socket:
            self._by_socket[path] = self._session(aiohttp.UnixConnector(path, limit=0))
        return self._by_socket[path], _HOST

    def _session(self, connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
        )
