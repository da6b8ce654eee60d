"""One engine, the proxy, and a router that follows: what a scenario acts on.

In:  an engine that serves, a folder for logs and sockets, a seed.
Out: faults and work by order; an Outcome, once everything has come to rest.
"""

import http.client
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from tests.chaos.engines import BLOCK_SIZE
from tests.chaos.faults import FaultPlan, Odds
from tests.chaos.proxy import EventProxy
from tests.chaos.router_process import RouterProcess
from tests.chaos.workload import Workload
from tests.plugins.stock_client import wait_until

REST_LIMIT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was done to the messages, what became of the index, and how long repairs took.

    repairs_s: per time that trust was lost, how long until it was won back, without the time for
    which there was no connection; after_fault_s: from the fault's end until every message was known
    and trusted, the next request included; None where the fault has no end of its own.
    """

    num_messages: int
    counts: dict
    num_held: int
    only_in_engine: int
    only_in_index: int
    level: str
    reason: str | None
    fix: str | None
    repairs_s: tuple
    after_fault_s: float | None


class Rig:
    """A context manager: inside, the router has followed the engine up to now."""

    def __init__(self, engine, folder, seed, *, hides_restarts=False, has_replay=True):
        self.engine = engine
        self.proxy = EventProxy(engine.events_endpoint, hides_restarts=hides_restarts)
        self._replay = engine.replay_endpoint if has_replay else None
        self._folder, self.seed = folder, seed
        self.workload = Workload(engine, seed)
        self._num_episodes_before = 0
        self._repairs_s = []  # of routers that were killed
        self._healed_at = None

    def __enter__(self):
        with ExitStack() as started:
            started.enter_context(self.proxy)
            wait_until(lambda: self.proxy.is_upstream_connected, "the proxy hears the engine")
            self.router = started.enter_context(
                RouterProcess(self.proxy.endpoint, self._replay, BLOCK_SIZE, self._folder)
            )
            wait_until(lambda: self.proxy.has_subscriber, "the router subscribes")
            self._started = started.pop_all()
        return self

    def __exit__(self, *_):
        self._started.close()

    def begin_exact(self):
        """Wait until the router trusts its index, whatever it needs to hear for that."""
        self.workload.tick()
        last = self.engine.held().last
        wait_until(lambda: self._is_exact_at(last), "the router has caught up", timeout_s=90)
        self._num_episodes_before = len(self.router.state()["episodes"])

    def inject(self, **odds):
        self.proxy.inject(FaultPlan(Odds(**odds), self.seed))

    def heal(self):
        self.proxy.heal()
        self._healed_at = time.monotonic()

    def work(self, num_messages):
        """Rounds of the workload until the engine has published as many messages."""
        end = self.proxy.num_seen + num_messages
        while self.proxy.num_seen < end:
            self.workload.round()

    def tick(self, num_messages):
        """Short requests, until the engine has published as many messages."""
        end = self.proxy.num_seen + num_messages
        while self.proxy.num_seen < end:
            self.workload.tick()

    def kill_router(self):
        """SIGKILL; its successor is a late joiner."""
        self._repairs_s += self._repairs_of(self.router.state())
        self.router.kill_and_restart()
        self._num_episodes_before = 0

    def kill_engine(self):
        """SIGKILL in the middle of its work, and a new incarnation on the same ports."""
        with self._working():
            seen = self.proxy.num_seen
            wait_until(lambda: self.proxy.num_seen >= seen + 5, "it is at work")
            self.engine.process.kill()
            wait_until(lambda: not self.proxy.is_upstream_connected, "its events have ended")
        self.engine.start()
        self.engine.wait_ready()
        wait_until(lambda: self.proxy.is_upstream_connected, "the proxy hears the new engine")

    @contextmanager
    def _working(self):
        def work_until_it_dies():
            with suppress(OSError, http.client.HTTPException):
                while True:
                    self.workload.round()

        thread = threading.Thread(target=work_until_it_dies)
        thread.start()
        yield
        thread.join()

    def settle_exact(self):
        """Wait until the router has every batch and trusts its index; says what came of it."""
        held = self.engine.held()
        with suppress(AssertionError):  # the outcome tells
            wait_until(lambda: self._is_exact_at(held.last), "exact", timeout_s=REST_LIMIT_S)
        return self.outcome()

    def settle_cleared(self):
        """Wait until the router has every batch and has named a fix."""
        held = self.engine.held()
        with suppress(AssertionError):
            wait_until(lambda: self._has_given_up_at(held.last), "a fix", timeout_s=REST_LIMIT_S)
        return self.outcome()

    def _is_exact_at(self, last):
        state = self.router.state()
        return state["level"] == "exact" and state["last"] == last

    def _has_given_up_at(self, last):
        state = self.router.state()
        is_named = state["level"] == "stale" and state["reason"] and state["fix"]
        return is_named and state["last"] == last

    def outcome(self):
        """How it stands now."""
        held = self.engine.held()
        state, in_index = self.router.state(), self.router.blocks()
        settled_at = max((won_at for _, won_at, _ in state["episodes"]), default=0.0)
        settled_at = max(settled_at, state["moved_at"])
        return Outcome(
            num_messages=self.proxy.num_seen,
            counts=dict(self.proxy.counts),
            num_held=len(held.blocks),
            only_in_engine=len(held.blocks - in_index),
            only_in_index=len(in_index - held.blocks),
            level=state["level"],
            reason=state["reason"],
            fix=state["fix"],
            repairs_s=(*self._repairs_s, *self._repairs_of(state)),
            after_fault_s=None if self._healed_at is None else settled_at - self._healed_at,
        )

    def _repairs_of(self, state):
        episodes = state["episodes"][self._num_episodes_before :]
        return [self._repair_s(*episode) for episode in episodes]

    def _repair_s(self, lost_at, won_at, _why):
        opened_at = max((at for at in self.proxy.restored_at if at <= won_at), default=lost_at)
        return won_at - max(lost_at, opened_at)
