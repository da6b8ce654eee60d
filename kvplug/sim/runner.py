"""A simulated engine in real time.

In:  requests.   Out: to each its tokens, as their steps end; event batches to a publisher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from kvplug.events import EventBatch
from kvplug.sim.engine import Lora, Request, SimulatedEngine, Step
from kvplug.sim.scheduler import Emitted

# A step that woke up late by less is followed by one that began in time: timers overshoot by a
# millisecond, and steps are not much longer.
_MAX_CATCH_UP_S: Final = 0.02
_IDLE: Final = 0.0  # an end so long ago that the next step begins when it begins


class EngineRunner:
    """Keep run() going as a task; all calls from its event loop."""

    def __init__(self, engine: SimulatedEngine, publish: Callable[[EventBatch], None]) -> None:
        self.engine = engine
        self._publish = publish
        self._queues: dict[Request, asyncio.Queue[Emitted]] = {}
        self._has_requests = asyncio.Event()
        # Steps are stamped with the time of day, as vLLM's, but a clock set back stops nothing.
        self._offset_s = time.time() - time.monotonic()

    @property
    def num_requests(self) -> int:
        """Requests that have not been answered."""
        return len(self._queues)

    async def run(self) -> None:
        """Step for as long as there are requests, then wait for one."""
        ended_at = _IDLE
        while True:
            await self._has_requests.wait()
            now = self._now()
            ended_at = await self._step(ended_at if now - ended_at < _MAX_CATCH_UP_S else now)

    def submit(
        self, prompt: Sequence[int], max_tokens: int, *, lora: Lora | None, salt: str
    ) -> Request:
        """Queue a request; ask for its tokens(), or cancel() it."""
        request = self.engine.submit(prompt, max_tokens, lora=lora, salt=salt)
        self._queues[request] = asyncio.Queue()
        self._has_requests.set()
        return request

    async def tokens(self, request: Request) -> AsyncIterator[Emitted]:
        """The tokens of a request, up to the last."""
        queue = self._queues[request]
        while True:
            token = await queue.get()
            yield token
            if token.finish_reason:
                return

    def cancel(self, request: Request) -> None:
        """Forget a request, and its work if it has not ended."""
        if self._queues.pop(request, None):
            self.engine.abort(request)

    async def _step(self, started_at: float) -> float:
        ended_at = self.engine.begin_step(started_at)
        if ended_at is None:
            self._has_requests.clear()
            return _IDLE
        await asyncio.sleep(ended_at - self._now())
        self._tell(self.engine.finish_step())
        return ended_at

    def _tell(self, step: Step) -> None:
        if step.events:
            self._publish(step.batch())
        for token in step.emitted:
            if queue := self._queues.get(token.request):
                queue.put_nowait(token)

    def _now(self) -> float:
        return time.monotonic() + self._offset_s
