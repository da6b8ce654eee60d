"""The way from one process to one NATS server, which can be broken.

In:  a port on loopback.   Out: a port that leads there; cut, stall and restore by order.

`cut` ends the connections and takes no more, as a server that is gone does. `stall` lets nothing
through, either way, and says nothing of it, as a broken network does; new connections are taken and
lead nowhere.
"""

import asyncio
import contextlib
import threading

_CHUNK_BYTES = 2**16
_LIMIT_S = 10.0


class TcpProxy:
    """A context manager; url, cut, stall, restore; num_connections ever taken."""

    def __init__(self, upstream_port):
        self._upstream_port, self.port = upstream_port, 0
        self.num_connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks = set()

    @property
    def url(self):
        return f"nats://127.0.0.1:{self.port}"

    def cut(self):
        self._order(self._cut())

    def stall(self):
        self._order(self._let_through(is_open=False))

    def restore(self):
        self._order(self._restore())

    def __enter__(self):
        self._thread.start()
        self._order(self._restore())
        return self

    def __exit__(self, *_):
        self._order(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_S)
        self._loop.close()

    def _order(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_LIMIT_S)

    async def _let_through(self, *, is_open):
        if is_open:
            self._is_open.set()
        else:
            self._is_open.clear()

    async def _restore(self):
        if not hasattr(self, "_is_open"):
            self._is_open = asyncio.Event()
        await self._let_through(is_open=True)
        if not hasattr(self, "_server"):
            self._server = await asyncio.start_server(self._take, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _cut(self):
        await self._let_through(is_open=False)
        if hasattr(self, "_server"):
            self._server.close()
            del self._server
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _take(self, reader, writer):
        self.num_connections += 1
        task = asyncio.create_task(self._lead(reader, writer))
        self._tasks.add(task)
        # Also of one that is cancelled before it begins.
        task.add_done_callback(lambda _: writer.transport.abort())
        task.add_done_callback(self._tasks.discard)

    async def _lead(self, reader, writer):
        with contextlib.suppress(OSError):
            await self._join(reader, writer)

    async def _join(self, reader, writer):
        await self._is_open.wait()
        upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        ways = [self._pass_on(reader, upstream[1]), self._pass_on(upstream[0], writer)]
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            upstream[1].transport.abort()
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_on(self, reader, writer):
        while chunk := await reader.read(_CHUNK_BYTES):
            await self._is_open.wait()
            writer.write(chunk)
            await writer.drain()
