"""The messages of replica sync: what a router says that it has sent where.

In:  loads of ranks, prompts.   Out: msgpack bytes, and back; DecodeError for what is none.

    ["news", version, life, number, [update, ...]]                 at once
    ["rows", version, life, number, part, num_parts, [load, ...]]  every second
    ["bye", version, life, number]                                 of a router that stops

    update  ["add", load, prompt] | ["prefilled", load] | ["free", load]
    load    [worker, dp_rank, model, row]

`life` is 63 random bits for as long as a router counts its messages, `number` counts them from 0. A
row is absolute: all that the sender has sent to the rank and that is not over. It is float64[10],
little-endian: the first columns of kernels/costing.py, with an age in ms for FIRST_SINCE_MS, as
clocks differ, and prompt tokens that the rank has computed for the sender in this life. Whoever
misses a message is put right by the next one. Ranks that the parts of one second do not name have
nothing from the sender.

Of a prompt, the hashes that begin a chunk of the forecast are said, and those of blocks that its
rank is about to hold; of a very long prompt the first ones.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvplug.errors import DecodeError
from kvplug.kernels.costing import FIRST_MS, FIRST_SINCE_MS
from kvplug.kernels.forecast import CHUNK
from kvplug.kernels.peer_load import NUM_BUSY

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 2**18
"""What is longer is refused unread; a sender divides what it says below that."""
MAX_BLOCKS: Final = 2**16
"""Of a prompt: a million tokens in blocks of 16."""
MAX_EXPECTED: Final = 2**11
"""Of the blocks of a prompt that a rank is about to hold."""
MAX_PARTS: Final = 2**10

# Tokens, blocks, requests and milliseconds alike: more is a mistake.
_MOST: Final = 2.0**40
_WORD: Final = 8
PREFILLED_TOKENS: Final = NUM_BUSY
"""The last column of a row."""
_WIDTH: Final = NUM_BUSY + 1

_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Name = Annotated[str, Meta(max_length=1024)]


class RankLoad(Struct, frozen=True, array_like=True):
    """What a rank is busy with because of the sender."""

    worker: _Name
    dp_rank: Annotated[int, Meta(ge=0, lt=2**16)]
    model: _Name
    row: Annotated[bytes, Meta(min_length=_WORD * _WIDTH, max_length=_WORD * _WIDTH)]


class SentPrompt(Struct, frozen=True, array_like=True):
    """A prompt: tokens per block; its blocks; uint64 hashes of every 16th of them, and of those
    that the rank is about to hold; blocks that come to it; its predicted time to first token.
    """

    block_size: Annotated[int, Meta(ge=1, le=2**20)]
    num_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
    chunks: Annotated[bytes, Meta(max_length=_WORD * MAX_BLOCKS // CHUNK)]
    expected: Annotated[bytes, Meta(max_length=_WORD * MAX_EXPECTED)]
    num_coming: Annotated[float, Meta(ge=0, le=_MOST)]
    ttft_ms: Annotated[float, Meta(ge=0, le=_MOST)]


class AddRequest(Struct, frozen=True, array_like=True, tag="add"):
    """The sender has sent a request to a rank."""

    load: RankLoad
    prompt: SentPrompt


class MarkPrefillCompleted(Struct, frozen=True, array_like=True, tag="prefilled"):
    """A rank has computed a prompt."""

    load: RankLoad


class Free(Struct, frozen=True, array_like=True, tag="free"):
    """A request is over."""

    load: RankLoad


Update = AddRequest | MarkPrefillCompleted | Free


class News(Struct, frozen=True, array_like=True, tag="news"):
    """What has changed."""

    version: int
    life: _Number
    number: _Number
    updates: list[Update]


class Rows(Struct, frozen=True, array_like=True, tag="rows"):
    """All that is in flight."""

    version: int
    life: _Number
    number: _Number
    part: Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
    num_parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    loads: list[RankLoad]


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The sender stops."""

    version: int
    life: _Number
    number: _Number


Message = News | Rows | Bye

encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Message)


def decode(payload: bytes) -> Message:
    """DecodeError says what is wrong; rows and prompts are checked as they are read."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise DecodeError(
            f"cannot read a message of replica sync: expected at most {MAX_MESSAGE_BYTES:,} bytes, "
            f"got {len(payload):,}"
        )
    try:
        message: Message = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DecodeError(f"cannot read a message of replica sync: {error}") from error
    if message.version != VERSION:
        raise DecodeError(
            f"cannot read a message of replica sync: expected version {VERSION}, got "
            f"{message.version}; run one version of kvplug on all replicas"
        )
    return message


def row_bytes(row: F64, now_ms: float) -> bytes:
    """A row as it is sent; what rounding has left below zero is zero."""
    said = np.maximum(row[:_WIDTH], 0.0)
    said[FIRST_SINCE_MS] = max(0.0, now_ms - row[FIRST_SINCE_MS]) if row[FIRST_MS] > 0 else 0.0
    return said.astype("<f8", copy=False).tobytes()


def fill_row(load: RankLoad, now_ms: float, out_row: F64) -> None:
    """Its row, with a time instead of an age; DecodeError, and nothing filled, for no numbers."""
    said = np.frombuffer(load.row, dtype="<f8")
    # A comparison with NaN is false.
    if not (said.min() >= 0.0 and said.max() <= _MOST):
        raise DecodeError(
            f"cannot count the load of {load.worker}: expected numbers in [0, 2**40], got "
            f"{said.tolist()}"
        )
    out_row[:_WIDTH] = said
    out_row[FIRST_SINCE_MS] = now_ms - said[FIRST_SINCE_MS] if said[FIRST_MS] > 0 else 0.0


def prompt_of(hashes: U64, first: int, block_size: int, num_coming: float, ttft_ms: float) -> SentPrompt:  # fmt: skip  # noqa: E501
    """As it is sent; the rank is about to hold the blocks from `first` on."""
    known = hashes[:MAX_BLOCKS]
    expected = known[first : first + MAX_EXPECTED]
    return SentPrompt(
        block_size=block_size,
        num_blocks=len(known),
        chunks=known[::CHUNK].astype("<u8", copy=False).tobytes(),
        expected=expected.astype("<u8", copy=False).tobytes(),
        num_coming=max(0.0, num_coming),
        ttft_ms=min(max(0.0, ttft_ms), _MOST),
    )


def hashes_of(prompt: SentPrompt) -> tuple[U64, U64]:
    """uint64[num_blocks], 0 for all that begin no chunk; uint64, of blocks that are expected.

    DecodeError for lengths that do not fit together.
    """
    chunks, expected = _words(prompt.chunks), _words(prompt.expected)
    num_chunks = -(-prompt.num_blocks // CHUNK)
    if len(chunks) != num_chunks or len(expected) > prompt.num_blocks:
        raise DecodeError(
            f"cannot expect a prompt of {prompt.num_blocks} blocks: expected {num_chunks} hashes "
            f"of chunks, got {len(chunks)}, and {len(expected)} of blocks"
        )
    hashes = np.zeros(prompt.num_blocks, dtype=np.uint64)
    hashes[::CHUNK] = chunks
    return hashes, expected


def _words(content: bytes) -> U64:
    if len(content) % _WORD:
        raise DecodeError(f"cannot read hashes: expected 8 bytes each, got {len(content)} bytes")
    return np.frombuffer(content, dtype="<u8").astype(np.uint64)
