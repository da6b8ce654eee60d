"""Asks an engine what it says of itself, and how it tokenizes.

In:  its URL.   Out: EngineFacts; the token ids of a text. What it does not answer stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from kvplug.server.diagnosis import facts
from kvplug.server.diagnosis.facts import EngineFacts

PROBE_TEXT = "The quick brown fox, ünïcode 漢字 🙂 and\n\tnew  lines: 3.14159 != x[0]"

_VLLM: dict[str, Callable[[bytes], EngineFacts]] = {
    "/version": facts.of_version,
    "/kv_event_sources": facts.of_event_sources,
    "/metrics": facts.of_metrics,
}


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Prober:
    """facts, tokens_of; each answer has `timeout_s`."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def facts(self, url: str) -> EngineFacts:
        """What the engine says; nothing is raised."""
        known = EngineFacts()
        for path, read in _VLLM.items():
            known = known.merged(await self._read(url + path, read))
        # vLLM in its development mode has a /server_info, too, of another form.
        if known.version is None:
            known = known.merged(await self._read(url + "/server_info", facts.of_server_info))
        return known

    async def tokens_of(self, url: str, body: dict[str, Any]) -> list[int] | None:
        """What the engine makes of a prompt or of messages; None if it does not say."""
        try:
            async with self._session.post(
                url + "/tokenize", json=body, timeout=self._timeout
            ) as response:
                response.raise_for_status()
                return msgspec.json.decode(await response.read(), type=_Tokens).tokens
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def _read(self, url: str, read: Callable[[bytes], EngineFacts]) -> EngineFacts:
        try:
            async with self._session.get(url, timeout=self._timeout) as response:
                response.raise_for_status()
                return read(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return EngineFacts()
