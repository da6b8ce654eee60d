"""Requests that are meant to be read in two ways, that never end, or that grow: on raw sockets.

Each is refused with a 4xx, its connection is closed, no engine hears of it, and the router serves
on. A proxy that lets one through may send a part of it to an engine as a request of its own.
"""

import asyncio
import contextlib
import gzip
import json
import re
import time
import zlib

import pytest

from tests.server.engine import Engine
from tests.server.test_service import COMPLETION, routing

BODY = json.dumps(COMPLETION).encode()
PATH = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
REFUSALS = (b"HTTP/1.0 4", b"HTTP/1.1 4")
STATUS_LINE = re.compile(rb"HTTP/1\.[01] \d{3} ")
LIMIT_S = 20.0
TIMEOUT_S = 0.5


def request(*headers, body=BODY, start=PATH):
    return start + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


def length(body=BODY):
    return b"Content-Length: %d" % len(body)


CHUNKED = b"Transfer-Encoding: chunked"
IN_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
TWO_READINGS = {
    "length_and_chunked": request(length(), CHUNKED, body=IN_CHUNKS + SMUGGLED),
    "chunked_and_length": request(CHUNKED, b"Content-Length: 3", body=IN_CHUNKS + SMUGGLED),
    "two_lengths": request(length(), b"Content-Length: 5", body=BODY + SMUGGLED),
    "one_length_twice": request(length(), length()),
    "a_list_of_lengths": request(b"Content-Length: 5, %d" % len(BODY)),
    "a_length_with_a_sign": request(b"Content-Length: +%d" % len(BODY)),
    "a_negative_length": request(b"Content-Length: -1"),
    "a_length_in_hex": request(b"Content-Length: 0x20"),
    "a_length_in_words": request(b"Content-Length: ten"),
    "a_huge_length": request(b"Content-Length: " + b"9" * 40),
    "chunked_is_not_last": request(b"Transfer-Encoding: chunked, identity", body=IN_CHUNKS),
    "chunked_twice": request(CHUNKED, b"Transfer-Encoding: identity", body=IN_CHUNKS),
    "an_unknown_coding": request(b"Transfer-Encoding: xchunked", body=IN_CHUNKS),
    "a_chunk_size_in_words": request(CHUNKED, body=b"zz\r\n" + BODY),
    "a_negative_chunk_size": request(CHUNKED, body=b"-5\r\n" + BODY),
    "a_huge_chunk_size": request(CHUNKED, body=b"f" * 20 + b"\r\n" + BODY),
    "a_chunk_longer_than_it_says": request(CHUNKED, body=b"1\r\n{abc\r\n0\r\n\r\n"),
    "a_folded_header": request(length(), b"X-A: b\r\n c: d"),
    "a_folded_coding": request(length(), b"Transfer-Encoding:\r\n chunked", body=IN_CHUNKS),
    "a_space_before_the_colon": request(b"Content-Length : %d" % len(BODY)),
    "a_space_before_the_name": request(b" " + length()),
    "no_colon": request(length(), b"Transfer-Encoding chunked"),
    "no_name": request(length(), b": chunked"),
    "bare_line_feeds": request(length()).replace(b"\r\n", b"\n"),
    "a_bare_line_feed": request(length(), b"X-A: b\nX-B: c"),
    "a_bare_carriage_return": request(length(), b"X-A: b\rX-B: c"),
    "a_null_in_a_value": request(length(), b"X-A: b\0c"),
    "a_null_in_a_name": request(length(), b"X\0A: b"),
    "another_version": request(length(), start=b"POST /v1/completions HTTP/3.7\r\nHost: a\r\n"),
    "a_space_in_the_path": request(
        length(), start=b"POST /v1/com pletions HTTP/1.1\r\nHost: a\r\n"
    ),
    "two_hosts": request(length(), b"Host: b"),
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": bytes.fromhex("16030100a5010000a10303") + bytes(range(1, 200)),
    "noise": bytes(range(256)) * 4,
}
TOO_LARGE = {
    "a_long_header": request(length(), b"X-A: " + b"a" * 200_000),
    "many_headers": request(length(), *(b"X-%d: a" % number for number in range(50_000))),
    "a_long_path": request(length(), start=b"POST /%s HTTP/1.1\r\nHost: a\r\n" % (b"a" * 200_000)),
    "a_long_method": request(length(), start=b"A" * 200_000 + b" / HTTP/1.1\r\nHost: a\r\n"),
    "a_header_without_end": PATH + b"X-A: " + b"a" * 2_000_000,
}
NUM_ZEROS = 30_000_000


