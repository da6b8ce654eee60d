"""Requests to be replayed: when they come, which blocks they have, how long their answers are.

In:  numbers, or lines of a trace.   Out: Requests, in order of arrival.

A block is its sequence hash, which stands for all that is before it, too; equal prefixes have equal
hashes. What a request shares with others is all that matters, so made-up hashes are random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Request:
    """blocks: uint64, of the prompt's full blocks; answer_blocks: that the answer fills.

    arrival_s: None where requests come as fast as others end, or at a rate of their own. session:
    the conversation or document that it is about, if any.
    """

    blocks: U64
    num_tokens: int
    num_answer_tokens: int
    answer_blocks: U64
    arrival_s: float | None = None
    session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in their order, over blocks of `block_size` tokens."""

    name: str
    block_size: int
    requests: Sequence[Request]


class BlockSource:
    """Hashes that nobody else has; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def take(self, num_blocks: int) -> U64:
        """uint64[num_blocks]."""
        return self.random.integers(1, 2**63, num_blocks, dtype=np.uint64)


def request_of(
    source: BlockSource, prefix: U64, num_tokens: int, num_answer_tokens: int, block_size: int
) -> Request:
    """A prompt that begins with these blocks and goes on with some of its own."""
    num_blocks = num_tokens // block_size
    own = source.take(num_blocks - len(prefix))
    num_answer_blocks = (num_tokens + num_answer_tokens) // block_size - num_blocks
    blocks = np.concatenate([prefix, own])
    answer_blocks = source.take(num_answer_blocks)
    return Request(blocks, num_tokens, num_answer_tokens, answer_blocks)


Span = int | tuple[int, int]
"""A length, or the least and the greatest of lengths that are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Questions about documents, drawn with weights 1 / rank**zipf, or `hot_share` of them about
    the first one; lengths in tokens. `system`: what all begin with.
    """

    name: str = "documents"
    num_requests: int = 1000
    block_size: int = 16
    num_documents: int
    document: Span
    own: Span
    answer: Span
    zipf: float = 0.0
    hot_share: float = 0.0
    system: int = 0

    def make(self, seed: int) -> Workload:
        """The same requests for the same seed."""
        source = BlockSource(seed)
        random, size = source.random, self.block_size
        system = source.take(self.system // size)
        prefixes = [
            np.concatenate([system, source.take(_draw(random, self.document) // size)])
            for _ in range(self.num_documents)
        ]
        chosen = random.choice(self.num_documents, self.num_requests, p=self._weights)
        requests = []
        for prefix in (prefixes[number] for number in chosen.tolist()):
            num_tokens = len(prefix) * size + _draw(random, self.own)
            answer = _draw(random, self.answer)
            requests.append(request_of(source, prefix, num_tokens, answer, size))
        return Workload(name=self.name, block_size=size, requests=requests)

    @property
    def _weights(self) -> npt.NDArray[np.float64]:
        weights = np.arange(1, self.num_documents + 1, dtype=np.float64) ** -self.zipf
        if self.hot_share and self.num_documents > 1:
            weights[:] = (1 - self.hot_share) / (self.num_documents - 1)
            weights[0] = self.hot_share
        return np.asarray(weights / weights.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Chats, `num_live` at a time, of `num_turns` turns; the next turn is of a random one."""

    name: str = "conversations"
    num_requests: int = 1000
    block_size: int = 16
    num_live: int
    num_turns: int
    turn: int
    answer: int
    system: int = 0

    def make(self, seed: int) -> Workload:
        """The same requests for the same seed."""
        source, size = BlockSource(seed), self.block_size
        system = source.take(self.system // size)
        live: list[tuple[Request, int]] = []
        requests = []
        for _ in range(self.num_requests):
            at = int(source.random.integers(self.num_live)) if len(live) == self.num_live else None
            last, turn = (None, 0) if at is None else live.pop(at)
            prefix, num_tokens = system, len(system) * size
            if last is not None:
                prefix = np.concatenate([last.blocks, last.answer_blocks])
                num_tokens = last.num_tokens + last.num_answer_tokens
            request = request_of(source, prefix, num_tokens + self.turn, self.answer, size)
            requests.append(request)
            if turn + 1 < self.num_turns:
                live.append((request, turn + 1))
        return Workload(name=self.name, block_size=size, requests=requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshared:
    """Prompts that have nothing in common."""

    name: str = "unshared"
    num_requests: int = 1000
    block_size: int = 16
    prompt: Span
    answer: Span

    def make(self, seed: int) -> Workload:
        """The same requests for the same seed."""
        source, nothing = BlockSource(seed), np.zeros(0, dtype=np.uint64)
        requests = [
            request_of(
                source,
                nothing,
                _draw(source.random, self.prompt),
                _draw(source.random, self.answer),
                self.block_size,
            )
            for _ in range(self.num_requests)
        ]
        return Workload(name=self.name, block_size=self.block_size, requests=requests)


WorkloadSpec = Documents | Conversations | Unshared


def _draw(random: np.random.Generator, span: Span) -> int:
    return span if isinstance(span, int) else int(random.integers(span[0], span[1] + 1))
