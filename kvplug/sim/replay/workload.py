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

    arrival_s: None where requests come as fast as others end, or at a rate of their own.
    """

    blocks: U64
    num_tokens: int
    num_answer_tokens: int
    answer_blocks: U64
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in their order, over blocks of `block_size` tokens."""

    name: str
    block_size: int
    requests: Sequence[Request]

    @property
    def ideal_share(self) -> float:
        """The share of prompt tokens that one endless cache would find, once all before are in."""
        seen: set[int] = set()
        found = total = 0
        for request in self.requests:
            for position, block in enumerate(request.blocks.tolist()):
                if block not in seen:
                    break
                found += self.block_size if position < len(request.blocks) else 0
            seen.update(request.blocks.tolist())
            seen.update(request.answer_blocks.tolist())
            total += request.num_tokens
        return found / max(1, total)


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


def documents(
    *,
    num_documents: int,
    document_tokens: int | tuple[int, int],
    own_tokens: int | tuple[int, int],
    answer_tokens: int | tuple[int, int],
    num_requests: int,
    seed: int,
    block_size: int = 16,
    zipf: float = 0.0,
    hot_share: float = 0.0,
    system_tokens: int = 0,
    name: str = "documents",
) -> Workload:
    """Questions about documents, drawn with weights 1 / rank**zipf; `hot_share` of them about the
    first one. Lengths are fixed, or drawn from a range for each document or request.
    """
    source = BlockSource(seed)
    random = source.random
    system = source.take(system_tokens // block_size)
    prefixes = [
        np.concatenate([system, source.take(_draw(random, document_tokens) // block_size)])
        for _ in range(num_documents)
    ]
    chosen = random.choice(num_documents, num_requests, p=_weights(num_documents, zipf, hot_share))
    requests = []
    for number in chosen.tolist():
        prefix = prefixes[number]
        num_tokens = len(prefix) * block_size + _draw(random, own_tokens)
        answer = _draw(random, answer_tokens)
        requests.append(request_of(source, prefix, num_tokens, answer, block_size))
    return Workload(name=name, block_size=block_size, requests=requests)


def conversations(
    *,
    num_live: int,
    system_tokens: int,
    turn_tokens: int,
    num_turns: int,
    answer_tokens: int,
    num_requests: int,
    seed: int,
    block_size: int = 16,
    name: str = "conversations",
) -> Workload:
    """Chats, `num_live` at a time, each with `num_turns` turns; the next turn is of a random one."""
    source = BlockSource(seed)
    system = source.take(system_tokens // block_size)
    live: list[tuple[Request | None, int]] = []
    requests = []
    for _ in range(num_requests):
        at = len(live) if len(live) < num_live else int(source.random.integers(num_live))
        last, turn = live[at] if at < len(live) else (None, 0)
        prefix, num_tokens = system, len(system) * block_size
        if last is not None:
            prefix = np.concatenate([last.blocks, last.answer_blocks])
            num_tokens = last.num_tokens + last.num_answer_tokens
        request = request_of(
            source, prefix, num_tokens + turn_tokens, answer_tokens, block_size
        )
        requests.append(request)
        live[at : at + 1] = [(request, turn + 1)] if turn + 1 < num_turns else []
    return Workload(name=name, block_size=block_size, requests=requests)


def unshared(
    *,
    prompt_tokens: int,
    answer_tokens: int,
    num_requests: int,
    seed: int,
    block_size: int = 16,
    name: str = "unshared",
) -> Workload:
    """Prompts that have nothing in common."""
    source, nothing = BlockSource(seed), np.zeros(0, dtype=np.uint64)
    requests = [
        request_of(source, nothing, prompt_tokens, answer_tokens, block_size)
        for _ in range(num_requests)
    ]
    return Workload(name=name, block_size=block_size, requests=requests)


def _draw(random: np.random.Generator, span: int | tuple[int, int]) -> int:
    return span if isinstance(span, int) else int(random.integers(span[0], span[1] + 1))


def _weights(num_documents: int, zipf: float, hot_share: float) -> npt.NDArray[np.float64]:
    weights = np.arange(1, num_documents + 1, dtype=np.float64) ** -zipf
    if hot_share and num_documents > 1:
        weights[:] = (1 - hot_share) / (num_documents - 1)
        weights[0] = hot_share
    return np.asarray(weights / weights.sum())
