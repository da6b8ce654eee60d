"""Processes that share an index are killed at random points: no wrong answer, nobody stuck.

In:  how many kills, a seed.   Out: a Result.

One writer applies events whose effect is known by their number: rank r holds a path up to a depth
that the number tells. Each reader asks for the path again and again, and knows which events its
answer can be of, as the writer notes the number of the last event in the same version. Readers
route requests, too, so that some die with a load. Whatever is killed is started anew, by the
program that would be the supervisor.
"""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvplug.events import Rank
from kvplug.hashing import BlockHasher
from kvplug.kernels import compile_all
from kvplug.kernels.peer_load import NUM_BUSY, ROW_WIDTH
from kvplug.kernels.versioned import VERSION
from kvplug.packed import PackedRemoved, PackedStored, encode
from kvplug.router.config import RouterConfig
from kvplug.shared import layout
from kvplug.shared.folder import OwnedFolder
from kvplug.shared.peers import Place, forget_process, make_files
from kvplug.shared.publishing import WritingRouter, abandon
from kvplug.shared.reading import ReadingRouter

NUM_RANKS, NUM_READERS, BLOCK_SIZE, DEPTH, STEP = 8, 2, 16, 128, 8
RANKS = [Rank(f"w{n}") for n in range(NUM_RANKS)]
TOKENS = np.arange(DEPTH * BLOCK_SIZE, dtype=np.uint32)
HASHES = BlockHasher(BLOCK_SIZE).sequence_hashes(TOKENS)
CONFIG = RouterConfig(block_size=BLOCK_SIZE)
# Words of the control array that are free: the number of the last event, in the first line.
LAST_EVENT = VERSION + 1
# Of each reader: answers, those of one known event, wrong ones, given up, the longest in ns.
NUM_ANSWERS, NUM_EXACT, NUM_WRONG, NUM_GIVEN_UP, LONGEST_NS, WIDTH = range(6)
NUM_NOISE = 400  # blocks of a path of its own: arrays grow, and the next generation begins
STUCK_S, COMPILE_S = 5.0, 300.0


class Result(NamedTuple):
    """What came of it: see the words of a reader; num_generations that were published; num_files
    of arrays that are left; left_load: of readers that died.
    """

    num_kills: int
    num_answers: int
    num_exact: int
    num_wrong: int
    num_given_up: int
    longest_ms: float
    num_stuck: int
    num_generations: int
    num_files: int
    left_load: float


def depths_after(event):
    """The reference: how deep each rank holds the path after so many events, by replaying them."""
    depths = [DEPTH] * NUM_RANKS
    for number in range(1, event % CYCLE + 1):
        rank, is_store = change_of(number)
        depths[rank] += STEP if is_store else -STEP
    return tuple(depths)


NUM_CUTS = DEPTH // STEP - 1
CYCLE = 2 * NUM_RANKS * NUM_CUTS


def change_of(number):
    """Rank, and whether it stores: all ranks lose blocks in turn, then all get them back."""
    at = (number - 1) % CYCLE
    return at % NUM_RANKS, at >= CYCLE // 2


class Writing:
    """The writer: from the first event on, whatever the one before had done."""

    def __init__(self, folder):
        self.router = WritingRouter(CONFIG, folder)
        self.control = folder.open(layout.CONTROL, writes=True)
        self.depths, self.rng = [DEPTH] * NUM_RANKS, np.random.default_rng(os.getpid())
        for rank in RANKS:
            self.router.add_worker(rank.worker)
            self.router.apply_packed(rank, encode([PackedStored(HASHES, HASHES)]))
        self.event, publish = 0, self.router.publisher._publish

        def note_and_publish():  # at the end of each event, in its version
            self.control[LAST_EVENT] = self.event
            publish()

        self.router.publisher._publish = note_and_publish
        self.router.catch_up(is_late=True)

    def step(self, number):
        """One event."""
        index, is_store = change_of(number)
        depth, rank = self.depths[index], RANKS[index]
        if is_store:
            blocks = HASHES[depth : depth + STEP]
            payload = encode([PackedStored(blocks, blocks, int(HASHES[depth - 1]))])
        else:
            payload = encode([PackedRemoved(HASHES[depth - STEP : depth][::-1])])
        self.depths[index] += STEP if is_store else -STEP
        self.event = number % CYCLE
        self.router.apply_packed(rank, payload)
        if number % 50 == 0:
            more = self.rng.integers(1, 2**63, NUM_NOISE, dtype=np.uint64)
            self.router.apply_packed(rank, encode([PackedStored(more, more)]))


def write(folder, place):
    writing, number = Writing(folder), 0
    while True:
        number += 1
        writing.step(number)


