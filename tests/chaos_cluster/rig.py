"""Servers, engines, three replicas and the ways between them: what a fault acts on.

In:  a kind of engine, how many servers, a folder for logs.
Out: faults by order; an Outcome, once everything has come to rest.
"""

import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.chaos_cluster.operating import Operator
from tests.chaos_cluster.replicas import Replica
from tests.chaos_cluster.sampling import Sampler, Wrong
from tests.chaos_cluster.servers import servers
from tests.chaos_cluster.tcp_proxy import TcpProxy
from tests.plugins.stock_client import wait_until

REST_LIMIT_S = 60.0
_REPLICAS = ("a", "b", "c")
_MAX_ROUNDS, _EVENTS_PER_ROUND = 80, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """repair_s: from the fault's end until every replica was equal to every engine and called it
    EXACT, None if it did not come to that; seen: (replica, engine) to sampling.Seen; wrong: the
    longest time that a wrong block was called EXACT; counters: since the fault began, of all
    replicas together.
    """

    repair_s: float | None
    seen: dict
    wrong: Wrong
    counters: dict

    @property
    def num_held(self):
        return max((each.num_held for each in self.seen.values()), default=0)

    @property
    def num_apart(self):
        return sum(each.num_apart for each in self.seen.values())


class Rig:
    """A context manager; servers, engines, replicas (by name), operator; see scenarios.py."""

    def __init__(self, kind, folder, *, num_nodes=1, has_small_disk=False, num_engines=2, seed=1):
        self._kind, self.folder, self.seed = kind, folder, seed
        self._num_nodes, self._has_small_disk = num_nodes, has_small_disk
        self._num_engines = num_engines

    def __enter__(self):
        with ExitStack() as started:
            self._stack = started
            self.servers = started.enter_context(
                servers(self._num_nodes, has_small_disk=self._has_small_disk)
            )
            self.operator = Operator([node.url for node in self.servers.nodes])
            names = [f"e{number}" for number in range(self._num_engines)]
            self.engines = {name: self.new_engine(name) for name in names}
            self.speaking = dict(self.engines)  # by name, if it has a namesake
            self.replicas = {name: self._new_replica(name) for name in _REPLICAS}
            self._start_all()
            self._sampler = started.enter_context(
                Sampler(lambda: list(self.speaking.values()), list(self.replicas.values()))
            )
            self._stack = started.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _start_all(self):
        first, *others = self.replicas.values()
        for each in (*self.engines.values(), first):
            each.start()
        first.wait_ready()  # it compiles kernels, if need be, for the others, too
        for each in others:
            each.start()
        for each in (*self.engines.values(), *others):
            each.wait_ready()

    def ways(self):
        """A proxy before each server."""
        nodes = self.servers.nodes
        return [self._stack.enter_context(TcpProxy(node.port)) for node in nodes]

    def new_engine(self, name, *, url=None, seed=None):
        ways = self.ways()
        more = {} if url is None else {"url": url}
        seed = self.seed + len(name) + ord(name[-1]) if seed is None else seed
        engine = self._kind(name, self.folder, [way.url for way in ways], seed=seed, **more)
        engine.ways = ways
        self._stack.callback(engine.stop)
        return engine

    def _new_replica(self, name):
        urls = [each.url for each in self.engines.values()]
        replica = Replica(
            name,
            self.folder,
            self.ways(),
            urls,
            self._kind.block_size,
            num_copies=min(self._num_nodes, 3),
        )
        self._stack.callback(replica.stop)
        return replica

    # -- what a fault is made of --

    def begin_exact(self):
        """Wait until every replica trusts what it knows of every engine; then engines work on."""
        for each in self.speaking.values():
            each.work(20)
        wait_until(self._is_at_rest, "all replicas are exact", timeout_s=REST_LIMIT_S)
        self._sampler.begin_anew()
        self._counted_before = self._counted()
        for each in self.speaking.values():
            each.begin_work()

    def last(self, seconds):
        """The fault lasts so long, with engines at work."""
        threading.Event().wait(seconds)

    def work(self, num_events):
        """As fast as can be, besides what the engines do."""
        for each in self.speaking.values():
            each.work(num_events)

    @contextmanager
    def at_work(self, num_events):
        """Inside, the engines publish as fast as they can."""
        working = threading.Thread(target=self.work, args=(num_events,))
        working.start()
        yield
        working.join()

    def await_replica(self, condition, what):
        """Work until the condition holds for one of them."""
        for _ in range(_MAX_ROUNDS):
            for each in self.replicas.values():
                if condition(each):
                    return each
            self.work(_EVENTS_PER_ROUND)
            self.last(0.5)
        raise AssertionError(f"waited in vain until {what}")

    def restart(self, replica):
        replica.kill()
        replica.start()
        replica.wait_ready()

    # -- how it ends --

    def settle(self):
        """The fault is over: end the work, wait for rest; what came of it."""
        for each in self.speaking.values():
            each.end_work()
        began_s = time.monotonic()
        repair_s = None
        while repair_s is None and time.monotonic() - began_s < REST_LIMIT_S:
            self._sampler.next_samples(1)
            if self._is_at_rest():
                repair_s = time.monotonic() - began_s
        self._sampler.next_samples()
        for each in self.replicas.values():
            each.check()
        return self._outcome(repair_s)

    def _is_at_rest(self):
        seen = self._sampler.seen
        is_all = len(seen) == len(self.replicas) * len(self.speaking)
        return is_all and all(each.is_right for each in seen.values())

    def _outcome(self, repair_s):
        counted = self._counted()
        return Outcome(
            repair_s=repair_s,
            seen=dict(self._sampler.seen),
            wrong=self._sampler.longest,
            counters={name: counted[name] - self._counted_before[name] for name in counted},
        )

    def _counted(self):
        return sum((each.counters for each in self.replicas.values()), Counter())
