"""Answers to clients that are not there any more."""

import asyncio

import pytest
import uvloop
from aiohttp import web

from kvplug.server.proxy.client import ClientAnswer
from tests.waiting import until


async def write_to_one_that_left():
    """All that can be written, once the connection is gone."""
    is_over = asyncio.get_running_loop().create_future()

    async def leave_and_write(request):
        answer, transport = ClientAnswer(request, 1.0), request.transport
        answer.begin(200, [])
        transport.abort()
        await until(lambda: request.transport is None, "the connection is closed")
        answer.add(b"data: 1\n\n")
        answer.end(b"")
        with pytest.raises(ConnectionResetError):
            await answer.send(200, [], b"{}")
        is_over.set_result(answer.is_behind)
        return answer

    app = web.Application()
    app.router.add_get("/", leave_and_write)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    _, writer = await asyncio.open_connection(*runner.addresses[0])
    writer.write(b"GET / HTTP/1.1\r\nHost: r\r\n\r\n")
    assert not await asyncio.wait_for(is_over, 20)
    writer.close()
    await runner.cleanup()


def test_on_uvloop_nothing_is_written_to_a_client_that_left():
    uvloop.run(write_to_one_that_left())
