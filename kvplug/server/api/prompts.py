"""The body of a request to the token ids that its engine will see.

In:  the JSON body of a request, and which API it came by.
Out: uint32 token ids of the prompt or of its beginning, or None where they cannot be known here:
then the request is routed by load alone. The reason is counted and named once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvplug.errors import TokenizerError
from kvplug.server.api.bodies import Body, has_extra_key, has_unread_fields
from kvplug.tokenization.media import has_media
from kvplug.tokenization.piece_encoder import StoreOptions
from kvplug.tokenization.prompt_kind import Engine, PromptKind
from kvplug.tokenization.prompt_tokenizer import (
    Extent,
    PromptIds,
    PromptTokenizer,
    first_token_ids,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A short prompt is tokenized on the event loop, in well under a millisecond, if at most so many
# characters of it are new; all others in a thread, where the tokenizer releases the GIL.
_INLINE_BYTES = 2**15
_INLINE_MESSAGES = 64
_INLINE_CHARACTERS = {"tokenizers": 1024, "fastokens": 2**15}


class Reason(StrEnum):
    """Why a request is routed without knowing what is cached of it, or of all of it."""

    NO_TOKENIZER = "no_tokenizer"
    OTHER_TOKENIZER = "other_tokenizer"
    TOO_LONG = "too_long"  # for any engine's context, and to be read in time
    UNTOKENIZABLE = "untokenizable"  # the engine may say what is wrong with it
    MULTIMODAL = "multimodal"  # nothing is known from the first picture on
    PREVIOUS_RESPONSE = "previous_response"
    PROMPT_EMBEDS = "prompt_embeds"
    EXTRA_KEY = "extra_key"
    MODE = "mode"  # the router's mode does not go by prompts, so no text is tokenized
    ENGINES_DIFFER = "engines_differ"  # nothing is known from where their prompts differ on
    NO_PREFIX = "no_prefix"  # embeddings, scores: nothing of them is found in a KV cache


_WHY = {
    Reason.OTHER_TOKENIZER: "the engines of the model have another tokenizer.json than the router, "
    "so its token ids would be wrong; give --tokenizer the folder of the model that they serve",
    Reason.MULTIMODAL: "an engine puts tokens and hashes of its own where a picture or a sound is",
    Reason.PREVIOUS_RESPONSE: "the prompt of what continues a response is in the memory of the "
    "engine that gave it; send the conversation in 'input'",
    Reason.PROMPT_EMBEDS: "the hash of embeddings is the engine's own",
    Reason.ENGINES_DIFFER: "vLLM and SGLang serve the model, and make different "
    "prompts of such requests",
    Reason.EXTRA_KEY: "SGLang's own events do not say extra_key; what these requests cache may be "
    "taken for blocks without one, so use kvplug's plug-in or cache_salt",
}


class Known(NamedTuple):
    """What is known of a prompt; `unknown_because`: why it is nothing, or not all."""

    prompt: PromptIds | None
    unknown_because: Reason | None = None


class _Asked(NamedTuple):
    """What is known of a body beside it, as tokens_of has it."""

    root: str
    kind: PromptKind
    size: int
    digests: Collection[str]
    engines: Collection[Engine]


class Prompts:
    """tokens_of a body; one tokenizer per model, loaded on first use. `close` at the end.

    Counted: `untokenized` by model, `without_prefix` by reason.
    """

    def __init__(
        self,
        tokenizer_folders: Mapping[str, Path],
        store: StoreOptions | None = None,
        *,
        num_threads: int = 4,
    ) -> None:
        """By model, the folder of its tokenizer; under "" that of all others. `num_threads`:
        how many long prompts are tokenized at a time.
        """
        self.untokenized: Counter[str] = Counter()
        self.without_prefix: Counter[str] = Counter()
        self._folders, self._store = tokenizer_folders, store
        self._tokenizers: dict[str, PromptTokenizer | None] = {}
        self._loading = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Wait for no thread: what is being tokenized has no reader any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def loaded(self) -> Iterator[tuple[str, PromptTokenizer]]:
        """The models with a tokenizer here, and it."""
        for model, tokenizer in dict(self._tokenizers).items():
            if tokenizer is not None:
                yield model, tokenizer

    @property
    def without_tokenizer(self) -> frozenset[str]:
        """Models whose text came and could not be tokenized, for want of a tokenizer."""
        loaded = dict(self._tokenizers)  # a copy, made at once: the diagnosis loads in a thread
        missing = {model for model, tokenizer in loaded.items() if tokenizer is None}
        return frozenset(missing & self.untokenized.keys())

    async def tokens_of(  # noqa: PLR0913 - what the engines say, each with a default
        self,
        body: Body,
        root: str,
        *,
        kind: PromptKind,
        size: int,
        digests: Collection[str] = (),
        names_extra_keys: bool = False,
        engines: Collection[Engine] = (Engine.VLLM,),
    ) -> Known:
        """`root` is where the engine loaded the model from, `size` the length of the body;
        `digests`: of the tokenizers that the engines of the model have, as far as they say so;
        `names_extra_keys`: whether they all say of which extra_key their blocks are; `engines`:
        which of them serve the model.

        A batch of prompts is represented by its first one.
        """
        known = await self._known(body, _Asked(root, kind, size, digests, engines))
        if has_extra_key(body) and not names_extra_keys:
            self.note(Reason.EXTRA_KEY)  # its tokens still count as load
            known = Known(known.prompt, known.unknown_because or Reason.EXTRA_KEY)
        return known

    async def _known(self, body: Body, asked: _Asked) -> Known:
        if (reason := _unreadable(body, asked.kind)) is not None:
            return self.without(reason)
        try:
            ready = first_token_ids(body) if asked.kind is PromptKind.COMPLETION else None
            if ready is not None:
                return Known(PromptIds(ready))
            tokenizer = await self._tokenizer(body["model"], asked.root)
            if tokenizer is None:
                self.untokenized[body["model"]] += 1
                return self.without(Reason.NO_TOKENIZER)
            if asked.digests and tokenizer.digest not in asked.digests:
                return self.without(Reason.OTHER_TOKENIZER)
            prompts = [
                await self._tokenized(tokenizer, body, asked, engine)
                for engine in sorted(asked.engines)
            ]
        except TokenizerError as error:
            # The engine will say what is wrong with the request, if anything is.
            self.untokenized[body["model"]] += 1
            logger.debug("a request is routed by load alone: %s", error)
            is_media = has_media(body.get("messages") or body.get("input"))
            return self.without(Reason.MULTIMODAL if is_media else Reason.UNTOKENIZABLE)
        return self._common(prompts)

    def _common(self, prompts: list[PromptIds]) -> Known:
        """How far the prompts of several engines are equal."""
        prompt, reason = prompts[0], None
        if len(prompts) > 1 and (end := _common_length([it.ids for it in prompts])) is not None:
            prompt = PromptIds(prompt.ids[:end], Extent.KNOWN_BEGINNING)
            reason = Reason.ENGINES_DIFFER
        elif prompt.extent is Extent.BEFORE_MEDIA:
            reason = Reason.MULTIMODAL
        if reason is not None:
            self.note(reason)
        return Known(prompt, reason)

    async def _tokenized(
        self, tokenizer: PromptTokenizer, body: Body, asked: _Asked, engine: Engine
    ) -> PromptIds:
        first = partial(tokenizer.first, body, asked.kind, engine=engine)
        if asked.size <= _INLINE_BYTES and _num_messages(body) <= _INLINE_MESSAGES:
            prompt = first(max_new=_INLINE_CHARACTERS[tokenizer.encoder.library])
            if prompt is not None:
                return prompt
        prompt = await self._in_thread(partial(first, max_new=sys.maxsize))
        assert prompt is not None  # as nothing is too much
        return prompt

    def note(self, reason: Reason) -> None:
        """Count a request; the first one of a reason that has a fix is logged."""
        if reason in _WHY and not self.without_prefix[reason]:
            logger.warning("requests without prefix knowledge: %s: %s", reason, _WHY[reason])
        self.without_prefix[reason] += 1

    def without(self, reason: Reason) -> Known:
        """Nothing is known, which is counted."""
        self.note(reason)
        return Known(None, reason)

    def tokenizer_of(self, model: str, root: str) -> PromptTokenizer | None:
        """The tokenizer of a model, loaded on first use (seconds); None if there is none here."""
        if model not in self._tokenizers:
            with self._loading:
                if model not in self._tokenizers:
                    name = str(self._folders.get(model) or self._folders.get("") or root)
                    self._tokenizers[model] = _load(model, name, self._store)
        return self._tokenizers[model]

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _tokenizer(self, model: str, root: str) -> PromptTokenizer | None:
        if model in self._tokenizers:
            return self._tokenizers[model]
        return await self._in_thread(partial(self.tokenizer_of, model, root))


def _unreadable(body: Body, kind: PromptKind) -> Reason | None:
    if has_unread_fields(body):
        return Reason.TOO_LONG
    if kind is PromptKind.RESPONSES and body.get("previous_response_id") is not None:
        return Reason.PREVIOUS_RESPONSE
    return None if body.get("prompt_embeds") is None else Reason.PROMPT_EMBEDS


def _common_length(prompts: list[npt.NDArray[np.uint32]]) -> int | None:
    """How many of the first ids are equal; None if all are."""
    shortest = min(map(len, prompts))
    ids = np.array([prompt[:shortest] for prompt in prompts])
    different = np.flatnonzero((ids != ids[0]).any(axis=0))
    if len(different):
        return int(different[0])
    return None if all(len(prompt) == shortest for prompt in prompts) else shortest


def _num_messages(body: Body) -> int:
    items = body.get("messages") or body.get("input")
    return len(items) if isinstance(items, list) else 1


def _load(model: str, name: str, store: StoreOptions | None) -> PromptTokenizer | None:
    try:
        return PromptTokenizer.of_model(name, store)
    except TokenizerError as error:
        logger.warning(
            "model %s: text is routed by load alone, without prefix knowledge: %s; "
            "pass --tokenizer FOLDER",
            model,
            error,
        )
        return None
