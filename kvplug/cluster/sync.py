"""ReplicaSync: the load of a router and its replicas in each of them, over NATS core.

In:  a router, a connection to NATS.   Out: the router decides by the load of all.

Nothing waits in the thread that decides: it notes what has changed, and the thread of the
connection sends all that was noted until then. What is sent is not stored: kvplug/cluster/
load_exchange.py says how what is lost is put right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvplug.cluster.load_exchange import ROWS_EVERY_S, LoadExchange, SyncCounts
from kvplug.engines.wake import Wake
from kvplug.errors import ConfigError
from kvplug.nats.connection import NatsConnection, translated
from kvplug.nats.subjects import Subjects
from kvplug.router.core import Router
from kvplug.router.load import LoadListener
from kvplug.setting import shown

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_TICKS_OF_ROWS: Final = round(ROWS_EVERY_S / _TICK_S)
_RETRY_S: Final = 0.25
_BYE_TIMEOUT_S: Final = 1.0


class SyncStatus(msgspec.Struct, frozen=True):
    """is_connected: to NATS; peers: of each replica that is heard, seconds since its last message;
    num_assumed: replicas that cannot be heard, for which the router's own load counts, too.
    """

    is_connected: bool
    peers: dict[str, float]
    num_assumed: int
    counts: SyncCounts


class ReplicaSync:
    """start, stop; status. `router_id`: another one for each replica of a fleet.

    All replicas need the same names of workers. A router can be in one ReplicaSync at a time.
    """

    def __init__(
        self, router: Router, connection: NatsConnection, subjects: Subjects, router_id: str
    ) -> None:
        """ConfigError for a router whose load is shared already, or an id that is none."""
        if not isinstance(router_id, str) or not 0 < len(router_id) <= 128:
            raise ConfigError(
                f"the id of a router must have 1 to 128 characters, got {shown(router_id)}"
            )
        self.router_id = router_id
        self._router, self._connection, self._subjects = router, connection, subjects
        self._subject = subjects.sync(router_id)
        self._exchange = LoadExchange(router, router_id, self._wake)
        self._is_awake, self._is_running = False, False
        self._has_news = asyncio.Event()
        connection.on_change(self._on_change)
        self._subscription: Subscription | None = None
        self._task: Future[None] | None = None

    def start(self) -> None:
        """Share the load from now on; returns at once, whether NATS can be reached or not."""
        with self._router.locked():
            if type(self._router.load.listener) is not LoadListener:
                raise ConfigError("cannot share the load of a router: it is shared already")
            self._waker, self._is_awake, self._is_running = Wake(), False, True
            self._router.load.listener = self._exchange
        self._task = self._connection.submit(self._run())
        self._task.add_done_callback(_say_failure)

    def stop(self) -> None:
        """Tell the others that this router stops, and forget their load; again is harmless."""
        task, self._task = self._task, None
        if task is None:
            return
        with self._router.locked():
            self._router.load.listener = LoadListener()
        self._is_running = False
        task.cancel()
        ending = self._end()
        try:
            self._connection.submit(ending).result(_BYE_TIMEOUT_S)
        except RuntimeError:  # the connection has ended before
            ending.close()
            self._waker.close()
        except (CancelledError, FutureTimeoutError):
            logger.warning("replica sync: NATS did not take the last message; peers find out alone")

    def status(self) -> SyncStatus:
        """What is known of the others; in any thread."""
        now_s = self._router.clock()
        peers = {name: now_s - peer.heard_s for name, peer in self._exchange.peers.copy().items()}
        counts = msgspec.structs.replace(self._exchange.counts)
        is_connected = self._connection.is_connected
        return SyncStatus(is_connected, peers, self._exchange.num_assumed, counts)

    def _wake(self) -> None:
        """There is news; in the thread that decides, so nothing is done while some is waiting.

        The loop's own call_soon_threadsafe takes four times as long (docs/decisions.md, 139).
        """
        if not self._is_awake:
            self._is_awake = True
            self._waker.set()

    def _woken(self) -> None:
        self._waker.drain()
        self._has_news.set()

    def _on_change(self, is_connected: bool) -> None:
        if is_connected and self._is_running:
            self._exchange.reconnected()

    async def _run(self) -> None:
        client = await self._connection.connected()
        await self._subscribe(client)
        asyncio.get_running_loop().add_reader(self._waker.fd, self._woken)
        async with asyncio.TaskGroup() as tasks:
            for send in (self._send_news, self._send_rows):
                tasks.create_task(_for_ever(partial(send, client)))

    async def _subscribe(self, client: Client) -> None:
        subject = self._subjects.all_sync
        while self._subscription is None:
            try:
                self._subscription = await client.subscribe(subject, cb=self._hear)
            except (nats.errors.Error, OSError) as error:
                logger.warning("replica sync: %s", translated(error, f"subscribe to {subject}"))
                await asyncio.sleep(_RETRY_S)

    async def _hear(self, message: Msg) -> None:
        if self._is_running:
            self._exchange.hear(unquote(message.subject.rpartition(".")[2]), message.data)

    async def _send_news(self, client: Client) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            self._is_awake = False  # what is noted from here on wakes again
            await self._publish(client, self._exchange.news())

    async def _send_rows(self, client: Client) -> None:
        while True:
            await self._publish(client, self._exchange.rows())
            for _ in range(_TICKS_OF_ROWS):
                await asyncio.sleep(_TICK_S)
                self._exchange.tick(is_connected=self._connection.is_connected)
                if self._exchange.has_newcomer:
                    break

    async def _publish(self, client: Client, payloads: list[bytes]) -> None:
        """What cannot be sent now would be late: it is dropped, and the next row has it."""
        counts = self._exchange.counts
        for payload in payloads:
            try:
                if self._connection.is_connected:
                    await client.publish(self._subject, payload)
                    counts.sent += 1
                else:
                    counts.unsent += 1
            except (nats.errors.Error, OSError):
                counts.unsent += 1

    async def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._waker.fd)
        self._waker.close()
        client = await self._connection.connected()
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()
        self._exchange.forget_all()
        if self._connection.is_connected:
            await self._publish(client, [self._exchange.bye()])
            with suppress(nats.errors.Error, OSError, TimeoutError):
                await client.flush(1)


async def _for_ever(send: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A mistake of ours in one message must not leave the load of others as it is for good."""
    while True:
        try:
            await send()
        except Exception:
            logger.exception("replica sync: a message failed, it goes on with the next")
            await asyncio.sleep(_RETRY_S)


def _say_failure(task: Future[None]) -> None:
    """Our own mistake: requests are routed on, by this router's own load."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("replica sync has ended", exc_info=error)
