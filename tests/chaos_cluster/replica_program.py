"""A router replica that shows what it knows, as a program.

usage: python -m tests.chaos_cluster.replica_program SOCKET [flags of python -m kvplug.router]

In:  the router's flags; a unix socket for questions.
Out: the standalone router. To "look": of each rank, how far it is trusted and the ids of the blocks
that the index has of it. To "counters": what its follower has counted. To "check": the indexes have
checked themselves.
"""

import asyncio
import os
import sys
from pathlib import Path

from kvplug import Rank
from kvplug.http_service import stopped_by_signals
from kvplug.server.cli import parse
from kvplug.server.observability import request_log
from kvplug.server.service import RouterService
from tests.chaos.asking import answer_in_background

_COUNTED = ("num_missed", "num_duplicates", "num_restarts", "num_replays", "num_failures")


class Shown:
    """answer, from another thread."""

    def __init__(self, service):
        self._fleet, self._router = service.fleet, service.router

    def answer(self, question):
        return {"look": self._look, "counters": self._counters, "check": self._check}[question]()

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
        }

    def _counters(self):
        return {
            name: {each: getattr(follower.sequencer, each, 0) for each in _COUNTED}
            for name, _, follower in self._followers()
        }

    def _check(self):
        with self._router.locked():
            for worker in self._fleet.workers.values():
                self._router.fleet_index.group_of(Rank(worker.name)).index.check()
        return True


async def serve(config, socket):
    stopping = stopped_by_signals()
    async with RouterService(config) as service:
        answer_in_background(socket, Shown(service).answer)
        await stopping.wait()


def main():
    socket, *flags = sys.argv[1:]
    config, log_level = parse(flags, environ=os.environ)
    request_log.configure(config.log_format, log_level, logs_requests=False)
    asyncio.run(serve(config, Path(socket)))


if __name__ == "__main__":
    main()
