"""Many rounds of snapshots by three replicas, of which the one at work dies or stops at each step.

In:  how many messages, at which rate, the threshold of a snapshot.
Out: what was seen; AssertionError if the stream grew beyond bounds, a replica missed a message, the
manifest rose twice in a round or fell, or objects were left over.

A replica that stops goes on when its lease is long over, one that dies is started again. In the end
all are killed, and another one begins alone.

usage: python -m tests.cluster.rounds --messages 100000 --rate 2000 --threshold 10000
"""

import argparse
import asyncio
import itertools
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import nats.errors

from kvplug.cluster.manifest import ManifestKey
from kvplug.cluster.objects import SnapshotObjects
from kvplug.errors import TransportError
from kvplug.nats.subjects import PublisherName
from tests.cluster.rounds_replica import LEASE_TTL_S, NUMBER
from tests.cluster.snapshots import a_fleet, frozen
from tests.nats_servers import nats_servers
from tests.waiting import until

ROOT = Path(__file__).parents[2]
NUM_PUBLISHERS = 4
_PAUSE_S = LEASE_TTL_S + 0.5


class Process:
    """A replica; `said` is what it said last. It is started again when it has died."""

    def __init__(self, *arguments):
        self._arguments, self.faults, self.num_missed = arguments, [], 0
        self._stopped_at_s = None
        self.start()

    def start(self):
        self.said, self._has_fault = None, False
        command = [sys.executable, "-m", "tests.cluster.rounds_replica", *self._arguments]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            said = msgspec.json.decode(line)
            if "fault" in said:
                self.faults.append(tuple(said["fault"]))
            self.num_missed = max(self.num_missed, said["missed"])
            self.said = said

    def tend(self):
        """Start it again if it has died, let it go on if it has stopped for long."""
        if self._process.poll() is not None:
            assert self._process.returncode == -signal.SIGKILL, "a replica failed"
            self._reader.join()
            self._process.stdout.close()
            self.start()
        elif not self._is_stopped():
            self._stopped_at_s = None
        elif self._stopped_at_s is None:
            self._stopped_at_s = time.monotonic()
        elif time.monotonic() - self._stopped_at_s > _PAUSE_S:
            self._process.send_signal(signal.SIGCONT)

    def _is_stopped(self):
        try:
            status = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()


@dataclass
class Seen:
    """Of a run: manifests in their order; the longest stream; faults by kind and step."""

    num_messages: int
    rate: float = 0.0
    manifests: list = field(default_factory=list)
    max_stream: int = 0
    faults: list = field(default_factory=list)
    num_missed: int = 0
    num_objects: int = 0
    alone_after_s: float = 0.0

    def __str__(self):
        rises = [b.seq - a.seq for a, b in itertools.pairwise(self.manifests)]
        return (
            f"{self.num_messages} messages at {self.rate:.0f}/s: {len(self.manifests)} snapshots, "
            f"{min(rises, default=0)} to {max(rises, default=0)} messages apart; "
            f"stream of at most {self.max_stream} messages; {len(self.faults)} faults "
            f"({len(set(self.faults))} kinds); {self.num_missed} messages missed; "
            f"{self.num_objects} object left; a replica alone had all after "
            f"{self.alone_after_s:.1f} s"
        )


