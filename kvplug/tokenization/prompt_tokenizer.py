"""The prompts of a request body to token ids, equal to those that the engine computes.

In:  bodies of /v1/completions and /v1/chat/completions; the folder of the model.
Out: uint32 token ids, one array per prompt.

Routing hashes token ids, so "nearly the same text" is a miss.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer

from kvplug.errors import TokenizerError
from kvplug.tokenization import sglang_messages, sglang_responses
from kvplug.tokenization.chat_messages import cannot, flag
from kvplug.tokenization.chat_template import ChatTemplates
from kvplug.tokenization.media import has_media
from kvplug.tokenization.messages_api import chat_of_messages
from kvplug.tokenization.model_folder import find_model_folder, read_model_folder
from kvplug.tokenization.piece_encoder import PieceEncoder, StoreOptions
from kvplug.tokenization.prompt_kind import Engine, PromptKind
from kvplug.tokenization.responses_api import chat_of_responses

if TYPE_CHECKING:  # a tokenizer needs no kernels: who loads only this waits for no compilation
    from kvplug.hashing import Tokens

_U32_MAX = 2**32 - 1

T = TypeVar("T")


def token_id_prompts(prompt: object) -> list[Tokens] | None:
    """Return the prompts that are token ids already; None if they are text.

    It is the `prompt` of a completion: text, a list of texts, token ids or a list of token ids.
    Anything else, and an id outside [0, 2**32), raises TokenizerError.
    """
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list) or not prompt:
        raise cannot("read the prompt", "text or a list of texts or token ids", prompt)
    if type(prompt[0]) is int:  # nothing but token ids, then
        return [_token_ids(prompt)]
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return None
    return [_token_ids(ids) for ids in (prompt if kinds == {list} else [prompt])]


def first_token_ids(body: Mapping[str, Any]) -> Tokens | None:
    """Of the first prompt of a /v1/completions body, as the engine cuts it; None if it is text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[:1]
    ids = token_id_prompts(prompt)
    return None if ids is None else _cut(ids[0], body)


def _token_ids(ids: list[Any]) -> Tokens:
    kinds = set(map(type, ids))  # at C speed; bool is an int to Python but no token id
    if not kinds <= {int}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds - {int}))
        raise TokenizerError(f"cannot read the prompt: expected integers as token ids, got {found}")
    try:
        # A third of what np.array takes, and it looks at the limits, too.
        return np.frombuffer(array("I", ids), dtype=np.uint32)
    except OverflowError as error:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise cannot("read the prompt", "token ids in [0, 2**32)", wrong) from error


class Extent(StrEnum):
    """How much of a prompt its token ids are of; they are exact as far as they go."""

    WHOLE = "whole"
    BEFORE_MEDIA = "before_media"  # the text before the first picture or sound
    KNOWN_BEGINNING = "known_beginning"  # what stands for all of it (StoreOptions.min_overlap)


class PromptIds(NamedTuple):
    """Token ids of a prompt or of its beginning."""

    ids: Tokens
    extent: Extent = Extent.WHOLE


