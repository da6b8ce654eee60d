"""A look at engines without a running router: what they say of themselves, and how they fit.

In:  a configuration, as a router would have it.   Out: findings.

What only traffic shows (events that never match, a usage without cached tokens) is not found.
"""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp

from kvplug.audit.audit import Audit
from kvplug.router.core import Router
from kvplug.server.config import ServerConfig
from kvplug.server.diagnosis.board import Diagnosis
from kvplug.server.diagnosis.finding import Code, Finding
from kvplug.server.fleet import Fleet
from kvplug.server.prompts import Prompts

_CONNECT_LIMIT_S = 3.0
_POLL_S = 0.02


async def ask_directly(config: ServerConfig, session: aiohttp.ClientSession) -> list[Finding]:
    """Connect to all workers and their events, ask, and leave again."""
    audit = Audit(Router(config.router))
    fleet = Fleet(config, audit.router, audit, session)
    diagnosis = Diagnosis(
        config, fleet, audit, Prompts(config.tokenizer), session, connect_grace_s=0.0
    )
    try:
        await fleet.start()
        await asyncio.gather(diagnosis.ask(), _wait_for_events(fleet))
        # Who comes for a moment has not missed what it would have to know.
        return [f for f in diagnosis.look() if f.code is not Code.EVENTS_INCOMPLETE]
    finally:
        await fleet.stop()


async def _wait_for_events(fleet: Fleet) -> None:
    followers = [worker.follower for worker in fleet.workers.values() if worker.follower]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CONNECT_LIMIT_S):
            # The listener's thread connects them; it knows no event loop.
            while not all(follower.connected for follower in followers):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
