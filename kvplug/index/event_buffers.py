"""The buffers that events pass through on their way into the arrays of an index.

In:  sizes of events.   Out: arrays that are large enough, until they are asked to shrink.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.index.arrays import ArrayVersion
from kvplug.kernels.msgpack import PADDING

U64 = npt.NDArray[np.uint64]

_MIN_BLOCKS = 256
_MIN_PAYLOAD = 2**16
_WORDS_PER_BLOCK = 3


class EventBuffers:
    """blocks: uint64[n], three words for each block of an event; payload: `max_payload` bytes, with
    the padding that kernels/msgpack.py wants behind them.

    `version` counts when one of them has become another one.
    """

    def __init__(self, version: ArrayVersion) -> None:
        self._version = version
        self.blocks: U64
        # Python copies bytes twice on their way into a slice of a bytearray.
        self.payload: memoryview
        self.max_payload: int
        self._start()

    @property
    def nbytes(self) -> int:
        """Bytes of memory of both."""
        return int(self.blocks.nbytes) + len(self.payload)

    def reserve_blocks(self, num_blocks: int) -> None:
        """Make room for an event of so many blocks."""
        if _WORDS_PER_BLOCK * num_blocks > len(self.blocks):
            self.blocks = np.empty(2 * _WORDS_PER_BLOCK * num_blocks, dtype=np.uint64)
            self._version.count += 1

    def reserve_payload(self, num_bytes: int) -> None:
        """Make room for a payload of so many bytes."""
        if num_bytes > self.max_payload:
            self._make_payload(2 * num_bytes)
            self._version.count += 1

    def shrink(self) -> bool:
        """Be as at the start; False if they are."""
        if self.max_payload <= _MIN_PAYLOAD and len(self.blocks) <= _WORDS_PER_BLOCK * _MIN_BLOCKS:
            return False
        self._start()
        return True

    def _start(self) -> None:
        self.blocks = np.empty(_WORDS_PER_BLOCK * _MIN_BLOCKS, dtype=np.uint64)
        self._make_payload(_MIN_PAYLOAD)
        self._version.count += 1

    def _make_payload(self, num_bytes: int) -> None:
        self.payload, self.max_payload = memoryview(bytearray(num_bytes + PADDING)), num_bytes
