"""Blocks of `make bench-cluster`: event n of an engine stores a prefix that nobody else has.

In:  the number of an event.   Out: its token ids, and the engine's ids of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvplug.engines.life import Life, Numbered
from kvplug.events import BlockStored, EventBatch, Namespace
from kvplug.protocol import WorkerHello

BLOCK_SIZE = 16
PROMPT_BLOCKS = 256
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
    first: int, num_messages: int, events_per_message: int, num_blocks: int
) -> Iterator[Numbered]:
    """A whole life: its hello, then messages of so many events, each of so many blocks. Prompts
    have 256 blocks, 4,096 tokens.
    """
    life = Life(WorkerHello(block_size=BLOCK_SIZE, engine="bench"), history_bytes=0)
    yield life.hello()
    for at in range(first, first + num_messages * events_per_message, events_per_message):
        yield from life.apply(_next(n, num_blocks) for n in range(at, at + events_per_message))


def _next(event: int, num_blocks: int) -> EventBatch:
    """The next part of a prompt."""
    is_first = event % max(1, PROMPT_BLOCKS // num_blocks) == 0
    parent = None if is_first else blocks_of(event - 1, num_blocks)[-1]
    return stored(event, num_blocks, parent)
