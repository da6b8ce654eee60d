"""A publisher's work in the loop of its connection: woken from the engine's thread, ended in time.

In:  what to do when woken, coroutines that run until the end.
Out: nothing waits for it, and nothing that it raises gets further than a counter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final

from kvplug.engines.life_stream import STOP_LIMIT_S
from kvplug.engines.wake import Wake
from kvplug.nats.connection import NatsConnection

_AGAIN_S: Final = 2.0
_POLL_S: Final = 0.01

Run = Callable[[], Coroutine[Any, Any, None]]


class NatsTask:
    """wake from any thread, stop from any but the loop's."""

    def __init__(
        self,
        connection: NatsConnection,
        work: Callable[[], bool],
        runs: Sequence[Run],
        on_error: Callable[[Exception], None],
        *,
        closes: bool,
        to_wake: Wake | None = None,
    ) -> None:
        """`work`: whether there is more to do at once; `closes`: `stop` stops the connection, too;
        `to_wake`: what others set to wake it, besides `wake`.
        """
        self._connection, self._work, self._runs = connection, work, runs
        self._on_error, self._closes = on_error, closes
        self._to_wake = to_wake or Wake()
        self._is_stopped = False
        self._task: asyncio.Task[None] | None = None
        connection.submit(self._run())

    def wake(self) -> None:
        """There is work; does not wait."""
        self._to_wake.set()

    def stop(self, owes: Callable[[], bool]) -> None:
        """End, when nothing is owed or after a second; again is harmless."""
        if self._is_stopped:
            return
        self._is_stopped = True
        with suppress(CancelledError, TimeoutError, RuntimeError):  # its loop is busy, or ended
            self._connection.submit(self._finish(owes)).result(2 * STOP_LIMIT_S)
        if self._closes:
            self._connection.stop()

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._to_wake.fd, self._on_wake)
        try:
            self._on_wake()
            async with asyncio.TaskGroup() as tasks:
                for run in self._runs:
                    tasks.create_task(self._for_ever(run))
        finally:
            loop.remove_reader(self._to_wake.fd)
            self._to_wake.close()

    def _on_wake(self) -> None:
        self._to_wake.drain()
        if self._work():
            asyncio.get_running_loop().call_soon(self._on_wake)

    async def _for_ever(self, run: Run) -> None:
        while True:
            try:
                await run()
            except Exception as error:  # noqa: BLE001  # it may be fine once the server is
                self._on_error(error)
                await asyncio.sleep(_AGAIN_S)

    async def _finish(self, owes: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_LIMIT_S):
                while owes():  # noqa: ASYNC110 - who owes knows when
                    await asyncio.sleep(_POLL_S)
        while self._task is not None and not self._task.done():
            self._task.cancel()  # again, as nats-py swallows some
            await asyncio.wait((self._task,), timeout=_POLL_S)
