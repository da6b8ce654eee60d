"""The lease on making a snapshot: it saves work, and nothing depends on it.

In:  who wants it.   Out: whether it is theirs, until it is released or they are silent.

The server expires it (a value with a time to live), so no clocks are compared. A holder that was
paused may go on without it: whatever it does is harmless (kvplug/cluster/checkpoints.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from nats.aio.client import Client

from kvplug.cluster.state_key import StateKey
from kvplug.errors import TransportError

logger = logging.getLogger(__name__)

KEY: Final = "lease"


class Lease:
    """`async with lease.held() as is_mine`."""

    def __init__(self, client: Client, bucket: str, holder: str, ttl_s: int) -> None:
        """`holder`: the router's id; `ttl_s`: after how much silence another one may take it."""
        self._key, self._holder, self._ttl_s = StateKey(client, bucket, KEY), holder, ttl_s
        self._revision: int | None = None

    async def is_free(self) -> bool:
        """Whether nobody has it now; TransportError."""
        return (await self._key.read()).value is None

    @asynccontextmanager
    async def held(self) -> AsyncIterator[bool]:
        """Take it, renew it meanwhile, and give it back; False if another one has it."""
        entry = await self._key.read()
        self._revision = None
        if entry.value is None:
            self._revision = await self._replace(entry.revision)
        if self._revision is None:
            yield False
            return
        renewing = asyncio.create_task(self._renew())
        try:
            yield True
        finally:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing
            await self._release()

    async def _replace(self, revision: int) -> int | None:
        return await self._key.replace(self._holder.encode(), revision, self._ttl_s)

    async def _renew(self) -> None:
        while self._revision is not None:
            await asyncio.sleep(self._ttl_s / 3)
            with suppress(TransportError):
                self._revision = await self._replace(self._revision)
        logger.info("the lease on making a snapshot was lost")

    async def _release(self) -> None:
        if self._revision is not None:
            with suppress(TransportError):  # it ends by itself
                await self._key.delete(self._revision)
