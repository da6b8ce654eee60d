"""scheme_named: a name to a scheme.

In:  a name, a block size, what the scheme needs to know.   Out: a HashScheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvplug.errors import ConfigError
from kvplug.hash_schemes import vllm
from kvplug.hash_schemes.fnv1a import Fnv1a
from kvplug.hash_schemes.scheme import HashScheme
from kvplug.hash_schemes.xxh3 import Xxh3

SCHEME_NAMES: Final = ("xxh3", "fnv1a", *vllm.ALGORITHMS)


def scheme_named(
    name: str,
    *,
    block_size: int,
    hash_seed: str | int | None = None,
    lora_paths: Mapping[str, str] | None = None,
    bigrams: bool = False,
) -> HashScheme:
    """Raises ConfigError for an unknown name, and for settings that the scheme does not have.

    `hash_seed` (PYTHONHASHSEED) and `lora_paths` (adapter name -> path) are vLLM's, `bigrams` is
    xxh3's.
    """
    if name not in SCHEME_NAMES:
        raise ConfigError(
            f"unknown hash scheme {name!r}, expected one of {', '.join(SCHEME_NAMES)}"
        )
    if bigrams and name != "xxh3":
        raise ConfigError(f"hash scheme {name} has no bigrams: only xxh3 does")
    if name in vllm.ALGORITHMS:
        seed = None if hash_seed is None else _as_text(hash_seed)
        return vllm.VllmScheme(name, block_size, hash_seed=seed, lora_paths=lora_paths)
    if hash_seed is not None or lora_paths:
        raise ConfigError(f"hash scheme {name} has no hash seed and no LoRA paths: vLLM's have")
    return Fnv1a(name, block_size) if name == "fnv1a" else Xxh3(name, block_size, bigrams=bigrams)


def _as_text(hash_seed: str | int) -> str:
    if isinstance(hash_seed, bool) or not isinstance(hash_seed, str | int):
        raise ConfigError(f"hash_seed must be text or a whole number, got {hash_seed!r}")
    return str(hash_seed)
