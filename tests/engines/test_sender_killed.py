"""The process that publishes real vLLM's events, stopped and killed: vLLM goes on, and what the
router then knows is right.
"""

import os
import random
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.engines.engine_pool import uses
from tests.engines.following import following
from tests.engines.plugged_vllm import plugged_vllm
from tests.plugins.stock_client import wait_until

SERVED = plugged_vllm("sender-killed")


def sender_of(engine):
    """The process that publishes its events; None while there is none."""
    for pid in engine.process.members():
        with suppress(OSError):  # it has just ended
            if b"kvplug.engines.sender\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def prompts(rnd, number):
    return [[rnd.randrange(10, 4000) for _ in range(200)] for _ in range(number)]


def is_exact(followed, engine):
    [follower] = followed.followers
    held = set(engine.ask_oracle()["blocks"])
    return followed.blocks() == held and follower.trust.reason is None


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@uses(SERVED)
def test_a_sender_that_is_stopped_and_goes_on_has_lost_nothing(engine):
    rnd = random.Random(1)
    with following(engine) as followed:
        engine.complete(prompts(rnd, 4))
        wait_until(lambda: is_exact(followed, engine), "the router has caught up")
        with stopped(sender_of(engine)):
            for _ in range(20):
                engine.complete(prompts(rnd, 4))
        wait_until(lambda: is_exact(followed, engine), "the router has caught up again")


@uses(SERVED)
def test_after_a_kill_nothing_wrong_is_known_and_all_is_once_the_cache_is_empty(engine):
    rnd = random.Random(2)
    with following(engine) as followed:
        [follower] = followed.followers
        engine.complete(prompts(rnd, 4))
        wait_until(lambda: is_exact(followed, engine), "the router has caught up")
        first = sender_of(engine)
        os.kill(first, signal.SIGKILL)
        for _ in range(20):
            engine.complete(prompts(rnd, 4))
        wait_until(lambda: sender_of(engine) not in (None, first), "another sender starts")
        wait_until(lambda: "sender_lost" in (follower.trust.reason or ""), "the loss is known")
        engine.complete(prompts(rnd, 4))
        wait_until(
            lambda: followed.blocks() <= set(engine.ask_oracle()["blocks"]),
            "what the router knows is there",
        )
        wait_until(engine.reset_prefix_cache, "the cache is empty")
        engine.complete(prompts(rnd, 4))
        wait_until(lambda: is_exact(followed, engine), "the router is exact")
    assert engine.log().count("the process that sends KV events ended (status -9)") == 1
