"""Requests of `make bench-outcome`: text whose tokens are known, and the same as token ids.

In:  numbers of tokens.   Out: bodies of OpenAI's API, in both forms, with the tokens they become.

The text is made of words that are one token each, so lengths are exact. A conversation quotes the
answers that the engines give: they depend on nothing but the prompt, so every router's engines give
the same, and all bodies are known before the first is sent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from examples.launch.engine_env import ensure_tiny_tokenizer
from examples.launch.engine_server import MODEL_NAME
from kvplug.sim.engine import SchedulerConfig, SimulatedEngine
from kvplug.sim.tokenizer import FolderTokenizer
from kvplug.tokenization.prompt_tokenizer import PromptTokenizer

Form = Literal["text", "ids"]
FORMS: tuple[Form, ...] = ("text", "ids")
BLOCK_SIZE = 16
MAX_MODEL_LEN = 12_288

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `tokens` is what an engine computes for its `text` (or a list of messages),
    `answer` what it will say if that is known.
    """

    text: str | tuple[Message, ...]
    tokens: tuple[int, ...]
    max_tokens: int
    answer: tuple[int, ...] = ()

    def path(self, form: Form) -> str:
        """Chats are sent as messages, but as token ids only completions can be."""
        return COMPLETIONS if form == "ids" or isinstance(self.text, str) else CHAT

    def body(self, form: Form) -> bytes:
        """JSON, the same bytes for every router."""
        if form == "ids":
            return _body({"prompt": self.tokens}, self.max_tokens)
        if isinstance(self.text, str):
            return _body({"prompt": self.text}, self.max_tokens)
        return _body({"messages": self.text}, self.max_tokens)


def _body(prompt: dict[str, Any], max_tokens: int) -> bytes:
    options = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode({"model": MODEL_NAME, **prompt, **options, **streaming})


class Writer:
    """Makes up text; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._prompts, self._tokenizer = _tokenizers()

    def words(self, num_tokens: int) -> list[int]:
        """Token ids of as many random words."""
        return self.random.choices(self._tokenizer.vocabulary, k=num_tokens)

    def completion(self, words: Sequence[int], max_tokens: int) -> Ask:
        """A prompt of these words, behind the one token that every text begins with."""
        text = self._tokenizer.decode(words)
        return Ask(text, (self._first_token, *words), max_tokens)

    def chat(self, messages: Sequence[Message], max_tokens: int) -> Ask:
        """A conversation so far, with the answer that it will get."""
        ids = tuple(int(i) for i in self._prompts.chat({"messages": list(messages)}))
        return Ask(tuple(messages), ids, max_tokens, self._answer(ids, max_tokens))

    def text(self, token_ids: Sequence[int]) -> str:
        """What these tokens are written as."""
        return self._tokenizer.decode(token_ids)

    @property
    def _first_token(self) -> int:
        [[token]] = self._prompts.completion({"prompt": ""})
        return int(token)

    def _answer(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
        engine = SimulatedEngine(config, vocabulary=self._tokenizer.vocabulary)
        request = engine.submit(tokens, max_tokens)
        while engine.step(0.0):
            pass
        return tuple(request.token_ids[len(tokens) :])


def tokenizer_folder() -> Path:
    """The tokenizer of engines and routers."""
    return ensure_tiny_tokenizer()


@lru_cache
def _tokenizers() -> tuple[PromptTokenizer, FolderTokenizer]:
    prompts = PromptTokenizer.from_folder(tokenizer_folder())
    return prompts, FolderTokenizer(prompts, tokenizer_folder())


def tokenize(ask: Ask) -> list[int]:
    """What a router does with the text of a request."""
    prompts, _ = _tokenizers()
    if isinstance(ask.text, str):
        return [int(i) for i in prompts.completion({"prompt": ask.text})[0]]
    return [int(i) for i in prompts.chat({"messages": list(ask.text)})]


def tokenize_s_per_byte() -> float:
    """Of a body: 4 MB a second, what the tokenizers library did on a quiet core of the machine that
    this was written on. Measured anew in each run it drifted tenfold with the machine's load.
    """
    return 0.25e-6
