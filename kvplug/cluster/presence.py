"""Which router replicas there are: each says so every 2 s, and whoever starts asks first.

In:  a connection, the router's id, how far it is.   Out: the others; whether one has the same id.

Two routers of one id would read one consumer, and each would miss what the other got. So one that
finds its id taken when it starts goes on with another, and one that finds it later says so.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
import nats.errors
from nats.aio.msg import Msg

from kvplug.nats.connection import NatsConnection
from kvplug.nats.subjects import Subjects

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 2.0
_ANSWER_TIMEOUT_S: Final = 0.3
# Three of them were lost, or it is gone.
_GONE_AFTER_S: Final = 7.0
_MAX_BYTES: Final = 4096
_MAX_REPLICAS: Final = 256


class ReplicaSaid(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself. process: another one at each start; asks: all others are to
    answer at once; leaves: it is gone now; applied_seq: up to where it has applied the stream.
    """

    router_id: str
    process: str
    asks: bool = False
    leaves: bool = False
    is_ready: bool = False
    applied_seq: int = 0
    generation: int = 0


class Presence:
    """begin, run and end, in the connection's loop; others; is_double."""

    def __init__(
        self,
        connection: NatsConnection,
        subjects: Subjects,
        router_id: str,
        say: Callable[[ReplicaSaid], ReplicaSaid],
    ) -> None:
        """`say`: fills in how far this one is."""
        self.router_id = router_id
        """Of this one: the id that was given, with an addition if another router has it."""
        self._connection, self._subjects, self._say = connection, subjects, say
        self._process = secrets.token_hex(8)
        self._heard: dict[str, tuple[float, ReplicaSaid]] = {}
        self._double_at_s = -_GONE_AFTER_S

    @property
    def is_double(self) -> bool:
        """Whether another router with the same id was heard of late."""
        return time.monotonic() - self._double_at_s < _GONE_AFTER_S

    def others(self) -> dict[str, ReplicaSaid]:
        """By id, what the others said last; from any thread."""
        young = time.monotonic() - _GONE_AFTER_S
        heard = list(self._heard.values())
        return {said.router_id: said for at_s, said in heard if at_s > young}

    async def begin(self) -> None:
        """Find out who is there; waits 0.3 s for them to answer."""
        client = await self._connection.connected()
        await client.subscribe(self._subjects.all_replicas, cb=self._hear)
        await self._publish(asks=True)
        await asyncio.sleep(_ANSWER_TIMEOUT_S)
        if self.is_double:
            given, self.router_id = self.router_id, f"{self.router_id[:58]}-{self._process[:4]}"
            self._double_at_s = -_GONE_AFTER_S
            logger.warning(
                "another router has the id %s: this one is %s; give each a --router-id of its own",
                given,
                self.router_id,
            )

    async def run(self) -> None:
        """Say every 2 s that this one is there, for ever."""
        while True:
            await self._publish()
            await asyncio.sleep(_INTERVAL_S)

    async def end(self) -> None:
        """Say that it leaves."""
        await self._publish(leaves=True)

    async def _publish(self, *, asks: bool = False, leaves: bool = False) -> None:
        if not self._connection.is_connected:
            return
        client = await self._connection.connected()
        said = ReplicaSaid(
            router_id=self.router_id, process=self._process, asks=asks, leaves=leaves
        )
        payload = msgspec.json.encode(self._say(said))
        with suppress(nats.errors.Error, OSError):  # it is said again
            await client.publish(self._subjects.replica(self.router_id), payload)

    async def _hear(self, message: Msg) -> None:
        said = _read(message.data)
        if said is None or said.process == self._process:
            return
        if said.router_id == self.router_id and not said.leaves:
            self._note_double()
        if said.leaves:
            self._heard.pop(said.process, None)
        else:
            self._note(said)
        if said.asks:
            await self._publish()

    def _note(self, said: ReplicaSaid) -> None:
        now_s = time.monotonic()
        self._heard = {
            process: (at_s, each)
            for process, (at_s, each) in self._heard.items()
            if now_s - at_s < _GONE_AFTER_S
        }
        if said.process in self._heard or len(self._heard) < _MAX_REPLICAS:
            self._heard[said.process] = now_s, said

    def _note_double(self) -> None:
        if not self.is_double:
            logger.warning("another router has the id %s, too", self.router_id)
        self._double_at_s = time.monotonic()


def _read(payload: bytes) -> ReplicaSaid | None:
    """None for what is no such message."""
    if len(payload) > _MAX_BYTES:
        return None
    try:
        return msgspec.json.decode(payload, type=ReplicaSaid)
    except msgspec.DecodeError:
        return None
