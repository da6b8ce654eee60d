"""Answers on their way from a worker to a client, on real sockets, byte by byte."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import pytest

from tests.server.test_service import COMPLETION, serving
from tests.waiting import until

_MODELS = json.dumps({"data": [{"id": "m", "root": ""}]}).encode()
_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
_SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
_CHUNKED = _SSE + b"Transfer-Encoding: chunked\r\n\r\n"
_EVENT = b'data: {"choices": []}\n\n'


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


class RawEngine:
    """Sends each POST the same bytes; counts connections, and those that were closed on it."""

    def __init__(self, answer, *, closes=False):
        self.answer, self.closes = answer, closes
        self.num_connections, self.num_lost, self.num_sent, self.heads = 0, 0, 0, []

    async def serve(self, reader, writer):
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._read(reader, head)
                if not head.startswith(b"POST"):
                    writer.write(_JSON % (len(_MODELS), _MODELS))
                    continue
                self.heads.append(head)
                await self._send(writer)
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_lost += 1
        finally:
            writer.close()

    async def _read(self, reader, head):
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or 0))

    async def _send(self, writer):
        parts = [self.answer] if isinstance(self.answer, bytes) else self.answer
        for part in parts:
            writer.write(part)
            await writer.drain()
            self.num_sent += len(part)


@asynccontextmanager
async def before(engine, **settings):
    """(service, ask): a router before the engine; ask gives (reader, writer) of a request."""
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    writers = []

    async def ask(*, version=b"1.1", stream=True, headers=b"", limit=2**16, times=1, **more):
        host, port = service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
        writers.append(writer)
        writer.write(times * post(version=version, stream=stream, headers=headers, **more))
        return reader, writer

    async with server, serving([url], **settings) as (service, _):
        try:
            yield service, ask
        finally:
            for writer in writers:
                writer.close()


def post(*, version=b"1.1", stream=True, headers=b"", **more):
    body = json.dumps({**COMPLETION, "stream": stream, **more}).encode()
    head = b"POST /v1/completions HTTP/%b\r\nHost: r\r\n%bContent-Length: %d\r\n\r\n"
    return head % (version, headers, len(body)) + body


async def answer_of(reader):
    """(head, body) of an answer in chunks."""
    async with asyncio.timeout(20):
        head, body = await reader.readuntil(b"\r\n\r\n"), b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    return head, body


async def test_a_connection_serves_one_stream_after_the_other_on_both_sides():
    engine = RawEngine(_CHUNKED + chunk(_EVENT) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    async with before(engine, health_interval_s=60) as (_, ask):
        looks = engine.num_connections
        reader, writer = await ask()
        for _ in range(3):
            head, body = await answer_of(reader)
            assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream")
            assert body == _EVENT + b"data: [DONE]\n\n"
            writer.write(post())
        await answer_of(reader)
        assert engine.num_connections == looks + 1


async def test_a_stream_may_end_with_its_connection():
    engine = RawEngine(_SSE + b"\r\n" + _EVENT, closes=True)
    async with before(engine) as (service, ask):
        for _ in range(2):
            reader, _ = await ask()
            assert (await answer_of(reader))[1] == _EVENT
        assert all(worker.is_up for worker in service.fleet.workers.values())


async def test_to_a_client_of_http_1_0_the_end_of_the_connection_ends_a_stream():
    engine = RawEngine(_CHUNKED + chunk(_EVENT) + b"0\r\n\r\n")
    async with before(engine) as (_, ask):
        reader, _ = await ask(version=b"1.0")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert b"Connection: close" in head
    assert body == _EVENT


async def test_an_answer_to_nothing_closes_the_connection():
    """A worker that sends more than was asked for would answer the next client with it."""
    answer = _JSON % (2, b"{}")
    engine = RawEngine(answer + answer)
    async with before(engine) as (_, ask):
        for _ in range(2):
            reader, writer = await ask(stream=False, headers=b"Connection: close\r\n")
            assert (await reader.read()).endswith(b"\r\n\r\n{}")
            writer.close()
        await until(lambda: engine.num_lost >= 2, "both connections are closed")


@pytest.mark.parametrize(
    "answer",
    [
        b"no HTTP\r\n\r\n",
        _JSON.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n") % (2, b"{}"),
        _CHUNKED + b"xyz\r\n",
        b"HTTP/1.1 000 X\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 099 X\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_502_by_name(answer):
    engine = RawEngine(answer)
    async with before(engine) as (_, ask):
        reader, _ = await ask(headers=b"Connection: close\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 502 ")
    assert json.loads(body)["error"]["code"] == "invalid_answer"


async def test_an_interim_answer_is_none():
    engine = RawEngine(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + _JSON % (2, b"{}"))
    async with before(engine) as (_, ask):
        reader, _ = await ask(stream=False, headers=b"Connection: close\r\n")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"Link" not in answer


async def test_a_trailer_is_no_header():
    head = _JSON.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
    engine = RawEngine(head + chunk(b"{}") + b"0\r\nX-Trailer: 1\r\n\r\n")
    async with before(engine) as (_, ask):
        reader, _ = await ask(stream=False, headers=b"Connection: close\r\n")
        answer = await reader.read()
    assert answer.endswith(b"{}")
    assert b"X-Trailer" not in answer


async def test_an_event_stream_without_a_body_has_none():
    engine = RawEngine(_SSE.replace(b"200 OK", b"204 No Content") + b"\r\n")
    async with before(engine) as (_, ask):
        reader, _ = await ask(headers=b"Connection: close\r\n")
        assert (await reader.read()).endswith(b"Connection: close\r\n\r\n")


async def test_a_stream_that_said_it_is_done_is_whole():
    done = b"data: [DONE]\n\n"
    engine = RawEngine(_CHUNKED + chunk(_EVENT) + chunk(done), closes=True)
    async with before(engine) as (service, ask):
        reader, _ = await ask()
        assert (await answer_of(reader))[1] == _EVENT + done
        assert [each.num_broken for each in service.proxy.counts.values()] == [0]


class HastyEngine(RawEngine):
    """Answers a POST at its head, and reads nothing more."""

    async def _read(self, reader, head):
        if not head.startswith(b"POST"):
            await super()._read(reader, head)

    async def _send(self, writer):
        await super()._send(writer)
        with suppress(TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), 5)


async def test_a_connection_with_a_request_that_was_not_read_is_not_used_again():
    engine = HastyEngine(_JSON % (2, b"{}"))
    async with before(engine, health_interval_s=60) as (_, ask):
        for more in ({"user": "x" * 20_000_000}, {}):
            reader, _ = await ask(stream=False, headers=b"Connection: close\r\n", **more)
            answer = await asyncio.wait_for(reader.read(), 3)
            assert answer.startswith(b"HTTP/1.1 200")


async def test_a_whole_answer_to_a_slow_client_leaves_a_connection_that_is_read():
    answer = _CHUNKED + chunk(b"data: " + b"x" * 100_000 + b"\n\n") + b"0\r\n\r\n"
    engine = RawEngine(answer)
    async with before(engine, client_timeout_s=20) as (_, ask):
        slow, _ = await ask(limit=1000, times=100)
        await until(lambda: len(engine.heads) > 1, "one answer is out")
        num_before = -1
        while num_before != len(engine.heads):  # as long as anything moves
            num_before = len(engine.heads)
            await asyncio.sleep(0.05)
        for _ in range(100):
            await answer_of(slow)


async def test_clients_that_leave_or_read_nothing_are_not_logged_as_errors(caplog):
    engine = RawEngine(_JSON % (20_000_000, b"x" * 20_000_000))
    async with before(engine, client_timeout_s=0.2) as (service, ask):
        reader, _ = await ask(stream=False, limit=1000)
        await reader.readline()
        times = service.following.times
        await until(lambda: times.num_by_status[499] == 1, "it is dropped")
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


async def test_a_client_that_reads_slowly_and_steadily_gets_all_of_a_large_answer():
    engine = RawEngine(_JSON % (30_000_000, b"x" * 30_000_000))
    async with before(engine, client_timeout_s=0.4) as (_, ask):
        reader, _ = await ask(stream=False, limit=1000)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(30):  # longer than the time limit, and never as long without a read
            await reader.readexactly(1_000_000)
            await asyncio.sleep(0.03)


def endless():
    yield _CHUNKED
    while True:
        yield chunk(b"data: " + b"x" * 60_000 + b"\n\n")


async def test_a_client_that_reads_nothing_stops_the_worker_and_is_dropped():
    engine = RawEngine(endless())
    async with before(engine, client_timeout_s=0.5) as (service, ask):
        reader, _ = await ask(limit=1000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await until(lambda: engine.num_lost == 1, "the worker's connection is closed")
        await until(lambda: len(service.router.load) == 0, "its load is gone")
        # What fits into the buffers of the kernel on both ways, and a few parts in the router.
        assert engine.num_sent < 20_000_000
        assert all(worker.is_up for worker in service.fleet.workers.values())


async def test_a_client_that_reads_again_gets_everything():
    parts = [chunk(b"data: %d" % i + b"x" * 60_000 + b"\n\n") for i in range(300)]
    engine = RawEngine([_CHUNKED, *parts, b"0\r\n\r\n"])
    async with before(engine) as (_, ask):
        reader, _ = await ask(limit=1000)
        num_before = -1
        while num_before != engine.num_sent:  # as long as anything moves
            num_before = engine.num_sent
            await asyncio.sleep(0.05)
        assert engine.num_sent < sum(map(len, parts))
        _, body = await answer_of(reader)
        assert body.count(b"data: ") == 300
