r"""A gateway that follows running engines over ZMQ and decides who gets a prompt; it sends nothing.

Run it, with the engines of the quickstart:

    echo 1 2 3 | python -m examples.follow_engines \
        a,tcp://127.0.0.1:5557,tcp://127.0.0.1:6557 b,tcp://127.0.0.1:5558,tcp://127.0.0.1:6558

Each line of its input has the token ids of a prompt. Its output has the worker and the number of
tokens that are cached there.
"""

import sys
import time

from kvplug import Rank, Router
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust

WAIT_S = 5.0


def main(engines: list[str]) -> None:
    """`engines`: NAME,EVENTS,REPLAY of each."""
    router, events, followers = Router(), EventThread(), []
    events.start()
    for engine in engines:
        name, endpoint, replay = engine.split(",")
        router.add_worker(name)
        followers.append(Follower(router, Rank(name)))
        events.follow(followers[-1], endpoint, replay=replay)
    wait_for(followers)
    try:
        for line in sys.stdin:
            # Events are applied in the thread of `events` meanwhile: a Router is thread-safe.
            decision = router.route([int(token) for token in line.split()])
            print(decision.rank, decision.cached_tokens, flush=True)
            router.finish(decision.request_id)
    finally:
        events.stop()


def wait_for(followers: list[Follower]) -> None:
    """Until past events have been replayed. An engine that has stored nothing stays blind."""
    deadline = time.monotonic() + WAIT_S
    while any(each.trust.level is Trust.BLIND or each.replay_request for each in followers):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
