"""Streams that broke off go on at other workers.

In:  a stream that broke off, what is known of it.   Out: its rest, or False.

docs/migration.md says which streams can, and what is the same then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from kvplug.api_errors import ApiError
from kvplug.errors import NoWorkerError, UnknownRequestError
from kvplug.router.core import Router
from kvplug.router.decider import Decision
from kvplug.server.proxy.answers import is_event_stream
from kvplug.server.proxy.asked import Forward
from kvplug.server.proxy.connection import LostError
from kvplug.server.proxy.continuation import PATH, Continuation
from kvplug.server.proxy.relay import Relay
from kvplug.server.proxy.upstream import Outgoing, Upstream
from kvplug.server.workers.fleet import Fleet

logger = logging.getLogger(__name__)

_MAX_MIGRATIONS: Final = 3  # as of KvPushRouter
_OK: Final = 200


class Broken(NamedTuple):
    """A stream whose worker went away: the request as it went there, and what came of it."""

    forward: Forward
    outgoing: Outgoing
    decision: Decision
    relay: Relay
    continuation: Continuation


class Migrating:
    """go_on with a stream.

    `on_move`: a worker that it goes to; `on_loss`: one that broke off the rest, too, and why.
    """

    def __init__(
        self,
        router: Router,
        fleet: Fleet,
        upstream: Upstream,
        *,
        on_move: Callable[[str], object],
        on_loss: Callable[[str, str], object],
    ) -> None:
        self._router, self._fleet, self._upstream = router, fleet, upstream
        self._on_move, self._on_loss = on_move, on_loss

    async def go_on(self, broken: Broken) -> bool:
        """To the end of the stream; False if it cannot be continued, or no longer."""
        continuation, decision = broken.continuation, broken.decision
        lost = {decision.rank.worker}
        for _ in range(_MAX_MIGRATIONS):
            if continuation.is_complete:
                broken.relay.close(continuation.closing())
                return True
            if continuation.num_left is None:
                return False
            try:
                decision = self._moved(broken, continuation.num_left, lost)
            except (NoWorkerError, UnknownRequestError) as error:
                logger.info("request %s goes on nowhere: %s", decision.request_id, error)
                return False
            try:
                await self._exchange(broken, decision)
            except (LostError, ApiError) as error:
                lost.add(decision.rank.worker)
                self._on_loss(decision.rank.worker, str(error))
            else:
                return True
        return False

    def _moved(self, broken: Broken, num_left: int, lost: set[str]) -> Decision:
        forward, tokens = broken.forward, broken.continuation.tokens
        migration = self._router.migrate(
            broken.decision.request_id,
            tokens,
            namespace=forward.namespace,
            exclude=lost,
            workers=self._fleet.candidates(forward.model),
            max_tokens=num_left,
            reports_first_token=True,
        )
        rank = migration.decision.rank
        self._on_move(rank.worker)
        logger.info(
            "request %s goes on at %s, %d tokens", broken.decision.request_id, rank, len(tokens)
        )
        return migration.decision

    async def _exchange(self, broken: Broken, decision: Decision) -> None:
        name, dp_rank = decision.rank.worker, decision.rank.dp_rank
        outgoing = broken.outgoing._replace(
            worker=self._fleet.url_of(name),
            dp_rank=dp_rank if self._fleet.has_ranks(name) else None,
            body=broken.continuation.rest(),
            path=PATH,
        )
        async with self._upstream.post(outgoing) as answer:
            if answer.status != _OK or not is_event_stream(answer.headers):
                raise LostError(f"it answered with status {answer.status}", was_reached=True)
            await broken.relay.go_on(answer, broken.continuation.reshaped)
