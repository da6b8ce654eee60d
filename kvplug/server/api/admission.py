"""Which requests may begin: only so many at a time, a bounded queue for others, 429 beyond.

In:  requests, as they come and end.   Out: a turn for each, in their order.

A client that leaves is taken out of the queue. Without a limit nothing waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final

from kvplug.api_errors import ApiError
from kvplug.server.config import ServerConfig
from kvplug.server.observability.journey import current

# Of the last so many ends, the pace is taken by which a queue moves.
_NUM_ENDS: Final = 64
_RETRY_S: Final = (1, 60)
_FREE: Final = nullcontext()


class Admission:
    """turn: a context within which a request is served, or handed over to who ends it.

    Read: num_in_flight, num_waiting; num_refused by reason.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._is_limited = config.max_in_flight is not None
        self._limit = config.max_in_flight or 0
        self._size, self._timeout_s = config.queue_limit, config.queue_timeout_s
        self.num_in_flight = 0
        self.num_refused: Counter[str] = Counter({"queue_full": 0, "queue_timeout": 0})
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ends: deque[float] = deque(maxlen=_NUM_ENDS)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Wait for it; ApiError, 429, if the queue is full, or the wait is too long."""
        return self._turn() if self._is_limited else _FREE

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._waiting or self.num_in_flight >= self._limit:
            await self._wait()
        else:
            self.num_in_flight += 1
        try:
            yield
        finally:
            current().at_end(self._end_turn)

    def _end_turn(self) -> None:
        self._ends.append(time.monotonic())
        self._pass_on()

    async def _wait(self) -> None:
        if len(self._waiting) >= self._size:
            raise self._refusal("queue_full", "the router has as many requests as it may")
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            async with asyncio.timeout(self._timeout_s):
                await mine
        except TimeoutError as error:
            self._leave(mine)
            text = f"the request waited {self._timeout_s:g} s in vain"
            raise self._refusal("queue_timeout", text) from error
        except asyncio.CancelledError:
            self._leave(mine)
            raise

    def _leave(self, mine: asyncio.Future[None]) -> None:
        """A turn that came too late is the next one's."""
        if mine in self._waiting:
            self._waiting.remove(mine)
        elif mine.done() and not mine.cancelled():
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            following = self._waiting.popleft()
            if not following.done():
                following.set_result(None)  # which takes the place of the one that ended
                return
        self.num_in_flight -= 1

    def _refusal(self, reason: str, text: str) -> ApiError:
        self.num_refused[reason] += 1
        retry_s = self._retry_after_s()
        message = f"{text}; try again in {retry_s} s"
        return ApiError(429, message, code="too_many_requests", retry_after_s=retry_s)

    def _retry_after_s(self) -> int:
        """Until those that wait have had their turn, by how fast requests ended of late."""
        least, most = _RETRY_S
        if len(self._ends) < 2:
            return least
        per_s = (len(self._ends) - 1) / max(1e-6, time.monotonic() - self._ends[0])
        return max(least, min(most, math.ceil((len(self._waiting) + 1) / per_s)))
