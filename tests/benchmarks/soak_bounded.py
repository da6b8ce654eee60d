"""`make soak-bounded`: minutes of ever-new prompts at a bound by bytes, through a Router.

usage: python -m tests.benchmarks.soak_bounded [--seconds S] [--max-bytes N] [--seed N]

Eight engines store prompts that nobody has seen, in two hash spaces: half of them have another
seed. One of sixteen is cleared, each prompt is routed first. What is printed and judged: the index
says that it is within its bound, the process has grown by no more than 1.3 times what the index
says, and from the second minute (of ten) it does not grow.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console

from kvplug import Rank, Router, RouterConfig
from kvplug.records import read_payloads
from tests.benchmarks.index_side import resident_bytes

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]

NUM_WORKERS, BLOCK_SIZE, MAX_PROMPT_BLOCKS = 8, 16, 512
MAX_BYTES = 100_000_000
CLEAR_SHARE = 1 / 400
MAX_RATIO, TOLERANCE = 1.3, 0.05
MIB = 2**20


class Sample(NamedTuple):
    """How large everything was."""

    elapsed_s: float
    num_blocks: int
    index_bytes: int
    grown_bytes: int


class Soak:
    """A bounded router, and engines that only ever see new prompts."""

    def __init__(self, max_bytes: int, seed: int) -> None:
        self.rng, self.num_stored = np.random.default_rng(seed), 0
        self._luck = random.Random(seed)
        config = RouterConfig(block_size=BLOCK_SIZE, max_index_bytes=max_bytes)
        self.router, self.max_bytes = Router(config), max_bytes
        self.ranks = [Rank(f"w{number}") for number in range(NUM_WORKERS)]
        for rank in self.ranks:
            self.router.add_worker(rank.worker)
        self._start_bytes = resident_bytes() - self.router.index.nbytes

    def step(self) -> None:
        """A prompt is routed to an engine, which stores it."""
        prompt = self._prompt(self._luck.randint(1, MAX_PROMPT_BLOCKS))
        decision = self.router.route(prompt)
        number = self.ranks.index(decision.rank)
        self._store(decision.rank, prompt, seed=number % 2)
        self.router.finish(decision.request_id)
        if self._luck.random() < CLEAR_SHARE:
            self.router.clear(self._luck.choice(self.ranks))

    def sample(self, elapsed_s: float) -> Sample:
        """As of now."""
        index = self.router.index
        grown = resident_bytes() - self._start_bytes
        return Sample(elapsed_s, len(index), index.nbytes, grown)

    def _prompt(self, num_blocks: int) -> U32:
        return self.rng.integers(0, 2**20, num_blocks * BLOCK_SIZE, dtype=np.uint32)

    def _store(self, rank: Rank, prompt: U32, *, seed: int) -> None:
        num_blocks = len(prompt) // BLOCK_SIZE
        first = self.num_stored * 2 + seed  # an engine with the other seed has no such hash
        self.num_stored += num_blocks
        hashes = np.arange(first, first + 2 * num_blocks, 2).astype(np.uint64)
        records = read_payloads([payload_of(hashes, prompt)])
        assert records is not None
        applied = self.router.apply_records(rank, records)
        assert applied.num_stored == num_blocks, applied


def payload_of(hashes: U64, tokens: U32) -> bytes:
    """A batch with one stored event as an engine sends it.

    Written from arrays: thousands of Python integers for each event would be most of what comes
    and goes in this process.
    """
    head = msgspec.msgpack.encode([0.5, []])[:-1] + b"\x91\x84"
    items: list[tuple[str, bytes]] = [
        ("type", msgspec.msgpack.encode("BlockStored")),
        ("block_hashes", _array(hashes.astype(">u8"), b"\xcf")),
        ("token_ids", _array(tokens.astype(">u4"), b"\xce")),
        ("block_size", msgspec.msgpack.encode(BLOCK_SIZE)),
    ]
    return head + b"".join(msgspec.msgpack.encode(name) + value for name, value in items)


def _array(numbers: npt.NDArray[Any], tag: bytes) -> bytes:
    """array16 of big-endian numbers, each behind its tag."""
    rows = np.empty((len(numbers), 1 + numbers.itemsize), dtype=np.uint8)
    rows[:, 0] = tag[0]
    rows[:, 1:] = numbers.view(np.uint8).reshape(len(numbers), -1)
    return b"\xdc" + len(numbers).to_bytes(2, "big") + rows.tobytes()


def warm_up() -> None:
    """Load the kernels, and have the buffers of this thread as large as they will be."""
    soak = Soak(max_bytes=2**21, seed=0)
    for _ in range(1000):
        soak.step()
    gc.collect()


def run(soak: Soak, seconds: float, console: Console) -> list[Sample]:
    """Steps until the time is over, and twenty samples."""
    samples: list[Sample] = []
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        if elapsed >= seconds / 20 * (len(samples) + 1):
            samples.append(soak.sample(elapsed))
            console.print(line_of(samples[-1]))
        soak.step()
    samples.append(soak.sample(seconds))
    console.print(line_of(samples[-1]))
    soak.router.index.check()
    return samples


def line_of(sample: Sample) -> str:
    """For people."""
    index, grown = sample.index_bytes / MIB, sample.grown_bytes / MIB
    return (
        f"{sample.elapsed_s:6.1f} s  {sample.num_blocks:9,} blocks  index {index:6.1f} MiB  "
        f"process {grown:6.1f} MiB more than at the start, {grown / index:.2f} times"
    )


def failures(samples: list[Sample], max_bytes: int) -> list[str]:
    """What was not as it has to be."""
    most = max(sample.index_bytes for sample in samples)
    found = [f"the index took {most:,} of {max_bytes:,} bytes"] if most > max_bytes else []
    late = samples[len(samples) // 5 :]  # after two minutes of ten
    ratio = max(sample.grown_bytes / sample.index_bytes for sample in late)
    if ratio > MAX_RATIO:
        found.append(f"the process grew by {ratio:.2f} times what the index says")
    before, after = late[0].grown_bytes, max(sample.grown_bytes for sample in late)
    if after > before * (1 + TOLERANCE):
        found.append(f"the process went on growing, from {before:,} to {after:,} bytes")
    return found


def main() -> None:
    """Soak, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.soak_bounded")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES)
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    console = Console(width=120, highlight=False)
    warm_up()
    soak = Soak(options.max_bytes, options.seed)
    found = failures(run(soak, options.seconds, console), options.max_bytes)
    console.print(f"{soak.num_stored:,} blocks stored; seed {options.seed}")
    for line in found:
        console.print(line)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
