"""Asks an engine what it says of itself, and whether it tokenizes a text as the router does.

In:  its URL; our tokenizer for its model.
Out: EngineFacts; a Disagreement, or None. What it does not answer stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import msgspec

from kvplug.errors import TokenizerError
from kvplug.server.diagnosis import facts
from kvplug.server.diagnosis.facts import EngineFacts
from kvplug.server.diagnosis.view import Disagreement
from kvplug.server.workers.asking import WorkerSession
from kvplug.tokenization.prompt_tokenizer import PromptTokenizer

PROBE_TEXT = "The quick brown fox, ünïcode 漢字 🙂 and\n\tnew  lines: 3.14159 != x[0]"
_MAX_SHOWN = 6

_VLLM: dict[str, Callable[[bytes], EngineFacts]] = {
    "/version": facts.of_version,
    "/kv_event_sources": facts.of_event_sources,
    "/metrics": facts.of_metrics,
}


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Prober:
    """facts, tokens_of; each answer has `timeout_s`."""

    def __init__(self, session: WorkerSession, timeout_s: float) -> None:
        self._session, self._timeout_s = session, timeout_s

    async def facts(self, url: str) -> EngineFacts:
        """What the engine says; nothing is raised."""
        known = EngineFacts()
        for path, read in _VLLM.items():
            known = known.merged(await self._read(url, path, read))
        # vLLM in its development mode has a /server_info, too, of another form.
        if known.version is None:
            known = known.merged(await self._read(url, "/server_info", facts.of_server_info))
        return known

    async def tokens_of(self, url: str, body: dict[str, Any]) -> list[int] | None:
        """What the engine makes of a prompt or of messages; None if it does not say."""
        try:
            async with self._session.post(
                url, "/tokenize", json=body, timeout_s=self._timeout_s
            ) as response:
                response.raise_for_status()
                return msgspec.json.decode(await response.read(), type=_Tokens).tokens
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def _read(self, url: str, path: str, read: Callable[[bytes], EngineFacts]) -> EngineFacts:
        try:
            async with self._session.get(url, path, timeout_s=self._timeout_s) as response:
                response.raise_for_status()
                return read(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return EngineFacts()


async def compare_tokenization(
    prober: Prober, url: str, model: str, tokenizer: PromptTokenizer
) -> Disagreement | None:
    """Of a completion's prompt and of a chat's; what either side refuses is not compared."""
    for what, body, ours in _probes(model, tokenizer):
        theirs = await prober.tokens_of(url, body)
        if theirs is not None and theirs != ours:
            return Disagreement(ours=_describe(what, ours), theirs=_describe(what, theirs))
    return None


def _probes(
    model: str, tokenizer: PromptTokenizer
) -> Iterator[tuple[str, dict[str, Any], list[int]]]:
    completion = {"model": model, "prompt": PROBE_TEXT}
    chat = {"model": model, "messages": [{"role": "user", "content": PROBE_TEXT}]}
    try:
        yield "a probe text", completion, tokenizer.completion(completion)[0].tolist()
        yield "a probe chat", chat, tokenizer.chat(chat).tolist()
    except TokenizerError:
        return  # base models have no template


def _describe(what: str, ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:_MAX_SHOWN]))
    more = ", ..." if len(ids) > _MAX_SHOWN else ""
    return f"{what} in {len(ids)} tokens ({shown}{more})"
