"""The body of a request to the token ids that its engine will see.

In:  the JSON body of a request, and which API it came by.
Out: uint32 token ids, or None where they cannot be known here: then the request is routed by load
alone, and the reason is counted and named once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path

from kvplug.errors import TokenizerError
from kvplug.hashing import Tokens
from kvplug.server.api.bodies import Body, has_extra_key, has_unread_fields
from kvplug.tokenization.chat_messages import has_media
from kvplug.tokenization.prompt_kind import PromptKind
from kvplug.tokenization.prompt_tokenizer import PromptTokenizer, first_token_ids

logger = logging.getLogger(__name__)

# What is short, or short but for what is remembered, is tokenized on the event loop (well under a
# millisecond); the rest in a thread, where the tokenizer releases the GIL.
_INLINE_CHARACTERS = 4096
_MAX_INLINE_BYTES = 2**19


class Reason(StrEnum):
    """Why a request is routed without knowing what is cached of it."""

    NO_TOKENIZER = "no_tokenizer"
    OTHER_TOKENIZER = "other_tokenizer"
    TOO_LONG = "too_long"  # for any engine's context, and to be read in time
    UNTOKENIZABLE = "untokenizable"  # the engine may say what is wrong with it
    MULTIMODAL = "multimodal"
    PROMPT_EMBEDS = "prompt_embeds"
    EXTRA_KEY = "extra_key"
    NO_PREFIX = "no_prefix"  # embeddings, scores: nothing of them is found in a KV cache


_WHY = {
    Reason.OTHER_TOKENIZER: "the engines of the model have another tokenizer.json than the router, "
    "so its token ids would be wrong; give --tokenizer the folder of the model that they serve",
    Reason.MULTIMODAL: "an engine puts tokens and hashes of its own where a picture or a sound is",
    Reason.PROMPT_EMBEDS: "the hash of embeddings is the engine's own",
    Reason.EXTRA_KEY: "SGLang's own events do not say extra_key; what these requests cache may be "
    "taken for blocks without one, so use kvplug's plug-in or cache_salt",
}


class Prompts:
    """tokens_of a body; one tokenizer per model, loaded on first use.

    Counted: `untokenized` by model, `without_prefix` by reason.
    """

    def __init__(self, tokenizer_folders: Mapping[str, Path]) -> None:
        """By model, the folder of its tokenizer; under "" that of all others."""
        self.untokenized: Counter[str] = Counter()
        self.without_prefix: Counter[str] = Counter()
        self._folders = tokenizer_folders
        self._tokenizers: dict[str, PromptTokenizer | None] = {}

    @property
    def without_tokenizer(self) -> frozenset[str]:
        """Models whose text came and could not be tokenized, for want of a tokenizer."""
        loaded = dict(self._tokenizers)  # a copy, made at once: the diagnosis loads in a thread
        missing = {model for model, tokenizer in loaded.items() if tokenizer is None}
        return frozenset(missing & self.untokenized.keys())

    async def tokens_of(
        self,
        body: Body,
        root: str,
        *,
        kind: PromptKind,
        size: int,
        digests: Collection[str] = (),
        names_extra_keys: bool = False,
    ) -> Tokens | None:
        """`root` is where the engine loaded the model from, `size` the length of the body;
        `digests`: of the tokenizers that the engines of the model have, as far as they say so;
        `names_extra_keys`: whether they all say of which extra_key their blocks are.

        A batch of prompts is represented by its first one.
        """
        if has_extra_key(body) and not names_extra_keys:
            self.note(Reason.EXTRA_KEY)  # its tokens still count as load
        if (reason := _unreadable(body)) is not None:
            self.note(reason)
            return None
        try:
            ready = first_token_ids(body) if kind is PromptKind.COMPLETION else None
            if ready is not None:
                return ready
            tokenizer = self._tokenizer(body["model"], root, digests)
            if tokenizer is None:
                return None
            if size <= _MAX_INLINE_BYTES:
                tokens = tokenizer.first(body, kind, max_new=_INLINE_CHARACTERS)
                if tokens is not None:
                    return tokens
            return await asyncio.to_thread(tokenizer.first, body, kind, max_new=sys.maxsize)
        except TokenizerError as error:
            # The engine will say what is wrong with the request, if anything is.
            self.untokenized[body["model"]] += 1
            logger.debug("a request is routed by load alone: %s", error)
            is_media = kind is PromptKind.CHAT and has_media(body.get("messages"))
            self.note(Reason.MULTIMODAL if is_media else Reason.UNTOKENIZABLE)
            return None

    def note(self, reason: Reason) -> None:
        """Count a request; the first one of a reason that has a fix is logged."""
        if reason in _WHY and not self.without_prefix[reason]:
            logger.warning("requests without prefix knowledge: %s: %s", reason, _WHY[reason])
        self.without_prefix[reason] += 1

    def tokenizer_of(self, model: str, root: str) -> PromptTokenizer | None:
        """The tokenizer of a model, loaded on first use; None if there is none here."""
        if model not in self._tokenizers:
            folder = self._folders.get(model) or self._folders.get("")
            self._tokenizers[model] = _load(model, str(folder or root))
        return self._tokenizers[model]

    def _tokenizer(self, model: str, root: str, digests: Collection[str]) -> PromptTokenizer | None:
        """The one that the engines have, or None and a reason."""
        tokenizer = self.tokenizer_of(model, root)
        if tokenizer is None:
            self.untokenized[model] += 1
            self.note(Reason.NO_TOKENIZER)
        elif digests and tokenizer.digest not in digests:
            self.note(Reason.OTHER_TOKENIZER)
            return None
        return tokenizer


def _unreadable(body: Body) -> Reason | None:
    if has_unread_fields(body):
        return Reason.TOO_LONG
    return None if body.get("prompt_embeds") is None else Reason.PROMPT_EMBEDS


def _load(model: str, name: str) -> PromptTokenizer | None:
    try:
        return PromptTokenizer.of_model(name)
    except TokenizerError as error:
        logger.warning(
            "model %s: text is routed by load alone, without prefix knowledge: %s; "
            "pass --tokenizer FOLDER",
            model,
            error,
        )
        return None
