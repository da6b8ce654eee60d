"""A publisher's signs of life on NATS, and whether it is the only one of its name.

In:  what a hello says now; hellos of others on the same subject.
Out: a hello every 2 s, which no stream keeps; a namesake has come or gone.

Two publishers of one name would replace each other's blocks in every reader. So the one that
started later publishes; the other is silent until it has heard nothing from it for three beats. A
header identifies each: when it started, and random digits.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvplug.nats.client import subscribed
from kvplug.nats.connection import NatsConnection
from kvplug.nats.subjects import PUBLISHER_HEADER, SEQ_HEADER
from kvplug.protocol import HEARTBEAT_S

ALONE_S: Final = 3 * HEARTBEAT_S
"""A namesake that was silent for so long is gone."""

_STUCK_S: Final = 1.0  # between two beats of a publisher that only they and answers speak for
_SHORTEST_S: Final = 0.2


class Beats:
    """soon from the connection's loop, where `run` is a task. Read is_silent, num_sent."""

    def __init__(
        self,
        connection: NatsConnection,
        subject: str,
        hello: Callable[[], tuple[bytes, int] | None],
        logger: logging.Logger,
    ) -> None:
        """`hello`: what to say, and the sequence number in the stream up to which that is there, 0
        for none; None if there is nothing to say now.
        """
        self.is_silent, self.num_sent = False, 0
        self.on_silent: Callable[[bool], None] = lambda is_silent: None
        self.is_urgent: Callable[[], bool] = lambda: False
        """Whether beats come twice as often."""
        self._connection, self._subject, self._hello = connection, subject, hello
        self._logger = logger
        self._me = f"{int(time.time() * 1e6):020d}-{secrets.token_hex(4)}"
        self._silent_until_s = 0.0
        self._wake = asyncio.Event()

    def soon(self) -> None:
        """Say it now, and every 2 s from then on."""
        self._wake.set()

    async def run(self) -> None:
        """Beat, for ever."""
        client = await self._connection.connected()
        with self._connection.listening(self._on_change):
            async with subscribed(client, self._subject, self._on_beat):
                while True:
                    await self._beat(client)
                    await self._wait()

    async def _beat(self, client: Client) -> None:
        self._listen_on()
        if not self.is_silent and self._connection.is_connected:
            with suppress(nats.errors.Error, OSError):
                await self._send(client)

    async def _send(self, client: Client) -> None:
        said = self._hello()
        if said is None:
            return
        payload, seq = said
        headers = {PUBLISHER_HEADER: self._me}
        if seq:
            headers[SEQ_HEADER] = str(seq)
        self.num_sent += 1
        await client.publish(self._subject, payload, headers=headers)

    async def _wait(self) -> None:
        await asyncio.sleep(_SHORTEST_S)
        pause_s = (_STUCK_S if self.is_urgent() else HEARTBEAT_S) - _SHORTEST_S
        with suppress(TimeoutError):
            async with asyncio.timeout(max(pause_s, 0.001)):
                await self._wake.wait()
        self._wake.clear()

    def _on_change(self, is_connected: bool) -> None:
        if is_connected:
            # Who is silent has heard nothing meanwhile, whoever spoke.
            self._silent_until_s = time.monotonic() + ALONE_S
            self._wake.set()

    async def _on_beat(self, msg: Msg) -> None:
        other = (msg.headers or {}).get(PUBLISHER_HEADER, "")
        if not other or other == self._me:
            return
        if other < self._me:
            self._wake.set()  # so that it hears of this one
            return
        self._silent_until_s = time.monotonic() + ALONE_S
        if not self.is_silent:
            self.is_silent = True
            self._logger.warning(
                "kvplug: NATS: another publisher has this one's name, %s, and started later: this "
                "one is silent until that one is gone. Name each engine by its own URL "
                "(KVPLUG_NATS_WORKER)",
                self._subject,
            )
            self.on_silent(True)

    def _listen_on(self) -> None:
        if self.is_silent and time.monotonic() >= self._silent_until_s:
            self.is_silent = False
            self._logger.warning("kvplug: NATS: %s has one publisher again: this", self._subject)
            self.on_silent(False)