class Run:
    def __init__(self, fleet, seen):
        self._fleet, self._seen = fleet, seen
        self._sent = [0] * NUM_PUBLISHERS

    async def publish(self, num_messages, rate):
        """At this rate, in parts; the last one's stream sequence."""
        began_s, sent, ack = time.monotonic(), 0, None
        while sent < num_messages:
            due = min(num_messages, int(rate * (time.monotonic() - began_s)) + 1)
            acks = [self._fleet.js.publish(*self._next(n), timeout=60) for n in range(sent, due)]
            for ack in await asyncio.gather(*acks):  # noqa: B007 - the last one is returned
                pass
            sent = due
            await asyncio.sleep(0.02)
        self._seen.rate = num_messages / (time.monotonic() - began_s)
        return ack.seq

    def _next(self, number):
        publisher = number % NUM_PUBLISHERS
        payload = NUMBER.pack(publisher, self._sent[publisher])
        self._sent[publisher] += 1
        return self._fleet.subjects.events(PublisherName("w", publisher)), payload

    async def watch(self, client):
        """The manifest and the length of the stream, as they change."""
        keys = ManifestKey(client, self._fleet.subjects.state_bucket)
        while True:
            with suppress(TransportError, nats.errors.Error):
                await self._look(keys)
            await asyncio.sleep(0.02)

    async def _look(self, keys):
        state = (await self._fleet.js.stream_info(self._fleet.subjects.stream)).state
        manifest = (await keys.read()).manifest
        if manifest is not None and manifest not in self._seen.manifests:
            self._seen.manifests.append(manifest)
        # The stream was looked at first: it may have been purged for a newer manifest since.
        assert state.first_seq <= (manifest.seq if manifest else 0) + 1
        self._seen.max_stream = max(self._seen.max_stream, state.messages)


async def tend(processes):
    while True:
        for process in processes:
            process.tend()
        await asyncio.sleep(0.05)


async def run(server, name, num_messages, rate, threshold):
    seen = Seen(num_messages)
    async with a_fleet(server.url, name) as fleet:
        client, this = await fleet.client(), Run(fleet, seen)
        words = server.url, name
        processes = [Process(*words, each, str(threshold)) for each in "abc"]
        tending = asyncio.create_task(tend(processes))
        watching = fleet.connection.submit(this.watch(client))
        try:
            last = await fleet.run(this.publish(num_messages, rate))
            await until(
                lambda: tending.done() or all(has(each, last, num_messages) for each in processes),
                "every replica has every message",
                timeout_s=60,
            )
            assert not tending.done(), tending.exception()
        finally:
            tending.cancel()
            for process in processes:
                process.kill()
        began_s = time.monotonic()
        alone = Process(*words, "d", str(2**40))
        try:
            await until(lambda: has(alone, last, num_messages), "one alone has all", timeout_s=60)
            seen.alone_after_s = time.monotonic() - began_s
        finally:
            alone.kill()
        assert not watching.done(), watching.exception()
        watching.cancel()
        await finish(fleet, client, seen)
        seen.faults = [fault for process in processes for fault in process.faults]
        seen.num_missed = sum(process.num_missed for process in [*processes, alone])
    check(seen, threshold, rate)
    return seen


def has(process, last, num_messages):
    said = process.said
    return said and said["seq"] == last and sum(said["next"].values()) == num_messages


async def finish(fleet, client, seen):
    """One more snapshot, without a fault, after which nothing is left over."""
    checkpoints = fleet.checkpoints("last", live_s=0.0)
    await fleet.run(checkpoints.restore())
    await fleet.run(checkpoints._make(client, frozen(await fleet.publish(1))))
    objects = SnapshotObjects(client, fleet.subjects.snapshot_bucket)
    seen.num_objects = len(await fleet.run(objects.names()))


def check(seen, threshold, rate):
    seqs = [0, *(manifest.seq for manifest in seen.manifests)]
    rises = [after - before for before, after in itertools.pairwise(seqs)]
    assert all(rise > threshold for rise in rises), f"two snapshots in a round: {rises}"
    assert seen.num_missed == 0, f"{seen.num_missed} messages missed"
    assert seen.num_objects == 1, f"{seen.num_objects} objects are left"
    # A maker that dies in front of its purge leaves a round more; then it takes two leases.
    most = 3 * threshold + 6 * LEASE_TTL_S * rate
    assert seen.max_stream <= most, f"a stream of {seen.max_stream} messages"
    assert len(rises) >= seen.num_messages / most, f"only {len(rises)} snapshots"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--threshold", type=int, default=10_000)
    arguments = parser.parse_args()
    with nats_servers() as (server,):
        seen = asyncio.run(
            run(server, "rounds", arguments.messages, arguments.rate, arguments.threshold)
        )
    sys.stdout.write(f"{seen}\n")


if __name__ == "__main__":
    main()
