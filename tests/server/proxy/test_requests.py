"""What clients may do with a request beside sending it: Expect, HEAD, compressed bodies."""

import asyncio
import gzip
import json
import zlib

import pytest

from tests.server.engine import Engine
from tests.server.proxy.test_relay import _JSON, RawEngine, before
from tests.server.test_service import COMPLETION, error_of, routing

RAW = json.dumps(COMPLETION).encode()


def post(client, body, encoding):
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    return client.post("/v1/completions", data=body, headers=headers)


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_a_compressed_body_reaches_the_worker_plain(encoding, compress):
    engine = Engine()
    async with routing(engine) as (_, client), post(client, compress(RAW), encoding) as response:
        assert response.status == 200
    assert engine.last_body == RAW
    assert "Content-Encoding" not in engine.last_headers


async def test_a_bomb_is_413_and_costs_little():
    bomb = gzip.compress(bytes(400_000_000), compresslevel=9)
    async with (
        routing(Engine(), max_body_bytes=2_000_000) as (_, client),
        post(client, bomb, "gzip") as response,
    ):
        assert (await error_of(response))[:2] == (413, "body_too_large")


@pytest.mark.parametrize("encoding", ["compress", "gzip, gzip", "nonsense"])
async def test_other_encodings_are_415_by_name(encoding):
    engine = Engine()
    async with routing(engine) as (_, client), post(client, RAW, encoding) as response:
        status, code, message = await error_of(response)
    assert (status, code) == (415, "unsupported_encoding")
    assert encoding in message
    assert engine.num_requests == 0


@pytest.mark.parametrize("encoding", ["br", "zstd"])
async def test_encodings_that_only_other_installations_know_are_refused_by_name(encoding):
    async with routing(Engine()) as (_, client), post(client, RAW, encoding) as response:
        assert response.status in (400, 415)
        assert encoding in await response.text()


async def test_what_is_no_gzip_is_400():
    async with routing(Engine()) as (_, client), post(client, b"no gzip", "gzip") as response:
        assert response.status == 400


async def test_a_client_that_waits_for_the_word_is_told_to_continue():
    engine = RawEngine(_JSON % (2, b"{}"))
    async with before(engine) as (_, ask):
        headers = b"Expect: 100-continue\r\nConnection: close\r\n"
        reader, _ = await ask(stream=False, headers=headers)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert b"xpect" not in engine.heads[0]


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
async def test_other_methods_are_405_where_there_is_a_post(method):
    async with (
        routing(Engine()) as (_, client),
        client.request(method, "/v1/completions") as response,
    ):
        assert response.status == 405


async def sent(service, raw):
    """All that comes back for these bytes."""
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


async def test_requests_that_are_no_http_are_counted_and_fill_no_log(caplog):
    async with routing(Engine()) as (service, client):
        for raw in (
            b"GET / HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nA b\r\n\r\n",
        ):
            assert (await sent(service, raw)).startswith(b"HTTP/1.0 400")
        async with client.get("/metrics") as response:
            assert "kvplug_requests_malformed_total 2.0" in await response.text()
    logged = [record for record in caplog.records if record.name.startswith("aiohttp")]
    assert logged == []


async def test_a_request_line_without_a_version_is_505():
    async with routing(Engine()) as (service, _):
        raw = b"POST /v1/completions\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(RAW), RAW)
        answer = await sent(service, raw)
    assert b" 505 " in answer.partition(b"\r\n")[0]
    assert b"http_version" in answer
