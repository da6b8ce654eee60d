"""Tokenizing the texts of `make bench-outcome` at the cost of splitting them at spaces.

In:  text of words that are one token each, every one with a space before it.
Out: the token ids that the tokenizer of the folder gives; any other text is left to that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvplug.tokenization.prompt_tokenizer import PromptTokenizer

LEADING_SPACE = "Ġ"  # as byte-level BPE writes it


class WordTokenizer:
    """As PromptTokenizer, for engines."""

    def __init__(self, folder: Path) -> None:
        self._prompts = PromptTokenizer.from_folder(folder)
        self.digest = self._prompts.digest
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._ids = {
            text[1:]: token_id
            for text, token_id in backend.get_vocab().items()
            if text.startswith(LEADING_SPACE)
        }
        self._first = list(backend.encode("").ids)
        self._before = {
            role: list(backend.encode(f"<|{role}|>\n", add_special_tokens=False).ids)
            for role in ("system", "user", "assistant")
        }
        self._after = list(backend.encode("</s>\n", add_special_tokens=False).ids)

    def completion(self, body: Mapping[str, Any]) -> Sequence[Sequence[int]]:
        """Token ids of each prompt."""
        prompt = body.get("prompt")
        words = self._words(prompt) if isinstance(prompt, str) else None
        if words is None:
            return [[int(i) for i in ids] for ids in self._prompts.completion(body)]
        return [[*self._first, *words]]

    def chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Token ids of a conversation."""
        messages = body["messages"]
        parts = [self._words(message["content"]) for message in messages]
        if None in parts:
            return [int(i) for i in self._prompts.chat(body)]
        turns = (
            [*self._before[message["role"]], *(part or ()), *self._after]
            for message, part in zip(messages, parts, strict=True)
        )
        return [*self._first, *chain.from_iterable(turns), *self._before["assistant"]]

    def _words(self, text: str) -> list[int] | None:
        """None where a word is not a token."""
        if not text.startswith(" "):
            return None
        try:
            return [self._ids[word] for word in text[1:].split(" ")]
        except KeyError:
            return None
