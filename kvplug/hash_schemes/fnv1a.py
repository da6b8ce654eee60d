"""fnv1a: chained FNV-1a, as a fork of vLLM's router (v0.12.0) keys its blocks.

In:  uint32 token ids.   Out: uint64, one sequence hash per full block.

The formula is in kvplug/kernels/fnv1a.py. It knows neither LoRA nor salt nor pictures: leaving them
out would promise one request the blocks of another, so they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvplug.errors import HashingError
from kvplug.events import Namespace
from kvplug.hash_schemes.scheme import ExtraKeys, HashScheme, Parent, hash_of
from kvplug.hashing import Ends, HashedSequences, Hashes, Tokens
from kvplug.kernels import fnv1a as kernels


class Fnv1a(HashScheme):
    """64-bit FNV-1a over tokens, chained."""

    def _hash(
        self, tokens: Tokens, namespace: Namespace, parent: Parent | None, extra_keys: ExtraKeys
    ) -> Hashes:
        self._reject(namespace, extra_keys)
        hashes = np.empty(self.num_blocks(len(tokens)), dtype=np.uint64)
        before = np.uint64(hash_of(parent, self.name) or 0)
        kernels.hash_sequence(tokens, self.block_size, before, hashes)
        return hashes

    def _hash_many(
        self, tokens: Tokens, ends: Ends, namespaces: Sequence[Namespace]
    ) -> HashedSequences:
        """In one kernel."""
        for namespace in set(namespaces):
            self._reject(namespace, ())
        block_ends = np.cumsum(np.diff(ends, prepend=0) // self.block_size, dtype=np.int64)
        hashes = np.empty(block_ends[-1] if len(ends) else 0, dtype=np.uint64)
        kernels.hash_sequences(tokens, ends, self.block_size, block_ends, hashes)
        return HashedSequences(hashes, block_ends)

    def _reject(self, namespace: Namespace, extra_keys: ExtraKeys) -> None:
        if namespace.lora_name or namespace.salt or any(extra_keys):
            raise HashingError(f"{self.name} knows tokens only: no LoRA, salt or extra keys")
