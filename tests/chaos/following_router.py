"""A router that follows one engine, as a program: python -m tests.chaos.following_router.

In:  where the events are, where replays are, the block size, a unix socket for questions.
Out: "state": how far it is and what it trusts; "blocks": the engine's ids of the blocks that its
index has, once the index has checked itself.
"""

import argparse
import logging
import threading
import time
from pathlib import Path

from kvplug import Rank, Router, RouterConfig
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from tests.chaos.asking import answer_in_background

RANK = Rank("engine")
_SAMPLE_S = 0.001


class FollowingRouter:
    """start, then answer."""

    def __init__(self, block_size):
        self._router = Router(RouterConfig(block_size=block_size))
        self._router.add_worker(RANK.worker)
        self._follower = Follower(self._router, RANK)
        self._listener = EventThread()
        self._episodes = []  # [when trust was lost, when it was won back, why it was lost]
        self._lost = time.monotonic(), "not connected yet"
        self._last, self._moved_at = None, 0.0
        self._looking = threading.Lock()

    def start(self, events, replay):
        self._listener.start()
        self._listener.follow(self._follower, events, replay=replay)
        threading.Thread(target=self._watch_trust, daemon=True).start()

    def _watch_trust(self):
        pause = threading.Event()
        while not pause.wait(_SAMPLE_S):
            self._look()

    def _look(self):
        with self._looking:
            now, trust, last = time.monotonic(), self._follower.trust, self._follower.sequencer.last
            if last != self._last:
                self._last, self._moved_at = last, now
            is_exact = trust.level is Trust.EXACT
            if is_exact and self._lost is not None:
                self._episodes.append((self._lost[0], now, self._lost[1]))
                self._lost = None
            elif not is_exact and self._lost is None:
                self._lost = now, trust.reason

    def answer(self, question):
        return {"state": self._state, "blocks": self._blocks}[question]()

    def _state(self):
        self._look()
        trust, follower = self._follower.trust, self._follower
        return {
            "level": trust.level,
            "reason": trust.reason,
            "fix": trust.fix,
            "last": follower.sequencer.last,
            "num_messages": follower.num_messages,
            "skipped": dict(follower.skipped),
            "episodes": list(self._episodes),
            "moved_at": self._moved_at,
        }

    def _blocks(self):
        with self._router._lock:  # or an event that comes meanwhile would look like damage
            self._router.index.check()
            return [int(name) for name in self._router.index.engine_hashes_of(RANK)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", required=True)
    parser.add_argument("--replay")
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    router = FollowingRouter(arguments.block_size)
    router.start(arguments.events, arguments.replay)
    answer_in_background(arguments.socket, router.answer)
    threading.Event().wait()


if __name__ == "__main__":
    main()
