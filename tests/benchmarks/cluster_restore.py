"""How long a snapshot is made, how long events wait for it, and when a router that starts is ready.

In:  how many blocks on how many ranks.
Out: seconds of each step; "pause": events wait while the index is copied; "ready": from the first
question for the manifest until the last follower knows its position.

The server is one, on this machine's disk. Each round is a process of its own.

usage: python -m tests.benchmarks.cluster_restore URL FLEET NUM_BLOCKS NUM_RANKS
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from kvplug import Rank, Router, RouterConfig
from kvplug.cluster.checkpoints import Checkpoints, CheckpointSettings
from kvplug.cluster.fleet_snapshot import FrozenFleet, freeze, restore_fleet
from kvplug.ingest.follower import Follower
from kvplug.kernels import compile_all
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import Subjects
from kvplug.packed import PackedStored, encode
from kvplug.protocol import Events, Hello, WorkerHello
from kvplug.protocol import encode as message
from kvplug.transports.base import Message
from tests.benchmarks.cluster_events import BLOCK_SIZE
from tests.benchmarks.cluster_servers import Servers, servers
from tests.benchmarks.cluster_sides import ENV
from tests.benchmarks.sides import ROOT

CHAIN, PER_MESSAGE = 256, 2048


class Case:
    """shared: every rank holds the same blocks; else each has its own share of them."""

    def __init__(self, num_blocks: int, num_ranks: int, *, shared: bool) -> None:
        self.num_blocks, self.num_ranks, self.shared = num_blocks, num_ranks, shared

    def __str__(self) -> str:
        copies = self.num_ranks if self.shared else 1
        return (
            f"{self.num_blocks * copies / 1e6:g} M memberships, {self.num_blocks / 1e6:g} M blocks"
        )


CASES = (
    Case(1_000_000, 8, shared=False),
    Case(1_250_000, 8, shared=True),
    Case(10_000_000, 8, shared=False),
)


def measure(num_rounds: int, cases: tuple[Case, ...] = CASES) -> dict[str, Any]:
    """Cases take turns."""
    rounds: dict[str, list[dict[str, float]]] = {str(case): [] for case in cases}
    with servers(1) as nats:
        for number in range(num_rounds):
            for n, case in enumerate(cases):
                rounds[str(case)].append(_round(nats, f"f{number}-{n}", case))
    return {name: _row(found) for name, found in rounds.items()}


def _round(nats: Servers, fleet: str, case: Case) -> dict[str, float]:
    nats.prepare(fleet)
    # The snapshot counts up to a sequence that the stream must have.
    nats.publish(fleet, b"x")
    words = map(str, (nats.url, fleet, case.num_blocks, case.num_ranks, int(case.shared)))
    command = [sys.executable, "-m", "tests.benchmarks.cluster_restore", *words]
    done = subprocess.run(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def _row(rounds: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        row[name] = round(statistics.median(values), 3)
        row[f"{name} spread"] = [round(min(values), 3), round(max(values), 3)]
    return row


class Filled:
    """A router whose followers have heard all that their ranks hold."""

    def __init__(self, num_blocks: int, num_ranks: int, *, shared: bool) -> None:
        self.router = Router(RouterConfig(block_size=BLOCK_SIZE, speculative_ttl_s=0.0))
        self.followers = []
        for n in range(num_ranks):
            self.router.add_worker(f"w{n}")
            follower = Follower(self.router, Rank(f"w{n}"))
            self.followers.append(follower)
            seed = 7 if shared else n
            self._tell(
                follower, np.random.default_rng(seed), num_blocks // (1 if shared else num_ranks)
            )

    def _tell(self, follower: Follower, rng: np.random.Generator, num_blocks: int) -> None:
        about, life = WorkerHello(block_size=BLOCK_SIZE), hash(follower.rank) & (2**63 - 1) or 1
        follower.on_connected()
        payloads = [message(Hello(life, 0, time.time(), about))]
        for number, first in enumerate(range(0, num_blocks, PER_MESSAGE)):
            hashes = rng.integers(
                0, 2**64 - 1, min(PER_MESSAGE, num_blocks - first), dtype=np.uint64
            )
            chains = [hashes[at : at + CHAIN] for at in range(0, len(hashes), CHAIN)]
            packed = encode([PackedStored(chain, chain) for chain in chains])
            payloads.append(message(Events(life, number, time.time(), packed)))
        follower.receive([Message(b"", None, payload) for payload in payloads])
        assert follower.num_stored == num_blocks, (follower.num_stored, follower.trust)


def main(url: str, fleet: str, num_blocks: int, num_ranks: int, shared: bool) -> None:
    compile_all()  # as a router does before it begins
    filled = Filled(num_blocks, num_ranks, shared=shared)
    connection = NatsConnection(NatsSettings(servers=(url,), fleet=fleet), "router-bench")
    connection.start()
    steps: list[tuple[str, float]] = []

    async def on_step(name: str) -> None:
        steps.append((name, time.perf_counter()))

    frozen: list[FrozenFleet] = []

    async def frozen_now() -> FrozenFleet:
        began_s = time.perf_counter()
        frozen.append(freeze(filled.router, filled.followers, 1))
        steps.append(("pause", time.perf_counter() - began_s))
        return frozen[0]

    subjects, settings = Subjects(fleet), CheckpointSettings(timeout_s=60.0)
    checkpoints = Checkpoints(connection, subjects, settings, "bench", on_step=on_step)
    connection.submit(checkpoints.restore()).result()
    began_s = time.perf_counter()
    manifest = connection.submit(checkpoints.make(frozen_now)).result()
    assert manifest is not None
    times = dict(steps)
    result = {
        "bytes_a_block": manifest.size / num_blocks,
        "pause_s": times["pause"],
        "encode_upload_s": times["upload"] - times["freeze"],
        "made_s": time.perf_counter() - began_s,
    }
    result |= _restored(connection, subjects, settings, num_ranks, filled)
    connection.stop()
    json.dump(result, sys.stdout)


def _restored(
    connection: NatsConnection, subjects: Subjects, settings: CheckpointSettings, num_ranks: int,
    filled: Filled,
) -> dict[str, float]:  # fmt: skip
    router = Router(RouterConfig(block_size=BLOCK_SIZE, speculative_ttl_s=0.0))
    for n in range(num_ranks):
        router.add_worker(f"w{n}")
    followers = {Rank(f"w{n}"): Follower(router, Rank(f"w{n}")) for n in range(num_ranks)}
    checkpoints = Checkpoints(connection, subjects, settings, "started")
    began_s = time.perf_counter()
    found = connection.submit(checkpoints.restore()).result()
    downloaded_s = time.perf_counter()
    assert found.snapshot is not None
    for rank, position in restore_fleet(router, found.snapshot).items():
        followers[rank].resume(position)
    ready_s = time.perf_counter()
    assert len(router.index) == len(filled.router.index)
    return {
        "download_s": downloaded_s - began_s,
        "restore_s": ready_s - downloaded_s,
        "ready_s": ready_s - began_s,
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "1")
