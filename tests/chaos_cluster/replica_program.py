"""A router replica that shows what it knows, as a program.

usage: python -m tests.chaos_cluster.replica_program SOCKET [flags of python -m kvplug.router]

In:  the router's flags; a unix socket for questions.
Out: the standalone router. To "look": of each rank, how far it is trusted, the ids of the blocks
that the index has of it, and what its follower has counted. To "check": the indexes have checked
themselves. To ["at", STEP, SIGNAL]: at this step of its next snapshot (kvplug/cluster/
checkpoints.py) it sends itself the signal.
"""

import asyncio
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from kvplug import Rank
from kvplug.http_service import stopped_by_signals
from kvplug.server.cli import parse
from kvplug.server.compilation import compile_kernels
from kvplug.server.observability import request_log
from kvplug.server.service import RouterService
from tests.chaos.asking import answer_in_background
from tests.waiting import until

SNAPSHOT_THRESHOLD, SNAPSHOT_PAUSE_S = 300, 2.0
_COUNTED = ("num_missed", "num_duplicates", "num_restarts", "num_replays", "num_failures")


class Shown:
    """answer, from another thread."""

    def __init__(self, service):
        self._fleet, self._router = service.fleet, service.router
        self._cluster = service.cluster
        self._armed = None, signal.SIGCONT

    def answer(self, question):
        if isinstance(question, list):
            self._armed = question[1], signal.Signals(question[2])
            return True
        return {"look": self._look, "check": self._check}[question]()

    async def hasten_snapshots(self):
        """Once they can be made: hooked, without a pause between two, and however few bytes they
        are of.
        """
        replica = self._cluster.replica
        checkpoints = await until(lambda: replica._checkpoints, "NATS is there", timeout_s=math.inf)
        checkpoints._on_step = self._on_step
        checkpoints._is_long = lambda _state, num_unsaved, _size: num_unsaved > SNAPSHOT_THRESHOLD
        checkpoints._settings = replace(checkpoints._settings, min_interval_s=SNAPSHOT_PAUSE_S)

    async def _on_step(self, step):
        if step == self._armed[0]:
            number, self._armed = self._armed[1], (None, signal.SIGCONT)
            os.kill(os.getpid(), number)

    def _followers(self):
        return [
            (f"{worker.name}/{number}", Rank(worker.name, number), follower)
            for worker in self._fleet.workers.values()
            for number, follower in sorted(worker.followers.items())
        ]

    def _look(self):
        return {name: self._look_at(rank, each) for name, rank, each in self._followers()}

    def _look_at(self, rank, follower):
        with self._router.locked():
            index = self._router.fleet_index.group_of(rank).index
            blocks = [int(name) for name in index.engine_hashes_of(rank)]
        trust = follower.trust
        return {
            "level": trust.level,
            "reason": trust.reason,
            "fix": trust.fix,
            "blocks": blocks,
            "counters": {
                "num_messages": follower.num_messages,
                **{each: getattr(follower.sequencer, each, 0) for each in _COUNTED},
            },
        }

    def _check(self):
        with self._router.locked():
            for worker in self._fleet.workers.values():
                self._router.fleet_index.group_of(Rank(worker.name)).index.check()
        return True


async def serve(config, socket):
    stopping = stopped_by_signals()
    async with RouterService(config) as service:
        shown = Shown(service)
        answer_in_background(socket, shown.answer)
        hastening = asyncio.create_task(shown.hasten_snapshots())
        await stopping.wait()
        hastening.cancel()


def main():
    socket, *flags = sys.argv[1:]
    config, log_level = parse(flags, environ=os.environ)
    request_log.configure(config.log_format, log_level, logs_requests=False)
    compile_kernels()  # as the router does it
    asyncio.run(serve(config, Path(socket)))


if __name__ == "__main__":
    main()
