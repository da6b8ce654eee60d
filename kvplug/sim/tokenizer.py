"""Text to token ids and back, for a served simulated engine.

In:  bodies of /v1/completions, /v1/chat/completions and /tokenize.   Out: token ids; text.

`ByteTokenizer` needs no files. `FolderTokenizer` has prompts tokenized by kvplug.tokenization, so
that they are what a router with the same folder computes, and adds the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tokenizers import Tokenizer as Backend

from kvplug.errors import TokenizerError

if TYPE_CHECKING:  # an engine whose tokens are bytes starts without it
    from kvplug.tokenization.prompt_tokenizer import PromptTokenizer

Body = Mapping[str, Any]
_SPACES: Final = ("Ġ", "▁")  # how BPE and SentencePiece write a word's leading space
_MAX_WORDS: Final = 1024


class Tokenizer(Protocol):
    """`vocabulary` is what generated tokens are taken from: text of them, encoded, is them.

    digest: the first 16 hex digits of the SHA-256 of its tokenizer.json, "" if it has none.
    """

    vocabulary: Sequence[int]
    digest: str

    def completion(self, body: Body) -> Sequence[Sequence[int]]:
        """Token ids of each prompt; raises TokenizerError."""

    def chat(self, body: Body) -> Sequence[int]:
        """Token ids of a conversation; raises TokenizerError."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated tokens."""


class ByteTokenizer:
    """One token per byte of UTF-8; a conversation is written as `<|role|>` lines."""

    digest = ""
    vocabulary: Sequence[int] = tuple(b"abcdefghijklmnopqrstuvwxyz    ")

    def completion(self, body: Body) -> Sequence[Sequence[int]]:
        """Token ids of each prompt: texts as bytes, lists of ids as they are."""
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return [list(prompt.encode())]
        if not isinstance(prompt, list) or not prompt:
            raise TokenizerError("prompt: expected text or a list of texts or token ids")
        many = prompt if isinstance(prompt[0], str | list) else [prompt]
        return [list(p.encode()) if isinstance(p, str) else _token_ids(p) for p in many]

    def chat(self, body: Body) -> Sequence[int]:
        """Token ids of a conversation whose contents are texts."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise TokenizerError("messages: expected a list with at least one message")
        lines = [f"<|{_text(m, 'role')}|>\n{_text(m, 'content')}\n" for m in messages]
        return list(("".join(lines) + "<|assistant|>\n").encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated tokens."""
        return bytes(token_ids).decode()


def _text(message: object, field: str) -> str:
    value = message.get(field) if isinstance(message, dict) else None
    if not isinstance(value, str):
        raise TokenizerError(f"messages: expected text as {field!r} of each, got {value!r}")
    return value


def _token_ids(ids: object) -> list[int]:
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**32 for i in ids):
        raise TokenizerError("prompt: expected token ids in [0, 2**32)")
    return ids


class FolderTokenizer:
    """The tokenizer of a model's folder."""

    def __init__(self, prompts: PromptTokenizer, folder: Path) -> None:
        self._prompts, self.digest = prompts, prompts.digest
        self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        self.vocabulary: Sequence[int] = _words(self._backend)

    def completion(self, body: Body) -> Sequence[Sequence[int]]:
        """Token ids of each prompt; raises TokenizerError."""
        return [[int(token_id) for token_id in ids] for ids in self._prompts.completion(body)]

    def chat(self, body: Body) -> Sequence[int]:
        """Token ids of a conversation; raises TokenizerError."""
        return [int(token_id) for token_id in self._prompts.chat(body)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated tokens: words, each with its leading space if it has one."""
        texts = map(self._backend.id_to_token, token_ids)
        return "".join(_with_space(text or "") for text in texts)


def _words(backend: Backend) -> Sequence[int]:
    """Tokens that are a space and a word: a text of them is encoded back to the same tokens.

    So a second turn, which has the first answer in its prompt, hits the blocks of that answer, as
    it does with a model whose text is encoded the way it was generated.
    """
    by_id = sorted((token_id, text) for text, token_id in backend.get_vocab().items())
    words = (
        token_id
        for token_id, text in by_id
        if text.startswith(_SPACES) and text[1:].isascii() and text[1:].isalpha()
    )
    return tuple(islice(words, _MAX_WORDS)) or tuple(token_id for token_id, _ in by_id)


def _with_space(text: str) -> str:
    return " " + text[1:] if text.startswith(_SPACES) else text
