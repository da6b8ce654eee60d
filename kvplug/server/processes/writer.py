"""The writer: follows the events of all workers and writes the index. It serves no client.

In:  a configuration, a shared folder.   Out: arrays in the folder, until it is told to stop.

It looks at the workers, follows their events and asks the engines, as the router of one process
does; its /metrics and /health are asked by the readers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import uvloop
from aiohttp import web

from kvplug.server.api.prompts import Prompts
from kvplug.server.config import ServerConfig
from kvplug.server.processes.last_page import LastPage
from kvplug.server.processes.peers import PeerServer, keeping, stopped
from kvplug.server.service import RouterService
from kvplug.shared import layout
from kvplug.shared.folder import SharedFolder
from kvplug.shared.publishing import WritingRouter

logger = logging.getLogger(__name__)

NAME: Final = "writer"
# After another writer: until the engines have said again what they hold, readers go on with what
# there was.
_LONGEST_CATCH_UP_S: Final = 5.0
_LOOK_S: Final = 0.02


class WriterService(RouterService):
    """Everything but the port."""

    def __init__(self, config: ServerConfig, folder: SharedFolder) -> None:
        self.writing = WritingRouter(config.router, folder)
        super().__init__(config, self.writing)
        self._folder = folder

    def _make_runner(self, prompts: Prompts) -> web.AppRunner:
        runner = super()._make_runner(prompts)
        runner.app.middlewares.insert(0, keeping(LastPage(self._folder, NAME)))
        return runner

    async def _listen(self) -> None:
        self._peers = PeerServer(self._folder, NAME, self._runner)
        await self._peers.start()

    def _stop_listening(self) -> None:
        self._peers.stop()

    async def publish(self) -> None:
        """Write for readers, as soon as there is enough to read."""
        late_s = time.monotonic() + _LONGEST_CATCH_UP_S
        # Events come in a thread, which is not to say so to a loop with each of them.
        while not self.writing.catch_up(is_late=time.monotonic() > late_s):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)


def run_writer(
    config: ServerConfig, folder: SharedFolder, alive_at: int, ready: Callable[[], None]
) -> None:
    """Write until a signal, or until nobody has the other end of the pipe any more."""
    uvloop.run(_serve(config, folder, alive_at, ready))


async def _serve(
    config: ServerConfig, folder: SharedFolder, alive_at: int, ready: Callable[[], None]
) -> None:
    lock = folder.lock(layout.WRITER_LOCK)
    assert lock is not None, "one writer at a time"
    stopping = stopped(alive_at)
    async with WriterService(config, folder) as service:
        await service.publish()
        ready()
        await stopping.wait()
