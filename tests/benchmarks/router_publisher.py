"""The engines of `make bench-router` as Dynamo sees them: vLLM's frames, one socket per rank.

usage: python -m tests.benchmarks.router_publisher NUM_RANKS

Prints its ports as a JSON list; sends everything once each of them has a subscriber; prints how
many blocks it sent. Ends with its standard input.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from functools import cache

import msgspec
import numpy as np
import zmq

from tests.benchmarks.ingest_frames import stored
from tests.benchmarks.router_workload import (
    BLOCK_SIZE,
    NUM_PROMPTS,
    chain_lengths,
    held_blocks,
    marker,
    warm_prompts,
)
from tests.benchmarks.splitmix import splitmix64

_ENCODER = msgspec.msgpack.Encoder()
_BLOCKS_PER_EVENT = 128


def payloads(rank: int, num_ranks: int) -> Iterator[tuple[int, bytes]]:
    """(blocks, payload) of each message of a rank; the marker is in the last one."""
    for num_tokens, num_prompts in NUM_PROMPTS.items():
        held = held_blocks(num_tokens, rank, num_ranks)
        for number in range(num_prompts):
            for at in range(0, held, _BLOCKS_PER_EVENT):
                end = min(held, at + _BLOCKS_PER_EVENT)
                yield end - at, _part_of_prompt(num_tokens, number, at, end)
    tokens, names = np.random.default_rng(rank), random.Random(rank)
    for length in chain_lengths(num_ranks):
        ids = tokens.integers(0, 32_000, length * BLOCK_SIZE).tolist()
        yield length, _payload([names.getrandbits(64) for _ in range(length)], None, ids)
    yield 1, _payload([names.getrandbits(64)], None, marker(rank))


@cache
def _prompts(num_tokens: int) -> list[list[int]]:
    return warm_prompts(num_tokens)


@cache
def _part_of_prompt(num_tokens: int, number: int, at: int, end: int) -> bytes:
    """Blocks at..end of a warm prompt; engines give equal blocks equal names."""
    ids = _prompts(num_tokens)[number][at * BLOCK_SIZE : end * BLOCK_SIZE]
    first = (num_tokens << 32) + (number << 16)
    names = [splitmix64(first + i) for i in range(at, end)]
    return _payload(names, splitmix64(first + at - 1) if at else None, ids)


def _payload(names: list[int], parent: int | None, ids: list[int]) -> bytes:
    return _ENCODER.encode((1.5, [stored(names, parent, ids)], 0))


def main(num_ranks: int) -> None:
    """Bind, wait for subscribers, send."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * num_ranks + 16)
    sockets = [context.socket(zmq.XPUB) for _ in range(num_ranks)]
    for socket in sockets:
        socket.setsockopt(zmq.SNDHWM, 0)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
    print(json.dumps(ports), flush=True)  # noqa: T201 - the protocol
    num_blocks = 0
    for rank, socket in enumerate(sockets):
        socket.recv()
        for number, (blocks, payload) in enumerate(payloads(rank, num_ranks)):
            socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
            num_blocks += blocks
    print(num_blocks, flush=True)  # noqa: T201 - the protocol
    sys.stdin.read()
    context.destroy(linger=0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
