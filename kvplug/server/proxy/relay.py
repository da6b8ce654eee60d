"""The stream of an answer from a worker to a client.

In:  a connection to a worker, an answer to a client.   Out: whole events, each as soon as it is
there; what they say of tokens.

A part goes to the client's socket within the call that reads it from the worker's, without a task
or a queue. A client that reads more slowly than the worker writes stops the reading, so that no
more than one buffer of it waits here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvplug.server.proxy.answers import Stream, WholeEvents
from kvplug.server.proxy.client import ClientAnswer
from kvplug.server.proxy.connection import Connection, LostError
from kvplug.server.proxy.upstream import passed_on

Shape = Callable[[bytes], bytes]

logger = logging.getLogger(__name__)


class Relay:
    """begin, then finish; if that fails, go_on or close. `stream` is what the answer has said.

    `shape`: whole events of the worker to what the client gets of them, which may be nothing.
    """

    def __init__(
        self,
        worker: Connection,
        client: ClientAnswer,
        on_first_token: Callable[[], object],
        shape: Shape | None = None,
    ) -> None:
        self.stream = Stream()
        self._shape = shape
        self._worker, self._client, self._on_first_token = worker, client, on_first_token
        self._events = WholeEvents()

    async def begin(self) -> None:
        """Await the first part, and send it. LostError, ApiError before anything is sent: until
        then another worker can take the request over.
        """
        worker, first = self._worker, self._worker.take()
        while not first and not worker.has_ended:
            await worker.wait()
            first = worker.take()
        self._client.begin(worker.status, passed_on(worker.headers))
        self._pass(first)

    async def finish(self) -> int:
        """All other parts; the status of the answer. LostError, ApiError if the worker breaks
        off: not if all that is missing is the end of its connection's answer.
        """
        try:
            await self._parts()
        except LostError:
            if not self.stream.is_done:
                raise
        self._client.end(self._events.take_begun())
        return self._worker.status

    async def _parts(self) -> None:
        worker, client = self._worker, self._client
        worker.pass_parts(self._pass)
        while not worker.has_ended:
            await worker.wait()
            if client.is_behind:
                await client.caught_up()
            worker.resume()

    async def go_on(self, worker: Connection, shape: Shape) -> None:
        """The rest, from another worker. LostError, ApiError if that one breaks off, too."""
        self._worker, self._shape, self._events = worker, shape, WholeEvents()
        if part := worker.take():
            self._pass(part)
        await self.finish()

    def close(self, events: bytes) -> None:
        """End with these."""
        self._client.end(events)

    def _pass(self, part: bytes) -> None:
        whole = self._events.add(part)
        if not whole:
            return
        if self.stream.add(whole):
            self._on_first_token()
        if self._shape is not None and not (whole := self._shape(whole)):
            return
        self._client.add(whole)
        if self._client.is_behind:
            self._worker.pause()
            self._worker.wake()
