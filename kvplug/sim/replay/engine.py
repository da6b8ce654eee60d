"""One engine in virtual time, fast: what SimulatedEngine does, by the block and not by the token.

In:  requests.   Out: steps: when they end, who has a first token, who is done; blocks stored and
removed.

A step computes up to a number of prompt tokens, first come, first served, and one token of each
request that decodes. A request has room for its whole answer from the beginning, so none is
preempted, and it counts as decoding for as many steps as its answer has tokens: a step costs the
same for one request and for a hundred. tests/sim/replay/test_engine.py compares both engines.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.sim.engine_config import TimeModel
from kvplug.sim.replay.workload import Request

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How large and how fast an engine is; `num_blocks` of `block_size` tokens can be cached.

    With host memory, `host_blocks` that were evicted stay there, and are loaded in
    `host_load_s` each.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    host_blocks: int = 0
    host_load_s: float = 0.0
    time_model: TimeModel = field(default_factory=TimeModel)


@dataclass(slots=True, eq=False)
class Job:
    """A request on an engine; `num_hit_tokens` once it was admitted."""

    request: Request
    number: int
    tokens_left: int = 0
    num_hit_tokens: int = 0


class CacheEvent(NamedTuple):
    """Blocks that were removed, then blocks stored behind `parent` (None: at the beginning).

    `offloaded`, (block, parent) each: that the host has from now on; `dropped`: no longer has.
    """

    removed: list[int]
    stored: U64
    parent: int | None
    offloaded: Sequence[tuple[int, int | None]] = ()
    dropped: Sequence[int] = ()


class Step(NamedTuple):
    """What a step did, by the time it ends."""

    ends_at: float
    first_tokens: list[Job]
    finished: list[Job]
    events: list[CacheEvent]


class Cache:
    """Blocks in use, with how many requests use each; free ones, the next to be evicted first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._uses: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        """Blocks that hold something."""
        return len(self._uses) + len(self._free)

    def num_hits(self, blocks: list[int]) -> int:
        """How many of the leading blocks are cached."""
        uses, free = self._uses, self._free
        for position, block in enumerate(blocks):
            if block not in uses and block not in free:
                return position
        return len(blocks)

    def admit(self, blocks: list[int], num_hits: int) -> list[int] | None:
        """Use the blocks, of which the first are cached; returns what was evicted for the others,
        None and nothing done if they do not fit.
        """
        free = self._free
        num_free_hits = sum(block in free for block in blocks[:num_hits])
        num_new = len(blocks) - num_hits
        available = self.num_blocks - len(self._uses) - num_free_hits
        if num_new > available:
            return None
        for block in blocks[:num_hits]:
            free.pop(block, None)
            self._uses[block] = self._uses.get(block, 0) + 1
        num_over = self.num_cached + num_new - self.num_blocks
        evicted = [free.popitem(last=False)[0] for _ in range(max(0, num_over))]
        for block in blocks[num_hits:]:
            free.pop(block, None)
            self._uses[block] = self._uses.get(block, 0) + 1
        return evicted

    def release(self, blocks: list[int]) -> None:
        """A request is over; its last block is the first to be evicted."""
        uses, free = self._uses, self._free
        for block in reversed(blocks):
            if uses[block] == 1:
                del uses[block]
                free[block] = None
            else:
                uses[block] -= 1


