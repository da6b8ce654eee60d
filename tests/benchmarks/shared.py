"""What it costs to share an index: decisions, and reads beside a writer at full speed.

In:  the router in one process, readers in one and in two processes; a writer that pauses never.
Out: bench-results/shared.json.

The readers are forks of this program, as those of the router are. Ways to decide take turns, round
by round, as the machine is not this program's alone; decisions are counted per second and per CPU
second of the process that makes them. Kills are those of tests/shared/kills.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.hashing import BlockHasher
from kvplug.kernels import compile_all
from kvplug.packed import PackedRemoved, PackedStored, encode
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from kvplug.shared.folder import OwnedFolder, SharedFolder
from kvplug.shared.peers import Place, make_files
from kvplug.shared.publishing import WritingRouter, abandon
from kvplug.shared.reading import ReadingRouter
from tests.shared import kills

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

_RESULT: Final = Path("bench-results/shared.json")
_BLOCK_SIZE, _NUM_PROMPTS, _PROMPT_BLOCKS, _SHARED_BLOCKS = 16, 64, 256, 128
_NUM_PROCESSES: Final = 2
_GO, _NUM_EVENTS = 0, 1  # flags of a writer
_READ_RANKS, _READ_BLOCKS, _STEP = 64, 256, 16
_CONFIG: Final = RouterConfig(block_size=_BLOCK_SIZE)


def _ranks(num_ranks: int) -> list[Rank]:
    return [Rank(f"w{n}") for n in range(num_ranks)]


def _prompts() -> list[U32]:
    """Of 4096 tokens, of which half are those of all others."""
    rng = np.random.default_rng(3)
    common = rng.integers(1, 30_000, _SHARED_BLOCKS * _BLOCK_SIZE, dtype=np.uint32)
    own = (_PROMPT_BLOCKS - _SHARED_BLOCKS) * _BLOCK_SIZE
    rest = rng.integers(1, 30_000, (_NUM_PROMPTS, own), dtype=np.uint32)
    return [np.concatenate([common, each]) for each in rest]


def _fill(router: Router, num_ranks: int) -> None:
    """Each prompt is on two ranks, what they have in common on all."""
    hasher, ranks = BlockHasher(_BLOCK_SIZE), _ranks(num_ranks)
    hashes = [hasher.sequence_hashes(tokens) for tokens in _prompts()]
    for rank in ranks:
        router.add_worker(rank.worker)
        common = hashes[0][:_SHARED_BLOCKS]
        router.apply_packed(rank, encode([PackedStored(common, common)]))
    for n, each in enumerate(hashes):
        blocks, parent = each[_SHARED_BLOCKS:], int(each[_SHARED_BLOCKS - 1])
        for rank in (ranks[n % num_ranks], ranks[(n + 1) % num_ranks]):
            router.apply_packed(rank, encode([PackedStored(blocks, blocks, parent)]))


def _decide(router: Router, seconds: float) -> tuple[float, float]:
    """Whole requests (route, first token, end) per second, and per CPU second."""
    prompts, number = _prompts(), 0
    began_s, cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - began_s < seconds:
        request_id = router.route(prompts[number % _NUM_PROMPTS]).request_id
        router.first_token(request_id)
        router.finish(request_id, 20)
        number += 1
    return number / (time.perf_counter() - began_s), number / (time.process_time() - cpu_s)


@contextmanager
def _forked(run: Callable[[], None]) -> Iterator[int]:
    """A process that runs it; killed at the end."""
    pid = os.fork()
    if not pid:
        try:
            run()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _decide_in_processes(
    folder: SharedFolder, num_processes: int, num_ranks: int, seconds: float
) -> list[tuple[float, float]]:
    """What each of so many readers does at the same time."""
    readers, results = [], []
    for number in range(num_processes):
        source, sink = os.pipe()
        pid = os.fork()
        if not pid:
            router = ReadingRouter(_CONFIG, folder, Place(number, _NUM_PROCESSES))
            for rank in _ranks(num_ranks):
                router.add_worker(rank.worker)
            _decide(router, seconds / 10)
            os.write(sink, json.dumps(_decide(router, seconds)).encode())
            os._exit(0)
        os.close(sink)
        readers.append((pid, source))
    for pid, source in readers:
        results.append(tuple(json.loads(os.read(source, 4096))))
        os.waitpid(pid, 0)
        os.close(source)
    return results


def decisions(num_ranks: int, num_rounds: int, seconds: float) -> dict[str, Any]:
    """By way to decide, medians over rounds and the lowest and highest of them."""
    folder = OwnedFolder()
    make_files(folder, _NUM_PROCESSES)
    rows: dict[str, list[tuple[float, float]]] = {}
    try:
        writer = WritingRouter(_CONFIG, folder)
        _fill(writer, num_ranks)
        writer.catch_up(is_late=True)
        own = Router(_CONFIG)
        _fill(own, num_ranks)
        for _ in range(num_rounds):
            rows.setdefault("in_process", []).append(_decide(own, seconds))
            for num in range(1, _NUM_PROCESSES + 1):
                each = _decide_in_processes(folder, num, num_ranks, seconds)
                total, per_cpu = sum(e[0] for e in each), statistics.fmean(e[1] for e in each)
                rows.setdefault(f"processes_{num}", []).append((total, per_cpu))
    finally:
        folder.close()
    return {
        way: {"per_s": _spread([r[0] for r in each]), "per_cpu_s": _spread([r[1] for r in each])}
        for way, each in rows.items()
    }


def _spread(values: list[float]) -> list[int]:
    """Median, lowest, highest."""
    return [round(each) for each in (statistics.median(values), min(values), max(values))]


def _fill_path(router: Router, hashes: U64) -> None:
    """All ranks have the path."""
    for rank in _ranks(_READ_RANKS):
        router.add_worker(rank.worker)
        router.apply_packed(rank, encode([PackedStored(hashes, hashes)]))


def _write(folder: SharedFolder, hashes: U64, flags: U64) -> None:
    """Publish, and wait; then rank 3 loses half of the path and gets it back, others store and
    remove, for ever.
    """
    router = WritingRouter(_CONFIG, folder)
    _fill_path(router, hashes)
    router.catch_up(is_late=True)
    rank, other = _ranks(_READ_RANKS)[3], _ranks(_READ_RANKS)[5]
    at = range(_READ_BLOCKS - _STEP, _READ_BLOCKS // 2 - 1, -_STEP)
    payloads = [(rank, encode([PackedRemoved(hashes[n : n + _STEP][::-1])])) for n in at]
    for n in reversed(at):
        blocks = hashes[n : n + _STEP]
        payloads.append((rank, encode([PackedStored(blocks, blocks, int(hashes[n - 1]))])))
    for each in np.random.default_rng(7).integers(1, 2**63, (256, _STEP), dtype=np.uint64):
        payloads += [(other, encode([PackedStored(each, each)]))]
        payloads += [(other, encode([PackedRemoved(each[::-1])]))]
    while not flags[_GO]:
        time.sleep(0.001)
    while True:
        for each_rank, payload in payloads:
            router.apply_packed(each_rank, payload)
            flags[_NUM_EVENTS] += np.uint64(1)


def _reads(reader: ReadingRouter, hashes: U64, seconds: float) -> list[float]:
    """Microseconds of each query of the index, without what a decision adds."""
    took, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        reader.take_news()
        prefix_query = reader.index.prefix_query
        for _ in range(64):
            began_ns = time.perf_counter_ns()
            prefix_query.overlap(hashes, 0.0)
            took.append((time.perf_counter_ns() - began_ns) / 1e3)
    return took


def reads(num_rounds: int, seconds: float) -> dict[str, Any]:
    """p50 and p99 of a query in microseconds: of an index of one's own, of a shared one whose
    writer is idle, of one whose writer never pauses.
    """
    folder, rng = OwnedFolder(), np.random.default_rng(5)
    hashes = rng.integers(1, 2**63, _READ_BLOCKS, dtype=np.uint64)
    rows: dict[str, list[tuple[float, float]]] = {"own": [], "idle": [], "busy": []}
    rates, given_up = [], []
    try:
        make_files(folder, _NUM_PROCESSES)
        flags, own = folder.create("flags", 8), Router(_CONFIG)
        _fill_path(own, hashes)
        reader = ReadingRouter(_CONFIG, folder, Place(0, _NUM_PROCESSES))
        for rank in _ranks(_READ_RANKS):
            reader.add_worker(rank.worker)
        for _ in range(num_rounds):
            flags[:] = 0
            rows["own"].append(_percentiles(_own_reads(own, hashes, seconds)))
            with _forked(lambda: _write(folder, hashes, flags)):
                _await_publication(reader)
                rows["idle"].append(_percentiles(_reads(reader, hashes, seconds)))
                num_given_up, num_reads = reader.num_given_up, reader.num_reads
                began_s, flags[_GO] = time.perf_counter(), 1
                rows["busy"].append(_percentiles(_reads(reader, hashes, seconds)))
                rates.append(int(flags[_NUM_EVENTS]) / (time.perf_counter() - began_s))
                share = (reader.num_given_up - num_given_up) / (reader.num_reads - num_reads)
                given_up.append(share)
            abandon(folder)
    finally:
        folder.close()
    result: dict[str, Any] = {
        way: {
            "p50_us": round(statistics.median(r[0] for r in each), 2),
            "p99_us": round(statistics.median(r[1] for r in each), 2),
            "p50_by_round_us": [round(r[0], 2) for r in each],
        }
        for way, each in rows.items()
    }
    over = result["busy"]["p50_us"] - result["idle"]["p50_us"]
    result |= {"over_idle_p50_us": round(over, 2), "events_per_s": _spread(rates)}
    return result | {"given_up_share": round(statistics.median(given_up), 6)}


def _await_publication(reader: ReadingRouter) -> None:
    """Of the writer that was just started."""
    before = reader.generation
    while reader.generation == before or not reader.is_attached:
        time.sleep(0.001)
        reader.take_news()


def _own_reads(router: Router, hashes: U64, seconds: float) -> list[float]:
    took, end, prefix_query = [], time.perf_counter() + seconds, router.index.prefix_query
    while time.perf_counter() < end:
        for _ in range(64):
            began_ns = time.perf_counter_ns()
            prefix_query.overlap(hashes, 0.0)
            took.append((time.perf_counter_ns() - began_ns) / 1e3)
    return took


def _percentiles(took: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(took, (50, 99)).tolist()
    return p50, p99


def main() -> None:
    """Measure all, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64])
    given = parser.parse_args()
    compile_all()
    result: dict[str, Any] = {"cores": os.cpu_count(), "rounds": given.rounds}
    for num_ranks in given.ranks:
        result[f"decisions_{num_ranks}_ranks"] = decisions(num_ranks, given.rounds, given.seconds)
    result["reads"] = reads(given.rounds, given.seconds)
    result["kills"] = kills.run(given.kills)._asdict()
    _RESULT.parent.mkdir(exist_ok=True)
    _RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(_RESULT.read_text())  # noqa: T201 - its output


if __name__ == "__main__":
    main()
