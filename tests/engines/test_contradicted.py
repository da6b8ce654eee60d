"""A real hybrid model, one group of which the router does not hear of: what it promises too much is
found by the answers, named, and counts no more.
"""

import itertools
import random

import msgspec

from kvplug import Rank, Router, RouterConfig
from kvplug.audit.audit import Audit, Usage
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from kvplug.server.diagnosis.checks import check_all
from kvplug.server.diagnosis.finding import Code
from kvplug.server.diagnosis.view import StreamView, WorkerView
from tests.engines.engine_pool import uses
from tests.exactness.comparison import prompts
from tests.exactness.engines import ROWS
from tests.plugins.stock_client import wait_until

RECIPE = ROWS["a window and full attention (Gemma 3)"].recipe("hidden")
HIDDEN_GROUP, MAX_REQUESTS = 0, 50  # that with the window

pytestmark = uses(RECIPE)


class Hiding(Follower):
    """Events of one group never arrive."""

    def receive(self, messages):
        super().receive([self._without(message) for message in messages])

    def _without(self, message):
        ts, events, *rest = msgspec.msgpack.decode(message.payload)
        others = [event for event in events if event.get("group_idx", 0) != HIDDEN_GROUP]
        payload = msgspec.msgpack.encode([ts, others, *rest])
        return msgspec.structs.replace(message, payload=payload)


def test_a_group_that_is_hidden_from_the_router_is_found_within_50_requests(engine_pool, listener):
    engine, clock = engine_pool.get(RECIPE), itertools.count()
    # Each look at the clock is a second: answers are judged at once.
    router = Router(RouterConfig(speculative_ttl_s=0.0), clock=lambda: float(next(clock)))
    router.add_worker(engine.name)
    rank, audit = Rank(engine.name), Audit(router)
    follower = Hiding(router, rank, evidence=audit.evidence_of(rank))
    listener.follow(follower, f"tcp://127.0.0.1:{engine.port}")
    wait_until(lambda: follower.connected, "the event stream is connected")
    num_requests = ask_until_contradicted(engine, router, audit, follower)
    assert num_requests <= MAX_REQUESTS
    wait_until(lambda: follower.trust.level is Trust.STALE, "it is trusted no more")
    assert router.fleet_index.confidence_of(rank) < 1
    [finding] = findings(audit, rank, follower)
    assert finding.code is Code.CONTRADICTED
    assert "KV cache group" in finding.fix


def ask_until_contradicted(engine, router, audit, follower):
    """Returns how many requests it took."""
    rnd = random.Random(1)
    for number, prompt in zip(range(10 * MAX_REQUESTS), prompts(seed=1), strict=False):
        decision = router.route(prompt)
        router.finish(decision.request_id)
        [cached] = engine.ask(prompt, max_tokens=rnd.choice([1, 1, 1, 40]))
        audit.answered(decision.request_id, Usage(len(prompt), cached))
        last = engine.last
        arrived = lambda n=last: n < 0 or follower.sequencer.last == n  # noqa: E731
        wait_until(arrived, "every batch has arrived")
        if audit.contradicted(decision.rank):
            return number + 1
    raise AssertionError("it was never found")


def findings(audit, rank, follower):
    stream = StreamView(connected=True, incomplete=follower.trust.reason)
    ledger = audit.ledgers()[rank]
    return check_all([WorkerView(rank=rank, stream=stream, ledger=ledger, events="tcp://x")])
