"""One request inside a simulated engine.

In:  prompt token ids and limits.   Out: the state that scheduler and cache work on.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplug.events import Namespace
from kvplug.vllm_hashes import Lora, PrefixHasher


class Request:
    """Its tokens (prompt, then output) and how many of them are in the cache.

    `num_cached_tokens` is what it found in the cache when it was admitted first, None until then:
    after a preemption it finds mostly what it left there itself.
    """

    __slots__ = (
        "_hasher",
        "block_hashes",
        "lora",
        "max_tokens",
        "namespace",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "request_id",
        "salt",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        block_size: int,
        lora: Lora | None = None,
        salt: str = "",
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens = max_tokens
        self.lora, self.salt = lora, salt
        self.namespace = Namespace(lora.name if lora else "", salt)
        self.num_computed = self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        self.block_hashes: list[bytes] = []
        self._hasher = PrefixHasher(block_size, lora, salt)
        self._hasher.extend(self.block_hashes, self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.token_ids.append(token_id)
        self._hasher.extend(self.block_hashes, self.token_ids)
