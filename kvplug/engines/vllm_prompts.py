"""The token ids of vLLM's requests as bytes, made when vLLM hashes a prompt.

In:  an EngineCore of vLLM, whose `request_block_hasher` sees every new request.
Out: bytes of a request's tokens (uint32, native order), for the recorder's notes.

A prompt is hashed when its request arrives, and its blocks are cached a moment or minutes later,
when no CPU cache has its ids any more. To touch them costs less in the first place, and a server's
requests arrive in a thread of their own, not in the scheduler's (docs/decisions.md, 94).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

_PACKED: Final = "_kvplug_tokens"
TOKEN_TYPE: Final = "I"


class PromptPacker:
    """Packs prompts from its creation until `detach`; vLLM calls it from any thread."""

    def __init__(self, core: Any) -> None:  # noqa: ANN401  # an EngineCore
        self._core, self._hash = core, core.request_block_hasher
        if self._hash is not None:
            core.request_block_hasher = self._hash_and_pack

    def detach(self) -> None:
        """Leave the engine core as it was."""
        if self._hash is not None:
            self._core.request_block_hasher = self._hash

    def _hash_and_pack(self, request: Request) -> list[BlockHash]:
        """Called once per request: for its answer, token by token, vLLM's own function does."""
        hasher: Callable[[Request], list[BlockHash]] = self._hash
        request._block_hasher = hasher
        hashes = hasher(request)
        if hashes:
            # Ids that do not fit are noted as they are.
            with suppress(OverflowError, TypeError, AttributeError):
                setattr(request, _PACKED, array(TOKEN_TYPE, request._all_token_ids))
        return hashes


def packed_tokens(request: Request, start: int, end: int) -> bytes | None:
    """Of these positions; None if they are not all of the prompt, or it was not packed."""
    packed: array[int] | None = getattr(request, _PACKED, None)
    if packed is None or end > len(packed):
        return None
    return packed[start:end].tobytes()
