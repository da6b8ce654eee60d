"""A stock vLLM publisher without the engine: raw frames over ZMQ, as fast as they are taken.

usage: python -m tests.benchmarks.ingest_frames SEED BLOCKS_PER_EVENT NUM_BLOCKS

Prints its port, how many events a message has, and how many bytes a block; sends everything once
somebody has subscribed; prints when it began, in ns of the monotonic clock, which all processes
share. Ends with its standard input.
"""

import os
import random
import sys
import time

import msgspec
import zmq

from tests.benchmarks.ingest_tokens import BLOCK_SIZE, VOCABULARY, last_tokens

CHAIN_BLOCKS = 2048


def frames(seed, blocks_per_event, num_blocks):
    """[topic, seq, payload] as vLLM 0.32.0 sends them: one event of one chain a message.

    The last message stores one block of `last_tokens(seed)`, by which it is known to be in.
    """
    rng = random.Random(seed)
    encoder = msgspec.msgpack.Encoder()
    messages = []
    for _ in range(num_blocks // CHAIN_BLOCKS):
        names = [rng.getrandbits(64) for _ in range(CHAIN_BLOCKS)]
        for at in range(0, CHAIN_BLOCKS, blocks_per_event):
            ids = [rng.randrange(VOCABULARY) for _ in range(blocks_per_event * BLOCK_SIZE)]
            parent = names[at - 1] if at else None
            event = stored(names[at : at + blocks_per_event], parent, ids)
            messages.append(message(len(messages), event, encoder))
    event = stored([rng.getrandbits(64)], None, last_tokens(seed))
    messages.append(message(len(messages), event, encoder))
    return messages


def stored(names, parent, token_ids):
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def message(number, event, encoder):
    return [b"", number.to_bytes(8, "big"), encoder.encode((1.5, [event], 0))]


def main(seed, blocks_per_event, num_blocks):
    messages = frames(seed, blocks_per_event, num_blocks)
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    context = zmq.Context()
    socket = context.socket(zmq.XPUB)
    socket.setsockopt(zmq.SNDHWM, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    num_bytes = sum(len(part) for message in messages for part in message)
    print(port, 1, num_bytes / (num_blocks + 1), flush=True)  # noqa: T201 - the protocol
    socket.recv()
    began = time.monotonic_ns()
    for each in messages:
        socket.send_multipart(each)
    print(began, flush=True)  # noqa: T201 - the protocol
    sys.stdin.read()
    context.destroy(linger=0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
