"""A publisher of kvplug's own stream without the engine: what a real one has said, sent again as
fast as it is taken.

usage: python -m tests.benchmarks.ingest_packed SEED BLOCKS_PER_EVENT NUM_BLOCKS MODE

MODE: `single`, each event in a message of its own; `batched`, as kvplug's publisher puts events
into messages that come faster than it hashes; `resident`, nothing on the stream, and everything in
the answer to an ask.

Prints its port, how many events a message has (`resident`: how many seconds it took to list all),
and how many bytes a block; then when it began, in ns of the monotonic clock, which all processes
share. Ends with its standard input.
"""

import logging
import os
import random
import sys
import time

import msgspec
import zmq

from kvplug import protocol
from kvplug.engines.event_stream import EventStream
from kvplug.engines.life import Life, parts_of
from kvplug.engines.settings import PublisherConfig
from kvplug.events import BlockStored, EventBatch, Namespace
from kvplug.protocol import Ask, End, Events, Hello, WorkerHello
from tests.benchmarks.ingest_frames import CHAIN_BLOCKS
from tests.benchmarks.ingest_tokens import BLOCK_SIZE, VOCABULARY, last_tokens
from tests.plugins.stock_client import wait_until

logger = logging.getLogger("ingest")
END = (-1).to_bytes(8, "big", signed=True)


def batches(seed, blocks_per_event, num_blocks):
    """As ingest_frames: one event of a chain a step; the last one stores one block."""
    rng = random.Random(seed)
    for _ in range(num_blocks // CHAIN_BLOCKS):
        names = [rng.getrandbits(64) for _ in range(CHAIN_BLOCKS)]
        for at in range(0, CHAIN_BLOCKS, blocks_per_event):
            ids = rng.choices(range(VOCABULARY), k=blocks_per_event * BLOCK_SIZE)
            parent = names[at - 1] if at else None
            yield stored(names[at : at + blocks_per_event], parent, ids)
    yield stored([rng.getrandbits(64)], None, last_tokens(seed))


def stored(names, parent, token_ids):
    event = BlockStored(
        block_hashes=tuple(names),
        token_ids=tuple(token_ids),
        block_size=BLOCK_SIZE,
        parent=parent,
        namespace=None if parent else Namespace(),
    )
    return EventBatch(events=(event,))


def single(some):
    """[Numbered], each of one batch."""
    life = Life(WorkerHello(block_size=BLOCK_SIZE))
    return [message for batch in some for message in life.apply([batch])]


def batched(some):
    """What a publisher sends when batches come as fast as Python can hand them over."""
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", max_queue_size=0)
    about = WorkerHello(block_size=BLOCK_SIZE)
    stream = EventStream(config, about, lambda batch: batch, logger, must_bind=True)
    said, send = [], stream._send
    stream._send = lambda message: (said.append(message), send(message))
    some = list(some)
    for batch in some:
        stream.publish(batch)
    wait_until(lambda: stream.num_applied == len(some), "all is said", timeout_s=60)
    stream.shutdown()
    return [message for message in said if isinstance(protocol.decode(message.payload), Events)]


class Sender:
    """One stream to one subscriber, and the answers to its asks."""

    def __init__(self, life, answer):
        os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
        self._context = zmq.Context()
        self._stream, self._router = (self._context.socket(k) for k in (zmq.XPUB, zmq.ROUTER))
        self._life, self._answer = life, answer
        for each in (self._stream, self._router):
            each.setsockopt(zmq.SNDHWM, 0)
        self.port = self._stream.bind_to_random_port("tcp://127.0.0.1")
        ask_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._about = WorkerHello(block_size=BLOCK_SIZE, answers_at=f"tcp://127.0.0.1:{ask_port}")

    def hello(self, next_):
        return protocol.encode(Hello(self._life, next_, time.time(), self._about))

    def greet(self, next_):
        """Wait for the subscriber, say hello, and answer its ask; returns when that came."""
        self._stream.recv()
        self._stream.send_multipart([b"", bytes(8), self.hello(next_)])
        client, _, _ = self._router.recv_multipart()
        began = time.monotonic_ns()
        for payload in (self.hello(next_), *self._answer):
            self._router.send_multipart([client, b"", b"", bytes(8), payload])
        self._router.send_multipart([client, b"", b"", END, b""])
        return began

    def send(self, messages):
        for number, payload in messages:
            self._stream.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def close(self):
        sys.stdin.read()
        self._context.destroy(linger=0)


def say(*numbers):
    print(*numbers, flush=True)  # noqa: T201 - the protocol


def main(seed, blocks_per_event, num_blocks, mode):
    some = batches(seed, blocks_per_event, num_blocks)
    if mode == "resident":
        send_resident(some)
        return
    messages = (single if mode == "single" else batched)(some)
    num_events = num_blocks // blocks_per_event + 1
    num_bytes = sum(len(message.payload) for message in messages)
    life = protocol.decode(messages[0].payload).life
    empty = protocol.Resident(life, 0, 0, 1, msgspec.msgpack.encode([2]))
    sender = Sender(life, [protocol.encode(empty), protocol.encode(End(life, 0))])
    say(sender.port, num_events / len(messages), num_bytes / (num_blocks + 1))
    sender.greet(0)
    began = time.monotonic_ns()
    sender.send(messages)
    say(began)
    sender.close()


def send_resident(some):
    life = Life(WorkerHello(block_size=BLOCK_SIZE), history_bytes=0)
    for batch in some:
        life.apply([batch])
    began = time.monotonic()
    answer = life.answer(Ask(0, 0))
    parts = parts_of(answer)
    took_s = time.monotonic() - began
    sender = Sender(answer.life, [*parts, protocol.encode(End(answer.life, answer.next))])
    say(sender.port, took_s, sum(map(len, parts)) / life.num_blocks)
    say(sender.greet(answer.next))
    sender.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
