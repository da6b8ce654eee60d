"""A connection to NATS that comes back by itself, on an event loop and a thread of its own.

In:  NatsSettings, coroutines.   Out: nats-py's client; what happens to the connection.

Nothing here waits for a server: one that is not there yet, or not any more, is tried four times a
second for ever. Publishers live in processes without an event loop, and the router's own loop has
requests to forward, so the thread is this module's.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from kvplug.errors import ConfigError, TransportError
from kvplug.nats.settings import NatsSettings

try:
    import nats.errors
    from nats.aio.client import Client

    from kvplug.nats.client import connect
except ImportError as error:
    raise ConfigError("NATS needs the package nats-py: pip install 'kvplug[nats]'") from error

logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.25
# A server that is paused, or behind a broken network, is given up after three pings.
_PING_S: Final = 2.0
_MAX_PINGS: Final = 2
_PENDING_BYTES: Final = 2**26
# Parts of answers have 256 KiB and one event more, those of snapshots 512 KiB.
_LARGEST_MESSAGE: Final = 2**19
_STOP_TIMEOUT_S: Final = 3.0

_MAX_REFUSED: Final = 100
_REFUSED: Final = re.compile(
    r'permissions violation for (?:a )?(publish|subscription) to "?([^" ]+)', re.IGNORECASE
)

_T = TypeVar("_T")
OnChange = Callable[[bool], None]


class NatsConnection:
    """start, submit, connected, on_change, stop; is_connected, loop; `refused`: what the server has
    not allowed since it was connected last.

    The client's own publish raises while its buffer is full, and while the connection is closed;
    what is published while it comes back is sent then.
    """

    def __init__(self, settings: NatsSettings, name: str) -> None:
        """`name`: what the server calls this connection; inboxes begin with it, so that permissions
        can be given for `_INBOX.NAME.>`.
        """
        self.settings, self.name = settings, name
        self.is_connected = False
        self.num_reconnects = 0
        self.refused: tuple[str, ...] = ()
        self._options = settings.connect_options()
        self._listeners: list[OnChange] = []
        self._said: set[str] = set()
        self.loop = asyncio.new_event_loop()
        self._client: Client | None = None
        self._is_ready = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvplug-nats-{name}", daemon=True)

    @property
    def inbox_prefix(self) -> str:
        """What the subjects of its inboxes begin with, without the last dot."""
        return f"_INBOX.{self.name}"

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._thread.start()

    def on_change(self, listener: OnChange) -> None:
        """Call it in this thread's loop with whether it is connected, each time that changes."""
        self._listeners.append(listener)

    @contextmanager
    def listening(self, listener: OnChange) -> Iterator[None]:
        """As `on_change`, until the end of the block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run it in this thread's loop; from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def connected(self) -> Client:
        """The client, once it has been connected; in this thread's loop."""
        await self._is_ready.wait()
        assert self._client is not None
        return self._client

    def stop(self) -> None:
        """Send what is buffered, for a second at most, and close; again is harmless."""
        if self._thread.ident is None:  # it was never started
            self.loop.close()
        if not self._thread.is_alive():
            return
        with suppress(RuntimeError):  # its loop has just ended
            self.loop.call_soon_threadsafe(self._stop_soon)
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("NATS: the connection %s is busy: it closes when it is not", self.name)

    def _stop_soon(self) -> None:
        self._main.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._main = self.loop.create_task(self._serve())
        try:
            with suppress(asyncio.CancelledError):
                self.loop.run_until_complete(self._main)
            self.loop.run_until_complete(self._close())
        finally:
            self.loop.close()

    async def _serve(self) -> None:
        self._client = await self._connect()
        self._check_room(self._client)
        self._is_ready.set()
        self._changed(True)
        await asyncio.Event().wait()

    async def _connect(self) -> Client:
        while True:
            try:
                return await connect(
                    **self._options,
                    name=self.name,
                    inbox_prefix=self.inbox_prefix.encode(),
                    error_cb=self._on_error,
                    disconnected_cb=self._on_lost,
                    reconnected_cb=self._on_back,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RETRY_S,
                    connect_timeout=2,
                    ping_interval=_PING_S,
                    max_outstanding_pings=_MAX_PINGS,
                    pending_size=_PENDING_BYTES,
                )
            except (TimeoutError, nats.errors.Error, OSError) as error:
                self._say(f"cannot connect to {', '.join(self.settings.servers)}: {error}")
                await asyncio.sleep(_RETRY_S)

    async def _on_error(self, error: Exception) -> None:
        refused = _REFUSED.search(str(error))
        if refused is None:
            self._say(f"{type(error).__name__}: {error}")
            return
        what = f"{refused[1].lower()} {_without_chance(refused[2])}"
        if what not in self.refused and len(self.refused) < _MAX_REFUSED:
            self.refused = (*self.refused, what)
            logger.warning(
                "NATS: the server does not allow %s to %s; expected permissions as in "
                "docs/security.md, NATS",
                self.name,
                what,
            )

    async def _on_lost(self) -> None:
        if self.is_connected and self._client is not None:  # else it is being closed
            logger.warning("NATS: the connection %s is lost; it is tried again", self.name)
        self._changed(False)

    async def _on_back(self) -> None:
        self.num_reconnects += 1
        self._said.clear()
        self.refused = ()
        logger.info("NATS: the connection %s is back", self.name)
        if self._client is not None:
            self._check_room(self._client)
        self._changed(True)

    def _check_room(self, client: Client) -> None:
        if client.max_payload < _LARGEST_MESSAGE:
            self._say(
                f"the server takes messages of at most {client.max_payload} bytes: large answers "
                f"and snapshots do not pass; expected max_payload to be {_LARGEST_MESSAGE} or more"
            )

    def _changed(self, is_connected: bool) -> None:
        if is_connected != self.is_connected:
            self.is_connected = is_connected
            for listener in [*self._listeners]:
                listener(is_connected)

    def _say(self, what: str) -> None:
        """Once for each, until the connection is back."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("NATS: %s", what)

    async def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
                await asyncio.wait_for(client.flush(), 1.0)
            with suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
                await asyncio.wait_for(client.close(), 1.0)
        others = asyncio.all_tasks(self.loop) - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # A close that was cut short leaves its socket open, as does a failed attempt to reconnect.
        for transport in [*getattr(self.loop, "_transports", {}).values()]:
            transport.close()
        await asyncio.sleep(0)


def _without_chance(subject: str) -> str:
    """Inboxes and acknowledgements have a name for each message. nats-py says all in lower case."""
    parts = subject.split(".")
    num_kept = {"_inbox": 2, "$js": 4 if parts[1:2] == ["ack"] else None}.get(parts[0])
    return ".".join([*parts[:num_kept], *([">"] if num_kept and parts[num_kept:] else [])])


def translated(error: Exception, attempted: str) -> TransportError:
    """What nats-py raised, as ours."""
    return TransportError(f"cannot {attempted}: {type(error).__name__}: {error}".rstrip(": "))