class HostMemory:
    """Blocks that the device has evicted, the one that goes next first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._parent_of: dict[int, int | None] = {}

    def num_hits(self, blocks: list[int]) -> int:
        """How many of the leading blocks are here; they go last."""
        for position, block in enumerate(blocks):
            if block not in self._blocks:
                return position
            self._blocks.move_to_end(block)
        return len(blocks)

    def note(self, path: list[int]) -> None:
        """A prompt and its answer: behind which block each of its blocks is."""
        if self.num_blocks:
            self._parent_of.update(zip(path, [None, *path], strict=False))

    def put(self, evicted: list[int]) -> tuple[list[tuple[int, int | None]], list[int]]:
        """What the device has evicted, the last block of a prefix first; (offloaded, dropped)."""
        if not self.num_blocks:
            return [], []
        new = [block for block in reversed(evicted) if block not in self._blocks]
        # The last block of a prefix is the first to go here, too.
        self._blocks.update(dict.fromkeys(reversed(new)))
        num_over = max(0, len(self._blocks) - self.num_blocks)
        dropped = [self._blocks.popitem(last=False)[0] for _ in range(num_over)]
        return [(block, self._parent_of[block]) for block in new], dropped


class ReplayEngine:
    """add a job, then step for as long as it returns steps."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.cache = spec, Cache(spec.num_blocks)
        self._host, self._loading_s = HostMemory(spec.host_blocks), 0.0
        self.waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []  # heap by the step of the last token
        self._num_steps = 0
        self._blocks: dict[Job, list[int]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self.waiting or self._prefilling or self._decoding)

    def step(self, now: float) -> Step | None:
        """One step that begins now; None if nobody can run."""
        events = self._admit()
        num_tokens, first_tokens = self._prefill()
        num_decoding = len(self._decoding)
        if not num_tokens and not num_decoding:
            return None
        self._num_steps += 1
        finished = [job for job in first_tokens if job.request.num_answer_tokens <= 1]
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            finished.append(heapq.heappop(self._decoding)[2])
        for job in first_tokens:
            if job.request.num_answer_tokens > 1:
                last = self._num_steps + job.request.num_answer_tokens - 1
                heapq.heappush(self._decoding, (last, job.number, job))
        for job in finished:
            self.cache.release(self._blocks.pop(job))
        seconds = self.spec.time_model.step_s(
            num_prefill_tokens=num_tokens, num_decodes=num_decoding
        )
        seconds, self._loading_s = seconds + self._loading_s, 0.0
        return Step(now + seconds, first_tokens, finished, events)

    def _admit(self) -> list[CacheEvent]:
        events: list[CacheEvent] = []
        budget = self.spec.max_num_batched_tokens - len(self._decoding)
        budget -= sum(job.tokens_left for job in self._prefilling)
        while self.waiting and budget > 0:
            if len(self._prefilling) + len(self._decoding) >= self.spec.max_num_seqs:
                break
            event = self._start(self.waiting[0])
            if event is None:
                break
            events.append(event)
            job = self.waiting.popleft()
            self._prefilling.append(job)
            budget -= job.tokens_left
        return events

    def _start(self, job: Job) -> CacheEvent | None:
        request, size = job.request, self.spec.block_size
        prompt = request.blocks.tolist()
        num_cached = self.cache.num_hits(prompt)
        # The last token is computed in any case, for the first of the answer.
        most = (request.num_tokens - 1) // size
        num_hits = min(num_cached, most)
        num_loaded = min(self._host.num_hits(prompt[num_cached:]), most - num_hits)
        blocks = prompt + request.answer_blocks.tolist()
        evicted = self.cache.admit(blocks, num_hits)
        if evicted is None:
            return None
        self._blocks[job] = blocks
        self._host.note(blocks)
        self._loading_s += num_loaded * self.spec.host_load_s
        job.num_hit_tokens = (num_hits + num_loaded) * size
        job.tokens_left = request.num_tokens - job.num_hit_tokens
        # The last block of a prompt that is all there is computed again, but not stored again.
        first = num_hits if num_cached and prompt[num_cached - 1] in evicted else num_cached
        stored = np.array(blocks[first:], dtype=np.uint64)
        parent = prompt[first - 1] if first else None
        return CacheEvent(evicted, stored, parent, *self._host.put(evicted))

    def _prefill(self) -> tuple[int, list[Job]]:
        budget = self.spec.max_num_batched_tokens - len(self._decoding)
        num_tokens, done = 0, []
        while self._prefilling and budget > 0:
            job = self._prefilling[0]
            num_now = min(job.tokens_left, budget)
            job.tokens_left -= num_now
            budget -= num_now
            num_tokens += num_now
            if job.tokens_left:
                break
            done.append(self._prefilling.popleft())
        return num_tokens, done
