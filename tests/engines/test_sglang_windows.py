"""A real SGLang with windows, of which its events say nothing: nothing is promised that it has not,
and a standalone router learns of them from the engine.
"""

from kvplug import Router, RouterConfig
from kvplug.ingest.trust import HIDDEN_STATES
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.service import RouterService
from tests.engines.engine_pool import uses
from tests.engines.line_engine import Followed
from tests.exactness.comparison import compare
from tests.exactness.sglang import ROWS
from tests.waiting import until

ROW = ROWS["SGLang, a window and full attention (Mellum)"]

pytestmark = uses(ROW.recipe("windows"))


def test_nothing_is_promised_that_it_has_not(engine, listener):
    router = Router(RouterConfig(speculative_ttl_s=0.0))
    router.add_worker(engine.name)
    followed = Followed(engine, router, listener, hides_states=True)
    tally = compare(followed, 60, ROW.ask)
    assert (tally.num_over, tally.num_missing, tally.num_phantoms) == (0, 0, 0)
    assert tally.num_cached > 0
    assert tally.num_under < tally.num_requests / 2
    assert followed.follower.trust is HIDDEN_STATES


async def test_a_router_learns_of_them_from_the_engine(engine):
    config = ServerConfig(workers=(WorkerSpec(url=engine.server.url),), port=0)
    async with RouterService(config) as service:
        [worker] = service.fleet.workers.values()
        await until(lambda: worker.is_up, "the engine is up")
        [follower] = worker.followers.values()
        assert follower.hides_states
        await until(lambda: follower.trust is HIDDEN_STATES, "it is stale")
