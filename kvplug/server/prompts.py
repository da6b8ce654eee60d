"""The body of a request to the token ids that its engine will see.

In:  the JSON body of /v1/completions or /v1/chat/completions.
Out: uint32 token ids and the namespace, or None where the text cannot be tokenized here: then the
request is routed by load alone, and the reason is counted and named once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from kvplug.errors import TokenizerError
from kvplug.events import Namespace
from kvplug.hashing import Tokens
from kvplug.server.tokenizer import PromptTokenizer, token_id_prompts

logger = logging.getLogger(__name__)

Body = dict[str, Any]

# Short prompts are tokenized on the event loop (well under a millisecond); longer ones in a
# thread, where the tokenizer releases the GIL.
_INLINE_CHARACTERS = 4096


def namespace_of(body: Body) -> Namespace:
    """What separates the request's blocks from others' (vLLM: `cache_salt`)."""
    salt = body.get("cache_salt")
    return Namespace(salt=salt) if isinstance(salt, str) else Namespace()


class Prompts:
    """tokens_of a body; one tokenizer per model, loaded on first use."""

    def __init__(self, tokenizer_folder: Path | None) -> None:
        self.untokenized: Counter[str] = Counter()
        self._folder = tokenizer_folder
        self._tokenizers: dict[str, PromptTokenizer | None] = {}

    @property
    def without_tokenizer(self) -> frozenset[str]:
        """Models whose text came and could not be tokenized, for want of a tokenizer."""
        missing = {model for model, tokenizer in self._tokenizers.items() if tokenizer is None}
        return frozenset(missing & self.untokenized.keys())

    async def tokens_of(self, body: Body, root: str, *, is_chat: bool, size: int) -> Tokens | None:
        """`root` is where the engine loaded the model from, `size` the length of the body.

        A batch of prompts is represented by its first one.
        """
        try:
            ready = None if is_chat else token_id_prompts(body.get("prompt"))
            if ready is not None:
                return ready[0] if ready else None
            tokenizer = self._tokenizer(body["model"], root)
            if tokenizer is None:
                return None
            if size <= _INLINE_CHARACTERS:
                return _tokenize(tokenizer, body, is_chat)
            return await asyncio.to_thread(_tokenize, tokenizer, body, is_chat)
        except TokenizerError as error:
            # The engine will say what is wrong with the request, if anything is.
            self.untokenized[body["model"]] += 1
            logger.debug("a request is routed by load alone: %s", error)
            return None

    def tokenizer_of(self, model: str, root: str) -> PromptTokenizer | None:
        """The tokenizer of a model, loaded on first use; None if there is none here."""
        if model not in self._tokenizers:
            self._tokenizers[model] = _load(model, self._folder or Path(root))
        return self._tokenizers[model]

    def _tokenizer(self, model: str, root: str) -> PromptTokenizer | None:
        tokenizer = self.tokenizer_of(model, root)
        if tokenizer is None:
            self.untokenized[model] += 1
        return tokenizer


def _load(model: str, folder: Path) -> PromptTokenizer | None:
    try:
        return PromptTokenizer.from_folder(folder)
    except TokenizerError as error:
        logger.warning(
            "model %s: text is routed by load alone, without prefix knowledge: %s; "
            "pass --tokenizer FOLDER",
            model,
            error,
        )
        return None


def _tokenize(tokenizer: PromptTokenizer, body: Body, is_chat: bool) -> Tokens | None:
    if is_chat:
        return tokenizer.chat(body)
    prompts = tokenizer.completion(body)
    return prompts[0] if prompts else None