class PromptTokenizer:
    """Tokenizes request bodies as the engine does."""

    def __init__(
        self,
        backend: Tokenizer,
        templates: ChatTemplates,
        special_tokens: Mapping[str, str],
        digest: str = "",
        *,
        store: StoreOptions | None = None,
    ) -> None:
        """Use from_folder; special_tokens are the template's variables: bos_token and so on;
        digest: the first 16 hex digits of the SHA-256 of tokenizer.json; store: what of earlier
        texts is remembered.
        """
        self.digest = digest
        self._backend = backend
        self.encoder = PieceEncoder(backend, written=templates.text, options=store)
        self._templates = templates
        self._special_tokens = special_tokens

    @classmethod
    def from_folder(cls, folder: Path, store: StoreOptions | None = None) -> Self:
        """Read tokenizer.json, tokenizer_config.json and the chat templates of a model folder.

        A missing template is an error of chat() only: base models have none.
        """
        return cls(*read_model_folder(folder), store=store)

    @classmethod
    def of_model(cls, name: str, store: StoreOptions | None = None) -> Self:
        """As from_folder, of a folder or of a model in the local Hugging Face cache."""
        return cls.from_folder(find_model_folder(name), store)

    def completion(self, body: Mapping[str, Any]) -> list[Tokens]:
        """Token ids of each prompt of a /v1/completions body."""
        prompt = _prompt_of(body)
        given = token_id_prompts(prompt)
        if given is not None:
            return [_cut(ids, body) for ids in given]
        with_special = flag(body, "add_special_tokens", True)
        return [self._encode(text, body, with_special) for text in _texts(prompt)]

    def chat(self, body: Mapping[str, Any]) -> Tokens:
        """Token ids of the prompt that the chat template makes of a /v1/chat/completions body."""
        return self._encode(*self._chat_text(body))

    def first(
        self,
        body: Mapping[str, Any],
        kind: PromptKind,
        *,
        max_new: int,
        engine: Engine = Engine.VLLM,
    ) -> PromptIds | None:
        """Of a conversation, or of the first text of a completion.

        None if more than `max_new` characters of it would have to be tokenized: the others are
        known from earlier prompts.
        """
        if engine is Engine.SGLANG:
            return self._first_of_sglang(body, kind, max_new)
        if kind is PromptKind.COMPLETION:
            with_special = flag(body, "add_special_tokens", True)
            return self._first(_texts(_prompt_of(body))[0], body, with_special, max_new)
        chat = self.as_chat(body, kind)
        if has_media(chat.get("messages")):
            return self._before_media(chat, max_new)
        return self._first(*self._chat_text(chat), max_new)

    def _first_of_sglang(
        self, body: Mapping[str, Any], kind: PromptKind, max_new: int
    ) -> PromptIds | None:
        """SGLang (0.5.23) knows none of the fields that cut a prompt, or choose special tokens."""
        if kind is PromptKind.COMPLETION:
            return self._first(_texts(_prompt_of(body))[0], {}, True, max_new)
        chat = self._sglang_chat(body, kind)
        if has_media(chat.get("messages")):
            return self._before_media(chat, max_new, Engine.SGLANG)
        text, open_end = self._templates.render_for_sglang(chat, self._special_tokens)
        prompt = self._first(text, {}, False, max_new)
        if prompt is None or not open_end or prompt.extent is not Extent.WHOLE:
            return prompt
        return PromptIds(np.concatenate([prompt.ids, self._open_end(open_end)]))

    def _sglang_chat(self, body: Mapping[str, Any], kind: PromptKind) -> Mapping[str, Any]:
        inner_system = self._templates.shows_inner_system
        if kind is PromptKind.RESPONSES:
            return sglang_responses.chat_of_responses(body, inner_system=inner_system)
        if kind is PromptKind.MESSAGES:
            variables = self._templates.variables
            return sglang_messages.chat_of_messages(
                body, inner_system=inner_system, variables=variables
            )
        return body

    def _open_end(self, text: str) -> Tokens:
        """With the tokenizer's own special tokens, but for one that begins a text."""
        ids = self._encode(text, {}, True)
        begin = self._backend.token_to_id(self._special_tokens.get("bos_token") or "")
        return ids[1:] if begin is not None and len(ids) and ids[0] == begin else ids

    def _first(
        self, text: str, body: Mapping[str, Any], with_special: bool, max_new: int
    ) -> PromptIds | None:
        if _limit(body) is None:
            beginning = partial(self.encoder.beginning, with_special=with_special)
            known = _tokenized(beginning, text)
            if known is not None:
                return PromptIds(known, Extent.KNOWN_BEGINNING)
        ids = self._encode_within(text, body, with_special, max_new)
        return None if ids is None else PromptIds(ids)

    def _before_media(
        self, chat: Mapping[str, Any], max_new: int, engine: Engine = Engine.VLLM
    ) -> PromptIds | None:
        """Of the text before the first picture, as far as no token can reach further."""
        if _limit(chat) is not None:
            raise cannot("tokenize a part of a chat", "no truncate_prompt_tokens", _limit(chat))
        text, end = self._templates.render_before_media(chat, self._special_tokens, engine)
        begin = text[: self.encoder.last_cut(text, end)]
        if not begin:
            raise cannot("tokenize a part of a chat", "a text before the first picture", text[:80])
        with_special = flag(chat, "add_special_tokens", False)
        ids = self._encode_within(begin, chat, with_special, max_new)
        return None if ids is None else PromptIds(ids, Extent.BEFORE_MEDIA)

    def as_chat(self, body: Mapping[str, Any], kind: PromptKind) -> Mapping[str, Any]:
        """The body of a chat that the engine makes of a conversation."""
        if kind is PromptKind.RESPONSES:
            return chat_of_responses(body)
        if kind is PromptKind.MESSAGES:
            templates = self._templates
            merges, effort = templates.merges_system, templates.disabled_effort
            return chat_of_messages(body, merges_system=merges, disabled_effort=effort)
        return body

    def _chat_text(self, body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], bool]:
        text = self._templates.render(body, self._special_tokens)
        return text, body, flag(body, "add_special_tokens", False)

    def _encode(self, text: str, body: Mapping[str, Any], with_special: bool) -> Tokens:
        ids = self._encode_within(text, body, with_special, len(text))
        assert ids is not None
        return ids

    def _encode_within(
        self, text: str, body: Mapping[str, Any], with_special: bool, max_new: int
    ) -> Tokens | None:
        limit = _limit(body) if body.get("truncation_side") is None else None
        if limit is None:
            encode = partial(self.encoder.encode, with_special=with_special, max_new=max_new)
            ids = _tokenized(encode, text)
            return None if ids is None else _cut(ids, body)
        if len(text) > max_new:
            return None
        encoding = _tokenized(partial(self._encode_end, limit=limit, special=with_special), text)
        return _cut(np.array(encoding.ids, dtype=np.uint32), body)

    def _encode_end(self, text: str, limit: int, special: bool) -> Encoding:
        """Drop tokens at the left of the text only: the special tokens stay."""
        num_special = self._backend.num_special_tokens_to_add(False) if special else 0
        encoding = self._backend.encode(text, add_special_tokens=False)
        encoding.truncate(max(0, limit - num_special), direction="left")
        return self._backend.post_process(encoding, add_special_tokens=special)


