"""vLLM's own hashes (0.32.0), by any of its algorithms; vllm_hashes.py has the formula.

In:  uint32 token ids, LoRA adapter, salt, extra keys.   Out: uint64 as vLLM publishes them.

    sha256        SHA-256 of pickle          sha256_cbor   SHA-256 of canonical CBOR
    xxhash        XXH3-128 of pickle         xxhash_cbor   XXH3-128 of canonical CBOR

The seed is PYTHONHASHSEED; without it vLLM takes "vllm-none-hash" for SHA-256 and a secret of each
process for XXH3. Extra keys of a block, in this order: ("lora", name, path), ("mm", identifier,
offset) per item, ("cache_salt", salt) in the first block only, ("prompt_embeds", digest).

Pickle writes a string twice if it occurs as two objects and refers to the first if it is the same
one. vLLM's API server gets each as an object of its own, so that is what is hashed here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import xxhash

from kvplug.errors import ConfigError, HashingError
from kvplug.events import Namespace
from kvplug.hash_schemes import cbor
from kvplug.hash_schemes.scheme import (
    NO_NAMESPACE,
    ExtraKey,
    ExtraKeys,
    HashScheme,
    Parent,
    checked_keys,
    checked_tokens,
)
from kvplug.hashing import Hashes, Tokens, utf8
from kvplug.vllm_hashes import (
    DEFAULT_SEED,
    Lora,
    block_digest,
    event_id,
    lora_keys,
    pickled,
    salt_keys,
    sha256,
)


def _token_tuples(tokens: Tokens, block_size: int) -> Sequence[cbor.Value]:
    ids, num_blocks = tokens.tolist(), len(tokens) // block_size
    return [tuple(ids[i * block_size : (i + 1) * block_size]) for i in range(num_blocks)]


class Algorithm(NamedTuple):
    """How the tokens are cut into blocks for the encoding, and how what is encoded is hashed."""

    blocks: Callable[[Tokens, int], Sequence[cbor.Value]]
    digest: Callable[[cbor.Value], bytes]


ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    "sha256": Algorithm(_token_tuples, sha256),
    "sha256_cbor": Algorithm(cbor.token_arrays, lambda it: hashlib.sha256(cbor.dumps(it)).digest()),
    "xxhash": Algorithm(_token_tuples, lambda it: xxhash.xxh3_128_digest(pickled(it))),
    "xxhash_cbor": Algorithm(cbor.token_arrays, lambda it: xxhash.xxh3_128_digest(cbor.dumps(it))),
}


class VllmScheme(HashScheme):
    """One of vLLM's algorithms with the seed of one fleet; a parent is a digest."""

    def __init__(
        self,
        name: str,
        block_size: int,
        *,
        hash_seed: str | None = None,
        lora_paths: Mapping[str, str] | None = None,
    ) -> None:
        """`lora_paths`: where vLLM has each adapter from; hashed, too, and in no event."""
        super().__init__(name, block_size)
        self._lora_paths = _checked_paths(lora_paths or {})
        if hash_seed is None and name.startswith("xxhash"):
            raise ConfigError(
                f"{name} needs hash_seed, the PYTHONHASHSEED of the engines: without it each vLLM "
                "has a secret of its own"
            )
        self._algorithm = ALGORITHMS[name]
        self._no_parent = self._algorithm.digest(DEFAULT_SEED if hash_seed is None else hash_seed)

    def digests(
        self,
        tokens: Tokens,
        namespace: Namespace = NO_NAMESPACE,
        *,
        parent: Parent | None = None,
        extra_keys: ExtraKeys = (),
    ) -> list[bytes]:
        """One per full block: 32 bytes (SHA-256) or 16 (XXH3); `parent` is such a digest."""
        tokens, extra_keys = checked_tokens(tokens), checked_keys(extra_keys)
        lora, salt = self._lora_keys(namespace), _salt_keys(namespace, parent)
        digest, digests = self._digest_before(parent), []
        for i, block in enumerate(self._algorithm.blocks(tokens, self.block_size)):
            items, embeds = _tagged(extra_keys[i] if i < len(extra_keys) else ())
            keys = (*lora, *items, *(salt if i == 0 else ()), *embeds)
            digest = block_digest(self._algorithm.digest, digest, block, keys)
            digests.append(digest)
        return digests

    def _hash(
        self, tokens: Tokens, namespace: Namespace, parent: Parent | None, extra_keys: ExtraKeys
    ) -> Hashes:
        """The ids in events."""
        digests = self.digests(tokens, namespace, parent=parent, extra_keys=extra_keys)
        return np.array([event_id(digest) for digest in digests], dtype=np.uint64)

    def _digest_before(self, parent: Parent | None) -> bytes:
        if parent is None:
            return self._no_parent
        num_bytes = len(self._no_parent)
        if isinstance(parent, bytes) and len(parent) == num_bytes:
            return parent
        raise HashingError(
            f"{self.name} continues from a digest of {num_bytes} bytes (the hash in events is part "
            f"of it), got {parent!r}"
        )

    def _lora_keys(self, namespace: Namespace) -> tuple[cbor.Value, ...]:
        name = namespace.lora_name
        if not name:
            return ()
        if name not in self._lora_paths:
            raise HashingError(
                f"{self.name} hashes the path of a LoRA adapter, too: name that of {name!r} in "
                "lora_paths"
            )
        return lora_keys(Lora(_own(name), _own(self._lora_paths[name])))


def _checked_paths(lora_paths: object) -> dict[str, str]:
    if not isinstance(lora_paths, Mapping):
        raise ConfigError(f"lora_paths maps adapter names to paths, got {lora_paths!r}")
    for name, path in lora_paths.items():
        if not isinstance(name, str) or not isinstance(path, str):
            raise ConfigError(f"lora_paths maps text to text, got {name!r}: {path!r}")
    return dict(lora_paths)


def _salt_keys(namespace: Namespace, parent: Parent | None) -> tuple[cbor.Value, ...]:
    return salt_keys(_own(namespace.salt)) if parent is None else ()


def _tagged(keys: Sequence[ExtraKey]) -> tuple[list[cbor.Value], list[cbor.Value]]:
    """Multimodal items, and digests of prompt embeddings; one goes before the salt, one behind."""
    items: list[cbor.Value] = []
    embeds: list[cbor.Value] = []
    for key in keys:
        match key:
            case (str(identifier), int(offset)) if _is_offset(offset):
                items.append(("mm", _own(identifier), offset))
            case bytes():
                embeds.append(("prompt_embeds", key))
            case _:
                raise HashingError(
                    f"extra keys of vLLM are (identifier, offset) or bytes, got {key!r}"
                )
    return items, embeds


def _is_offset(number: int) -> bool:
    """Pickle tells True from 1, and canonical CBOR has no head for more than 64 bits."""
    return not isinstance(number, bool) and abs(number) < 2**63


def _own(text: str) -> str:
    """An equal string that is no other object's."""
    return utf8(text).decode()
