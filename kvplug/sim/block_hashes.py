"""Token ids to block hashes, equal to those of vLLM 0.32 with its default, sha256.

In:  token ids of one request, its LoRA adapter and salt.   Out: a digest per full block, chained.

Equal contents have equal hashes in every simulated engine, and in every vLLM that hashes by its
default and has no PYTHONHASHSEED. The event id of a block is the low 64 bits of its digest.
tests/engines/test_sim_fidelity.py compares both with the real thing.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvplug.events import EngineHash

ExtraKey = tuple[str, ...]
_PICKLE_PROTOCOL: Final = 5  # the highest of Python 3.8 to 3.14: vLLM takes the highest


class Lora(NamedTuple):
    """A LoRA adapter; vLLM hashes the path too, though it never publishes it."""

    name: str
    path: str = ""


def _digest(content: object) -> bytes:
    # Pickle is written here and never read.
    return hashlib.sha256(pickle.dumps(content, protocol=_PICKLE_PROTOCOL)).digest()


_NO_PARENT: Final = _digest("vllm-none-hash")


def event_id(digest: bytes) -> EngineHash:
    """The id that events name a block by."""
    return EngineHash(int.from_bytes(digest[-8:], "big"))


class BlockHasher:
    """Hashes the full blocks of one request, as they fill up."""

    def __init__(self, block_size: int, lora: Lora | None, salt: str) -> None:
        self._block_size = block_size
        self._of_every_block: tuple[ExtraKey, ...] = (("lora", *lora),) if lora else ()
        # Later blocks get the salt through the chain.
        self._of_first_block = (("cache_salt", salt),) if salt else ()

    def extend(self, digests: list[bytes], token_ids: Sequence[int]) -> None:
        """Append the digests of the blocks that are full and have none yet."""
        size = self._block_size
        for start in range(len(digests) * size, len(token_ids) - size + 1, size):
            parent = digests[-1] if digests else _NO_PARENT
            keys = self._of_every_block + (() if digests else self._of_first_block)
            digests.append(_digest((parent, tuple(token_ids[start : start + size]), keys or None)))
