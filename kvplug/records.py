"""Many events as flat arrays: the form in which the common dialect goes from bytes to the index.

In:  payloads of an event stream.   Out: Records, as far as the common dialect goes.

`read_payloads` takes what plain prompts of full-attention models make of vLLM's and SGLang's event
streams (kernels/wire.py says which form exactly); the first payload with anything else is left to
kvplug/codec.py. What both read, they read equally.
"""

from __future__ import annotations

import struct
import threading
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvplug.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineHash,
    Event,
    Namespace,
    Tier,
)
from kvplug.kernels import wire as kernels
from kvplug.kernels.bundle import Bundle
from kvplug.kernels.msgpack import PADDING

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

MAX_BYTES = 2**18
"""Of payloads in one run; what is longer is read by the codec."""

_MIN_EVENT_BYTES = 16
_PADDING = bytes(PADDING)


@dataclass(slots=True)
class Records:
    """Events in order; arrays as described in kernels/wire.py, good until the next run is read.

    bundle: the four arrays, for a kernel; num_events, num_payloads: how many; dp_rank: the
    data-parallel rank of all, None if not named; ts: the engine's time of the first payload in
    seconds, 0 if it names none.
    """

    records: I64
    parents: U64
    engine_hashes: U64
    tokens: U32
    bundle: Bundle
    num_events: int
    num_payloads: int
    dp_rank: int | None
    ts: float = 0.0

    @property
    def block_size(self) -> int | None:
        """Tokens per block of the first stored event; None if nothing is stored."""
        width = kernels.RECORD_WIDTH
        rows = self.records[: width * self.num_events].reshape(-1, width)
        sizes = rows[rows[:, kernels.KIND] == kernels.STORED, kernels.BLOCK_SIZE]
        return int(sizes[0]) if len(sizes) else None

    def num_blocks(self, number: int) -> int:
        """Blocks of one event."""
        return int(self.records[kernels.RECORD_WIDTH * number + kernels.NUM_ENGINE_HASHES])

    def event(self, number: int) -> Event:
        """One event in the words of kvplug/events.py."""
        row = self.records[kernels.RECORD_WIDTH * number :][: kernels.RECORD_WIDTH].tolist()
        kind, tier_number, first, num_hashes, first_token, num_tokens, size, has_parent, _ = row
        tier = None if tier_number < 0 else Tier(tier_number)
        if kind == kernels.CLEARED:
            return AllBlocksCleared(tier=tier)
        hashes = tuple(map(EngineHash, self.engine_hashes[first : first + num_hashes].tolist()))
        if kind == kernels.REMOVED:
            return BlockRemoved(block_hashes=hashes, tier=tier or Tier.DEVICE)
        return BlockStored(
            block_hashes=hashes,
            token_ids=tuple(self.tokens[first_token : first_token + num_tokens].tolist()),
            block_size=size,
            parent=EngineHash(int(self.parents[number])) if has_parent else None,
            namespace=None if has_parent else Namespace(),
            tier=tier or Tier.DEVICE,
        )


def read_payloads(payloads: list[bytes]) -> Records | None:
    """Read a run of payloads as far as it goes; None if the first is not of this dialect."""
    ends = array("q")
    num_bytes = 0
    for payload in payloads:
        num_bytes += len(payload)
        if num_bytes > MAX_BYTES:
            break
        ends.append(num_bytes)
    if not ends:
        return None
    if len(ends) < len(payloads):
        payloads = payloads[: len(ends)]
    return _SCRATCH.read(payloads, np.frombuffer(ends, dtype=np.int64))


class _Scratch(threading.local):
    """Arrays to read into, of each thread, as large as its runs have needed."""

    def __init__(self) -> None:
        self._counts: I64 = np.zeros(kernels.NUM_COUNTS, dtype=np.int64)
        self._reserve(2**12)

    def read(self, payloads: list[bytes], ends: I64) -> Records | None:
        data = np.frombuffer(b"".join((*payloads, _PADDING)), dtype=np.uint8)
        if len(data) > len(self._tokens):
            self._reserve(2 * len(data))
        num_payloads = int(kernels.read_payloads(data, ends, self._bundle.words, self._counts))
        if not num_payloads:
            return None
        num_events, _, _, dp_rank = self._counts.tolist()
        return Records(
            self._records,
            self._parents,
            self._engine_hashes,
            self._tokens,
            self._bundle,
            num_events,
            num_payloads,
            None if dp_rank < 0 else dp_rank,
            _time_of(payloads[0]),
        )

    def _reserve(self, num_bytes: int) -> None:
        num_events = num_bytes // _MIN_EVENT_BYTES + 1
        self._records: I64 = np.empty(kernels.RECORD_WIDTH * num_events, dtype=np.int64)
        self._parents: U64 = np.empty(num_events, dtype=np.uint64)
        self._engine_hashes: U64 = np.empty(num_bytes, dtype=np.uint64)
        self._tokens: U32 = np.empty(num_bytes, dtype=np.uint32)
        self._bundle = Bundle(self._records, self._parents, self._engine_hashes, self._tokens)


def _time_of(payload: bytes) -> float:
    """The first element of a batch that was read, which is a double."""
    return float(struct.unpack_from(">d", payload, 2)[0])


_SCRATCH = _Scratch()