async def connect(service):
    host, port = service.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answer_to(service, sent):
    """All that comes until the router closes the connection; the client keeps its side open."""
    reader, writer = await connect(service)
    try:
        async with asyncio.timeout(LIMIT_S):
            reading = asyncio.create_task(reader.read())
            with contextlib.suppress(ConnectionError):  # it has closed already
                writer.write(sent)
                await writer.drain()
            return await reading
    except ConnectionResetError:
        return b""  # closed with bytes unread
    finally:
        writer.close()


def is_refused(answer):
    """One 4xx, or a connection closed so early that the answer was lost with it."""
    return (answer.startswith(REFUSALS) and len(STATUS_LINE.findall(answer)) == 1) or not answer


async def assert_serves_on(client, engine, num_before):
    async with client.post("/v1/completions", json=COMPLETION) as response:
        assert response.status == 200
    assert engine.num_requests == num_before + 1


@pytest.mark.parametrize("kind", TWO_READINGS)
async def test_what_can_be_read_in_two_ways_is_refused(kind):
    engine = Engine()
    async with routing(engine, client_timeout_s=TIMEOUT_S) as (service, client):
        answer = await answer_to(service, TWO_READINGS[kind])
        assert answer.startswith(REFUSALS), answer[:300]
        assert is_refused(answer), answer
        await assert_serves_on(client, engine, 0)


@pytest.mark.parametrize("kind", TOO_LARGE)
async def test_what_is_too_large_is_refused(kind):
    engine = Engine()
    async with routing(engine, client_timeout_s=TIMEOUT_S) as (service, client):
        assert is_refused(answer := await answer_to(service, TOO_LARGE[kind])), answer[:300]
        await assert_serves_on(client, engine, 0)


async def test_a_chunk_extension_without_end_is_given_up_with_the_body():
    engine = Engine()
    async with routing(engine, client_timeout_s=TIMEOUT_S) as (service, client):
        answer = await answer_to(service, request(CHUNKED, body=b"1;" + b"a" * 2_000_000))
        assert is_refused(answer), answer[:300]
        await assert_serves_on(client, engine, 0)


@pytest.mark.parametrize("between", ["", "?a="], ids=["path", "query"])
async def test_no_header_gets_in_by_a_path(between):
    engine = Engine()
    async with routing(engine) as (service, _):
        path = f"/v1/completions{between}%0d%0aX-Evil:%201"
        start = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n".encode()
        answer = await answer_to(service, request(length(), start=start))
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404"))
        assert "X-Evil" not in engine.last_headers
        assert b"\r\nX-Evil" not in answer


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_body_that_grows_beyond_the_limit_is_refused(coding):
    zeros = b'{"model": "m", "prompt": "' + b"0" * NUM_ZEROS + b'"}'
    body = gzip.compress(zeros, 6) if coding == "gzip" else zlib.compress(zeros, 6)
    assert len(body) < NUM_ZEROS / 900
    engine = Engine()
    async with routing(engine, max_body_bytes=2**20) as (service, client):
        headers = (length(body), b"Content-Encoding: " + coding.encode(), b"Connection: close")
        answer = await answer_to(service, request(*headers, body=body))
        assert is_refused(answer), answer[:300]
        await assert_serves_on(client, engine, 0)


async def drip(writer, sent, *, every_s):
    """Byte by byte, until the other side has had enough."""
    for number in range(len(sent)):
        writer.write(sent[number : number + 1])
        await writer.drain()
        await asyncio.sleep(every_s)


@pytest.mark.parametrize("before", [0, 1], ids=["at_once", "after_a_request"])
async def test_a_head_that_comes_byte_by_byte_is_given_up(before):
    engine = Engine()
    async with routing(engine, client_timeout_s=TIMEOUT_S) as (service, client):
        reader, writer = await connect(service)
        if before:
            writer.write(request(length()))
            await reader.readuntil(b'"hi"')
        began = time.monotonic()
        dripping = asyncio.create_task(drip(writer, PATH + b"X-A: " + b"a" * 10_000, every_s=0.05))
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        assert time.monotonic() - began < 8 * TIMEOUT_S
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        writer.close()
        await assert_serves_on(client, engine, before)


async def test_a_body_that_comes_byte_by_byte_is_given_up():
    engine = Engine()
    async with routing(engine, client_timeout_s=TIMEOUT_S) as (service, client):
        reader, writer = await connect(service)
        writer.write(request(b"Content-Length: 100000", body=b"{"))
        dripping = asyncio.create_task(drip(writer, b" " * 10_000, every_s=0.05))
        async with asyncio.timeout(LIMIT_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        writer.close()
        await assert_serves_on(client, engine, 0)


async def test_many_slow_heads_do_not_keep_others_waiting():
    engine = Engine()
    async with routing(engine, client_timeout_s=30.0) as (service, client):
        slow = [await connect(service) for _ in range(100)]
        for _, writer in slow:
            writer.write(PATH)
        await assert_serves_on(client, engine, 0)
        for _, writer in slow:
            writer.close()
