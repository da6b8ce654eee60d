"""Consumers that apply nothing: what the server spends on each, apart from what a replica does.

In:  cases as JSON lines (tests/benchmarks/sides.py): open so many, await, close.
Out: how many messages each has.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

import nats
from nats.js import api

from kvplug.nats.client import connect
from kvplug.nats.subjects import Subjects
from tests.benchmarks.sides import serve

BATCH, MAX_BYTES = 512, 8 * 2**20
TIMEOUT_S = 60.0


class Reader:
    """A durable pull consumer, read by a callback; acknowledges once a second."""

    def __init__(self, client: nats.NATS, stream: str, name: str) -> None:
        self.num_messages = 0
        self._client, self._stream, self._name, self._left = client, stream, name, 0
        self._ack_at_s = 0.0

    async def open(self) -> None:
        js = self._client.jetstream()
        config = api.ConsumerConfig(  # as kvplug/transports/nats_stream.py makes it
            durable_name=self._name, ack_policy=api.AckPolicy.ALL, max_ack_pending=10**6,
            num_replicas=1, mem_storage=True,
        )  # fmt: skip
        await js.add_consumer(self._stream, config)
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(
            self._inbox, cb=self._arrived, pending_msgs_limit=0, pending_bytes_limit=0
        )
        await self.ask()

    async def ask(self) -> None:
        self._left += BATCH
        request = {"batch": BATCH, "max_bytes": MAX_BYTES, "expires": 600 * 10**9}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        await self._client.publish(subject, json.dumps(request).encode(), self._inbox)

    async def _arrived(self, message: Any) -> None:
        if not message.reply or self._client.is_closed:
            return
        self.num_messages, self._left = self.num_messages + 1, self._left - 1
        if self._left <= BATCH // 2:
            await self.ask()
        if time.monotonic() >= self._ack_at_s:
            self._ack_at_s = time.monotonic() + 1.0
            await self._client.publish(message.reply, b"+ACK")


class Readers:
    """Each with a connection of its own."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.run(self._open(case))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """In the loop, which reads all the time."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _open(self, case: dict[str, Any]) -> None:
        servers, stream = case["servers"].split(","), Subjects(case["fleet"]).stream
        self._clients = [await connect(servers) for _ in range(case["num"])]
        named = enumerate(self._clients)
        self._readers = [Reader(client, stream, f"router-{n}") for n, client in named]
        for reader in self._readers:
            await reader.open()

    async def await_all(self, num_messages: int) -> list[int]:
        deadline = time.monotonic() + TIMEOUT_S
        again_s = time.monotonic() + 1.0
        while late := [each for each in self._readers if each.num_messages < num_messages]:
            assert time.monotonic() < deadline, [each.num_messages for each in self._readers]
            await asyncio.sleep(0.01)
            if time.monotonic() > again_s:  # a cluster had not heard of the inbox yet
                again_s += 1.0
                for each in late:
                    await each.ask()
        return [each.num_messages for each in self._readers]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


opened: list[Readers] = []


def measure(case: dict[str, Any]) -> Any:
    if case["what"] == "open":
        opened.append(Readers(case))
        return None
    if case["what"] == "await":
        [readers] = opened
        return readers.run(readers.await_all(case["num"]))
    while opened:
        readers = opened.pop()
        readers.run(readers.close())
    return None


if __name__ == "__main__":
    serve(measure, sys.stdin)
