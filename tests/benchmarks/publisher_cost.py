"""What the sender process of our own wire takes, and what is left to the engine's thread:
python -m tests.benchmarks.publisher_cost

CPU time of one thread, the least of several rounds: other work on the machine counts little.
Batches are vLLM's, of 16 blocks each; every block is new, and is removed at the end.
"""

import logging
import sys
import time
import timeit

import msgspec

from kvplug import codec
from kvplug.engines.block_hashes import BlockHashes
from kvplug.engines.life import Life
from kvplug.engines.listing import packed_parts
from kvplug.engines.resident_set import ResidentSet
from kvplug.engines.sender_messages import decode, to_sender
from kvplug.engines.sender_process import SenderProcess
from kvplug.engines.settings import PublisherConfig
from kvplug.events import BlockRemoved, BlockStored, EventBatch, Namespace
from kvplug.protocol import MAX_PACKED_BYTES, WorkerHello
from kvplug.wire import to_wire
from tests.plugins.stock_client import EngineBatch

NUM_BLOCKS, NUM_EVENTS, NUM_ROUNDS, NUM_CALLS = 16, 500, 7, 5000
SPREAD = 0x9E3779B97F4A7C15


def stored(number, block_size, first_event=0):
    first = (first_event + number) * NUM_BLOCKS
    names = tuple((first + i) * SPREAD % 2**64 for i in range(1, NUM_BLOCKS + 1))
    tokens = tuple(range(first, first + block_size * NUM_BLOCKS))
    return BlockStored(
        block_hashes=names, token_ids=tokens, block_size=block_size, namespace=Namespace()
    )


def per_block(call, setup=lambda: None):
    """The least us of CPU time of this thread per block."""
    least = float("inf")
    for _ in range(NUM_ROUNDS):
        prepared = setup()
        started = time.thread_time()
        call(prepared)
        least = min(least, time.thread_time() - started)
    return least / NUM_EVENTS / NUM_BLOCKS * 1e6


def read(message):
    content = decode(message).content
    return codec.decode(msgspec.msgpack.encode((content.ts, content.events, 0)))


def sender(block_size):
    events = [stored(number, block_size) for number in range(NUM_EVENTS)]
    batches = [EngineBatch(0.0, [to_wire(event)]) for event in events]
    messages = [to_sender.encode(numbered) for numbered in enumerate(batches)]
    removals = [
        EventBatch(events=(BlockRemoved(block_hashes=event.block_hashes),)) for event in events
    ]
    hashes = BlockHashes(block_size)

    def apply(life):
        for message in messages:
            life.apply((read(message),))

    def remove(life):
        for batch in removals:
            life.apply((batch,))

    def full_life():
        life = Life(WorkerHello())
        apply(life)
        return life

    yield "hash", per_block(lambda _: [hashes.sequence_hashes(e.token_ids) for e in events])
    yield "read", per_block(lambda _: [read(message) for message in messages])
    yield "all of a stored block", per_block(apply, lambda: Life(WorkerHello()))
    yield "all of a removed one", per_block(remove, full_life)


def publish_call(num_tokens):
    """us of one publish() of 16 blocks on the engine's thread."""
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", max_queue_size=0)
    process = SenderProcess(config, WorkerHello(), logging.getLogger("bench"))
    batch = EngineBatch(0.0, [to_wire(stored(0, num_tokens))])
    timer = timeit.Timer(lambda: process.publish(batch), timer=time.thread_time)
    burst = min(timer.repeat(NUM_ROUNDS, NUM_CALLS)) / NUM_CALLS * 1e6
    process.shutdown()
    return burst


def listing(num_blocks):
    resident = ResidentSet()
    for number in range(num_blocks // NUM_BLOCKS):
        resident.apply(stored(number, 1))
    started = time.thread_time()
    frozen = resident.listing()
    copied = time.thread_time()
    num_bytes = sum(map(len, packed_parts(frozen, MAX_PACKED_BYTES)))
    return copied - started, time.thread_time() - copied, num_bytes / 1e6


def main():
    write = sys.stdout.write
    for block_size in (16, 32):
        for name, microseconds in sender(block_size):
            write(f"blocks of {block_size} tokens, {name}: {microseconds:.2f} us per block\n")
        write(f"publish() of 16 of them: {publish_call(block_size):.2f} us\n")
    for num_blocks in (10_000, 100_000, 1_000_000):
        copied, packed, megabytes = listing(num_blocks)
        write(
            f"{num_blocks} blocks: {copied * 1e3:.1f} ms to copy, {packed * 1e3:.1f} ms to pack, "
            f"{megabytes:.2f} MB\n"
        )


if __name__ == "__main__":
    main()
