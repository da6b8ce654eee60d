"""Blocks of `make bench-cluster`: event n of an engine stores a prefix that nobody else has.

In:  the number of an event.   Out: its token ids, and the engine's ids of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from kvplug.engines.life import Life, Numbered
from kvplug.events import BlockRemoved, BlockStored, EventBatch, Namespace
from kvplug.protocol import WorkerHello

BLOCK_SIZE = 16
PROMPT_BLOCKS, HELD_PROMPTS = 256, 64
_VOCABULARY = 150_000
_ID_BITS = 10


def tokens_of(event: int, num_blocks: int) -> list[int]:
    """The first two differ from those of any other event."""
    rest = num_blocks * BLOCK_SIZE - 2
    return [event >> 16, event & 0xFFFF, *range(event % 1000, event % 1000 + rest)]


def blocks_of(event: int, num_blocks: int) -> list[int]:
    """One id a block."""
    first = event << _ID_BITS
    return list(range(first, first + num_blocks))


def stored(event: int, num_blocks: int, parent: int | None = None) -> EventBatch:
    """As an engine's plug-in hands it to its publisher; behind block `parent`."""
    one = BlockStored(
        block_hashes=tuple(blocks_of(event, num_blocks)),
        token_ids=tuple(tokens_of(event, num_blocks)),
        block_size=BLOCK_SIZE,
        parent=parent,
        namespace=None if parent is not None else Namespace(),
    )
    return EventBatch(events=(one,))


def said(
    num_messages: int, events_per_message: int, num_blocks: int
) -> Iterator[tuple[Numbered, int]]:
    """A whole life, message by message: its hello, then so many events each of so many blocks; and
    how many blocks each stores. An engine that is full: it removes as much as it stores.
    """
    life = Life(WorkerHello(block_size=BLOCK_SIZE, engine="bench"), history_bytes=0)
    yield life.hello(), 0
    events = _events_of_a_full_engine(num_blocks)
    for _ in range(num_messages):
        some = [next(events) for _ in range(events_per_message)]
        num_stored = sum(isinstance(each.events[0], BlockStored) for each in some) * num_blocks
        [message] = life.apply(some)
        yield message, num_stored


def _events_of_a_full_engine(num_blocks: int) -> Iterator[EventBatch]:
    """Prompts of 4,096 tokens, of which it holds 64, and then the oldest one goes."""
    length = max(1, PROMPT_BLOCKS // num_blocks)
    for first in count(step=length):
        for event in range(first, first + length):
            parent = blocks_of(event - 1, num_blocks)[-1] if event > first else None
            yield stored(event, num_blocks, parent)
        gone = first - HELD_PROMPTS * length
        for event in range(gone, gone + length) if gone >= 0 else ():
            names = tuple(blocks_of(event, num_blocks))
            yield EventBatch(events=(BlockRemoved(block_hashes=names),))
