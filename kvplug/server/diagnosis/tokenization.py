"""Whether an engine makes of a text what the router makes of it.

In:  an engine, our tokenizer for its model.   Out: a Disagreement, or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvplug.errors import TokenizerError
from kvplug.server.diagnosis.probe import PROBE_TEXT, Prober
from kvplug.server.diagnosis.view import Disagreement
from kvplug.tokenization.prompt_tokenizer import PromptTokenizer

_MAX_SHOWN = 6


async def compare(
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
