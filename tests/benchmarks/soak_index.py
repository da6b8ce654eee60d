"""`make soak-index`: minutes of churn on one BlockIndex, whose memory has to stay flat.

usage: python -m tests.benchmarks.soak_index [--seconds S] [--seed N]

Sixteen workers store conversations with shared prefixes and branches, evict ends first, are
cleared, removed and added again. Every query is compared with what the caches hold; check() runs
before each line that is printed. Which events come is decided by the seed, how many by the time.

It starts with every worker full of blocks that nobody else has: the largest number of blocks that
the index can come to. So no table has a reason to grow later, but for those that number the sets of
workers that hold a block: there are more of these once blocks are shared. They get the first third
of the time. The tolerance is for what goes on fluctuating: how many such sets there are, and what
the allocators of Python and C keep. In the other two thirds of three minutes some ten million
blocks come and go: a byte left behind by each would be a twentieth of the process.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import NamedTuple

import numpy as np
from rich.console import Console

from kvplug import packed
from kvplug.index.block_index import BlockIndex
from tests.benchmarks.index_kvplug import as_packed, rank_of
from tests.benchmarks.index_side import resident_bytes
from tests.benchmarks.soak_engine import Conversation, Conversations, Engine

NUM_WORKERS, CAPACITY = 16, 8192
LINE_EVERY_S = 10.0
UNSHARED_BLOCKS = 256
QUERY_SHARE, CLEAR_SHARE, RESTART_SHARE = 0.25, 1 / 4000, 1 / 8000
TOLERANCE = 0.05
MIB = 2**20


class Sample(NamedTuple):
    """How large everything was."""

    elapsed_s: float
    num_events: int
    num_blocks: int
    table_bytes: int
    resident_bytes: int


class Soak:
    """An index, the engines that it follows, and the steps that change both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.conversations = Conversations(self.rng)
        self.index = BlockIndex(16)
        self.engines = [Engine(worker, CAPACITY) for worker in range(NUM_WORKERS)]
        self.num_events = self.num_queries = self.num_restarts = self.num_clears = 0
        self.numbers = [self.index.add_rank(rank_of(worker)) for worker in range(NUM_WORKERS)]

    def fill(self) -> None:
        """Every worker holds as much as it can, nothing of it shared."""
        for engine in self.engines:
            while len(engine) < engine.capacity:
                self._serve(engine, self.conversations.unseen(UNSHARED_BLOCKS))

    def step(self) -> None:
        """One request at one worker, or something less usual."""
        engine = self.engines[self.rng.randrange(NUM_WORKERS)]
        luck = self.rng.random()
        if luck < RESTART_SHARE:
            self._restart(engine)
        elif luck < RESTART_SHARE + CLEAR_SHARE:
            self._clear(engine)
        conversation = self.conversations.next()
        if luck > 1 - QUERY_SHARE:
            self._ask(conversation)
        self._serve(engine, conversation)

    def check(self) -> None:
        """The index agrees with itself, and with the engines about how much there is."""
        self.index.check()
        names = {name for engine in self.engines for name in engine.names}
        assert len(self.index) == len(names), f"{len(self.index)}, not {len(names)} blocks"
        for engine in self.engines:
            num_held = len(self.index.engine_hashes_of(rank_of(engine.worker)))
            assert num_held == len(engine), f"{engine.worker}: {num_held}, not {len(engine)} blocks"

    def sample(self, elapsed_s: float) -> Sample:
        """As of now."""
        sizes = len(self.index), self.index.nbytes, resident_bytes()
        return Sample(elapsed_s, self.num_events, *sizes)

    def _serve(self, engine: Engine, conversation: Conversation) -> None:
        events = engine.serve(conversation)
        if events:
            payload = packed.encode(map(as_packed, events))
            self.index.apply_packed(rank_of(engine.worker), payload)
        self.num_events += len(events)

    def _ask(self, conversation: Conversation) -> None:
        hashes = np.array(conversation.hashes, dtype=np.uint64)
        depths = self.index.overlap(hashes, 0.0).depth[self.numbers].tolist()
        expected = [engine.num_cached(conversation) for engine in self.engines]
        assert depths == expected, f"depths {depths}, the engines hold {expected}"
        self.num_queries += 1

    def _clear(self, engine: Engine) -> None:
        self.index.clear(rank_of(engine.worker))
        engine.forget()
        self.num_clears += 1

    def _restart(self, engine: Engine) -> None:
        rank = rank_of(engine.worker)
        self.index.remove_worker(rank.worker)
        self.numbers[engine.worker] = self.index.add_rank(rank)
        engine.forget()
        self.num_restarts += 1


def main() -> None:
    """Soak, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.soak_index")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console(width=120, highlight=False)
    soak = Soak(options.seed)
    samples = run(soak, options.seconds, console)
    done = f"{soak.num_queries} queries, {soak.num_clears} clears, {soak.num_restarts} restarts"
    console.print(f"{soak.num_events} events, {done}; seed {options.seed}")
    growth = grown(samples, options.seconds)
    for line in growth:
        console.print(line)
    sys.exit(1 if growth else 0)


def run(soak: Soak, seconds: float, console: Console) -> list[Sample]:
    """Steps until the time is over; a sample every few seconds, each after a check."""
    soak.fill()
    samples: list[Sample] = []
    began = time.monotonic()
    every_s = min(LINE_EVERY_S, seconds / 9)
    while (elapsed := time.monotonic() - began) < seconds:
        if elapsed >= every_s * len(samples):
            soak.check()
            samples.append(soak.sample(elapsed))
            console.print(line_of(samples[-1]))
        soak.step()
    soak.check()
    samples.append(soak.sample(seconds))
    console.print(line_of(samples[-1]))
    return samples


def line_of(sample: Sample) -> str:
    """For people."""
    tables, resident = sample.table_bytes / MIB, sample.resident_bytes / MIB
    return (
        f"{sample.elapsed_s:6.1f} s  {sample.num_events:9,} events  {sample.num_blocks:8,} blocks  "
        f"tables {tables:6.1f} MiB  resident {resident:6.1f} MiB"
    )


def grown(samples: list[Sample], seconds: float) -> list[str]:
    """What is larger in the last third than at the end of the first, by more than the tolerance."""
    base = next(s for s in reversed(samples) if s.elapsed_s <= seconds / 3)
    late = [s for s in samples if s.elapsed_s >= seconds * 2 / 3]
    failures = []
    for name in ("table_bytes", "resident_bytes"):
        before, after = getattr(base, name), max(getattr(s, name) for s in late)
        if after > before * (1 + TOLERANCE):
            failures.append(f"{name} grew from {before:,} to {after:,}: {after / before - 1:.1%}")
    return failures


if __name__ == "__main__":
    main()
