"""/metrics and /health of any process speak for all of them.

In:  the Unix sockets of all processes.   Out: their metrics as one text, the writer's health.

Each process answers on a socket of its own in the shared folder, as if it were alone. Counters are
summed over the processes, those that were killed included (last_page.py). A gauge says the same of
the fleet in each, or is known to the writer alone, and the largest value counts (merging.py).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from kvplug.api_errors import ApiError, error_response
from kvplug.http_service import stopped_by_signals
from kvplug.server.processes.last_page import LastPage, last_counters
from kvplug.server.processes.merging import merged, text_of
from kvplug.shared.folder import SharedFolder
from kvplug.shared.peers import Place
from kvplug.shared.reading import ReadingRouter

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LIMIT_S: Final = 2.0
_WRITER: Final = "writer"
# What a client does there, one process would know and the others would not.
_OF_ONE_PROCESS: Final = ("/select", "/reservations", "/workers")
_NOT_SHARED: Final = "the router runs as several processes; expected --processes 1 for this"


def stopped(alive_at: int) -> asyncio.Event:
    """Set by a signal, or once the other end of the pipe is closed."""
    stopping = stopped_by_signals()
    loop = asyncio.get_running_loop()

    def end() -> None:
        if not os.read(alive_at, 1):
            loop.remove_reader(alive_at)
            stopping.set()

    loop.add_reader(alive_at, end)
    return stopping


def socket_of(folder: SharedFolder, name: str) -> Path:
    """Where a process answers the others."""
    return folder.path / f"{name}.sock"


class PeerServer:
    """start, stop: answers the other processes by the application of this one."""

    def __init__(self, folder: SharedFolder, name: str, runner: web.AppRunner) -> None:
        self._path, self._runner = socket_of(folder, name), runner

    async def start(self) -> None:
        """Take the place of a process that died."""
        self._path.unlink(missing_ok=True)
        server = self._runner.server
        assert server is not None, "runner.setup() first"
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(server, str(self._path))

    def stop(self) -> None:
        """Answer no more."""
        self._server.close()


def keeping(last_page: LastPage) -> Middleware:
    """For a process that answers its peers alone."""

    @web.middleware
    async def keep(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        if request.path == "/metrics" and isinstance(answer, web.Response):
            return web.Response(text=last_page.turned(_text(answer.body)))
        return answer

    return keep


class Peers:
    """`middleware` answers /metrics and /health of clients for all processes; `counts`: families of
    metrics of this process besides.
    """

    def __init__(
        self, folder: SharedFolder, place: Place, counts: Callable[[], Iterator[Metric]]
    ) -> None:
        self._folder, self._own = folder, f"reader{place.number}"
        self._others = [f"reader{n}" for n in range(place.num_processes) if n != place.number]
        self._last_page = LastPage(folder, self._own)
        self._registry = CollectorRegistry()
        self._registry.register(_Counts(counts))

        @web.middleware
        async def speak_for_all(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method != "GET" and request.path.startswith(_OF_ONE_PROCESS):
                return error_response(ApiError(501, _NOT_SHARED, code="not_shared"))
            if request.path not in ("/metrics", "/health") or request.method != "GET":
                return await handler(request)
            is_peer = request.transport is None or not isinstance(
                request.transport.get_extra_info("sockname"), tuple
            )
            if request.path == "/health":
                return await handler(request) if is_peer else await self._health(request, handler)
            own = await handler(request)
            assert isinstance(own, web.Response)
            ours = _text(own.body) + generate_latest(self._registry).decode()
            text = self._last_page.turned(ours)
            if is_peer:
                return web.Response(text=text)
            return await self._metrics(text)

        self.middleware = speak_for_all

    async def _metrics(self, own: str) -> web.Response:
        names = [_WRITER, *self._others]
        answers = await asyncio.gather(*(self._ask(name, "/metrics") for name in names))
        texts = [own]
        for name, answer in zip(names, answers, strict=True):
            # Without an answer it is not there now, or too slow.
            texts.append(last_counters(self._folder, name) if answer is None else answer.decode())
        up = GaugeMetricFamily("kvplug_process_up", "1 if it answers", labels=["process"])
        up.add_metric([self._own], 1)
        for name, answer in zip(names, answers, strict=True):
            up.add_metric([name], answer is not None)
        body = text_of([*merged(texts), up]).encode()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _health(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """As the writer says, which follows the events; without it as this process sees it."""
        answers = await asyncio.gather(
            *(self._ask(name, "/health") for name in (_WRITER, *self._others))
        )
        own = await handler(request)
        assert isinstance(own, web.Response)
        body = json.loads(_text(own.body) if answers[0] is None else answers[0])
        alive = {_WRITER: answers[0] is not None, self._own: True}
        alive |= {name: a is not None for name, a in zip(self._others, answers[1:], strict=True)}
        body["processes"] = [
            {"name": name, "state": "up" if is_up else "down"} for name, is_up in alive.items()
        ]
        return web.json_response(body, status=200 if body["status"] == "ok" else 503)

    async def _ask(self, name: str, path: str) -> bytes | None:
        """What a process answers; None if it does not in time."""
        connector = aiohttp.UnixConnector(str(socket_of(self._folder, name)))
        timeout = aiohttp.ClientTimeout(total=_LIMIT_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get(f"http://{name}{path}") as response,
            ):
                return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def counts_of(router: ReadingRouter, name: str) -> Iterator[Metric]:
    """How a process has read the shared index."""
    missed = "how often news of other processes were written over before they were read"
    given_up = "queries of the shared index without an answer in time: routed by load alone"
    for metric, text, count in (
        ("kvplug_shared_reads", "queries of the shared index", router.num_reads),
        ("kvplug_shared_reads_given_up", given_up, router.num_given_up),
        ("kvplug_shared_news_missed", missed, router.peers.num_missed),
    ):
        family = CounterMetricFamily(metric, text, labels=["process"])
        family.add_metric([name], count)
        yield family


class _Counts(Collector):
    def __init__(self, counts: Callable[[], Iterator[Metric]]) -> None:
        self._collect = counts

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry that finds no description would collect at once."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def _text(body: object) -> str:
    assert isinstance(body, bytes)
    return body.decode()
