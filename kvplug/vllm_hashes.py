"""How vLLM 0.32 hashes the blocks of a prefix (v1/core/kv_cache_utils.py, utils/hashing.py).

In:  token ids, LoRA adapter, salt.   Out: a digest per full block, chained.

    digest of a block = hash((digest of the block before, tokens, extra keys or None))
    before the first  = hash(seed)
    on the wire       = the low 64 bits of the digest, big-endian

`PrefixHasher` does it as vLLM does by default, sha256 without a PYTHONHASHSEED, and needs no NumPy,
so it starts a simulated engine in no time; hash_schemes/vllm.py has all algorithms, over arrays.
tests/engines/test_sim_fidelity.py compares digests and ids with the real thing.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from kvplug.events import EngineHash

DEFAULT_SEED: Final = "vllm-none-hash"
_PICKLE_PROTOCOL: Final = 5  # the highest of Python 3.8 to 3.14: vLLM takes the highest

Key = tuple[Any, ...]
"""What else a block depends on: a kind, then what identifies one of it."""


class Lora(NamedTuple):
    """A LoRA adapter; vLLM hashes the path too, though it never publishes it."""

    name: str
    path: str = ""


def pickled(content: object) -> bytes:
    """The bytes that vLLM hashes unless it is told to write CBOR. Written here and never read."""
    return pickle.dumps(content, protocol=_PICKLE_PROTOCOL)


def sha256(content: object) -> bytes:
    """VLLM's default."""
    return hashlib.sha256(pickled(content)).digest()


def block_digest(
    digest: Callable[[Any], bytes], parent: bytes, token_ids: object, keys: Sequence[object]
) -> bytes:
    """Of one block, by an algorithm; `parent` is the digest of what is before it."""
    return digest((parent, token_ids, tuple(keys) or None))


def lora_keys(lora: Lora | None) -> tuple[Key, ...]:
    """Of every block."""
    return (("lora", *lora),) if lora else ()


def salt_keys(salt: str) -> tuple[Key, ...]:
    """Of the first block: later ones get the salt through the chain."""
    return (("cache_salt", salt),) if salt else ()


def event_id(digest: bytes) -> EngineHash:
    """The id that events name a block by."""
    return EngineHash(int.from_bytes(digest[-8:], "big"))


_NO_PARENT: Final = sha256(DEFAULT_SEED)


class PrefixHasher:
    """Hashes the full blocks of one request, as they fill up."""

    def __init__(self, block_size: int, lora: Lora | None, salt: str) -> None:
        self._block_size = block_size
        self._of_every_block, self._of_first_block = lora_keys(lora), salt_keys(salt)

    def extend(self, digests: list[bytes], token_ids: Sequence[int]) -> None:
        """Append the digests of the blocks that are full and have none yet."""
        size = self._block_size
        for start in range(len(digests) * size, len(token_ids) - size + 1, size):
            parent = digests[-1] if digests else _NO_PARENT
            keys = self._of_every_block + (() if digests else self._of_first_block)
            block = tuple(token_ids[start : start + size])
            digests.append(block_digest(sha256, parent, block, keys))