def _tokenized(encode: Callable[[str], T], text: str) -> T:
    try:
        return encode(text)
    except Exception as error:
        # tokenizers raises TypeError for lone surrogates and a plain Exception for all else.
        raise TokenizerError(f"cannot tokenize a text: {error}") from error


def _prompt_of(body: Mapping[str, Any]) -> object:
    for field in ("prompt_embeds", "suffix"):
        if body.get(field) is not None:
            raise cannot("read the prompt", f"no {field} in the request", body[field])
    return body.get("prompt")


def _texts(prompt: object) -> list[str]:
    return prompt if isinstance(prompt, list) else [str(prompt)]


def _limit(body: Mapping[str, Any]) -> int | None:
    limit = body.get("truncate_prompt_tokens")
    if limit is not None and (type(limit) is not int or limit < -1):
        raise cannot("read the request", "an integer >= -1 in 'truncate_prompt_tokens'", limit)
    # -1 cuts at the engine's context length, which is not known here: few prompts are longer.
    return None if limit == -1 else limit


def _cut(ids: Tokens, body: Mapping[str, Any]) -> Tokens:
    limit = _limit(body)
    if limit is None or limit >= len(ids):
        return ids
    # vLLM keeps the end of a prompt unless it is told otherwise.
    return ids[:limit] if body.get("truncation_side") == "right" else ids[len(ids) - limit :]