class Asking:
    """A reader: is each answer one of those that it can be?"""

    def __init__(self, folder, place):
        self.router = ReadingRouter(CONFIG, folder, place)
        self.control, self.fleet = folder.open(layout.CONTROL), self.router.fleet_index
        for rank in RANKS:
            self.router.add_worker(rank.worker)
        words = folder.open("answers", writes=True)
        self.words = words[place.number * WIDTH : (place.number + 1) * WIDTH]
        self.depths_after = [depths_after(event) for event in range(CYCLE)]
        self.num_given_up = 0

    def ask(self):
        """One answer: counted, and compared."""
        before = int(self.control[VERSION]), int(self.control[LAST_EVENT])
        began_ns = time.perf_counter_ns()
        self.router.take_news()
        [attached] = self.fleet.attached or [None]
        if attached is None:
            return
        numbers = attached.group.index.numbers
        overlap = attached.group.index.overlap(HASHES)
        took_ns = time.perf_counter_ns() - began_ns
        after = int(self.control[VERSION]), int(self.control[LAST_EVENT])
        self.words[LONGEST_NS] = max(int(self.words[LONGEST_NS]), took_ns)
        self.words[NUM_ANSWERS] += 1
        if self.router.num_given_up != self.num_given_up:
            self.num_given_up = self.router.num_given_up
            self.words[NUM_GIVEN_UP] += 1
            return
        depths = tuple(int(overlap.held[numbers.number_of(rank)]) for rank in RANKS)
        is_exact = before == after and before[0] % 2 == 0
        self.words[NUM_EXACT] += is_exact
        expected = self.depths_after[after[1] : after[1] + 1] if is_exact else self.depths_after
        self.words[NUM_WRONG] += depths not in expected

    def route(self):
        """A request that may be in flight as the process dies."""
        decision = self.router.route(TOKENS[: 32 * BLOCK_SIZE])
        self.router.finish(decision.request_id, 5)


def read(folder, place):
    asking, number = Asking(folder, place), 0
    while True:
        number += 1
        asking.ask()
        if number % 8 == 0:
            asking.route()


class Processes:
    """A writer and readers by place in a list: start, kill."""

    def __init__(self, folder):
        self.folder = folder
        self.places = [None, *(Place(n, NUM_READERS) for n in range(NUM_READERS))]
        self.pids = [0] * len(self.places)

    def start(self, at):
        sys.stdout.flush()
        self.pids[at] = os.fork()
        if not self.pids[at]:
            try:
                (write if at == 0 else read)(self.folder, self.places[at])
            except Exception:  # noqa: BLE001 - it ends here, and says why
                traceback.print_exc()
            finally:
                os._exit(1)

    def kill(self, at):
        """Whether it was alive; nothing of it stays."""
        os.kill(self.pids[at], signal.SIGKILL)
        _, status = os.waitpid(self.pids[at], 0)
        if at == 0:
            abandon(self.folder)
        else:
            forget_process(self.folder, self.places[at])
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def run(num_kills, seed=1, longest_pause_s=0.03):
    """Kill so often, and look on."""
    compile_all()
    rng, folder = random.Random(seed), OwnedFolder(None)
    make_files(folder, NUM_READERS)
    words = folder.create("answers", NUM_READERS * WIDTH).reshape(NUM_READERS, WIDTH)
    processes, num_stuck = Processes(folder), 0
    try:
        for at in range(len(processes.pids)):
            processes.start(at)
        _await_answers(words, COMPILE_S)
        for _ in range(num_kills):
            time.sleep(rng.random() * longest_pause_s)
            at = rng.choice([0, 0, *range(1, NUM_READERS + 1)])
            if not processes.kill(at):
                num_stuck += 1  # it had ended by itself
            processes.start(at)
        num_stuck += not _await_answers(words, STUCK_S)
        num_generations = int(folder.open(layout.CONTROL)[8])
    finally:
        for at in range(len(processes.pids)):
            processes.kill(at)
        num_files = len(list(Path(folder.path).glob("array.*")))
        load = folder.open(layout.LOAD)[: layout.rows_at(NUM_READERS)].view(np.float64)
        left = float(np.abs(load.reshape(-1, ROW_WIDTH)[:, :NUM_BUSY]).sum())
        folder.close()
    sums = words.sum(axis=0)
    return Result(
        num_kills,
        *(int(sums[word]) for word in (NUM_ANSWERS, NUM_EXACT, NUM_WRONG, NUM_GIVEN_UP)),
        float(words[:, LONGEST_NS].max()) / 1e6,
        num_stuck,
        num_generations,
        num_files,
        left,
    )


def _await_answers(words, limit_s):
    """Whether every reader has exact answers after this moment: it waits for nobody."""
    before, limit = words[:, NUM_EXACT].copy(), time.monotonic() + limit_s
    while time.monotonic() < limit:
        if (words[:, NUM_EXACT] > before + 20).all():
            return True
        time.sleep(0.01)
    return False


if __name__ == "__main__":
    print(run(int(sys.argv[1])))  # noqa: T201 - its output
