"""A short form of `make exactness`, on the kinds of models that differ most."""

import random

import pytest

from kvplug import Router, RouterConfig
from tests.engines.engine_pool import uses
from tests.engines.line_engine import Followed
from tests.exactness import sglang
from tests.exactness.comparison import NUM_TOKENS, compare
from tests.exactness.engines import ROWS as VLLM_ROWS

ROWS = VLLM_ROWS | sglang.ROWS
NAMES = (
    "five windows and full attention (Gemma 3)",
    "states and full attention (LFM2)",
    "SGLang, HiCache, salts, cache resets",
)
REPORTING = ROWS["full attention, full reports"].recipe("reporting")
RECIPES = {name: ROWS[name].recipe(name) for name in NAMES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=uses(RECIPES[name])) for name in NAMES])
def test_what_is_promised_is_what_the_engine_reuses(engine_pool, listener, name):
    router = Router(RouterConfig(speculative_ttl_s=0.0))
    engine = engine_pool.get(RECIPES[name])
    router.add_worker(engine.name)
    followed = Followed(engine, router, listener)
    tally = compare(followed, 60, ROWS[name].ask)
    assert tally.num_cached > 0
    assert tally.differences == []
    assert (tally.num_missing, tally.num_phantoms) == (0, 0)
    assert followed.follower.trust.reason is None


@uses(REPORTING)
def test_clients_that_ask_for_reports_leave_no_blocks_behind(engine_pool, listener):
    router = Router(RouterConfig(speculative_ttl_s=0.0))
    router.add_worker(REPORTING.name)
    followed = Followed(engine_pool.get(REPORTING), router, listener)
    rnd = random.Random(0)
    wanted, *others = ([rnd.randrange(3, NUM_TOKENS) for _ in range(300)] for _ in range(25))
    for _ in range(3):
        followed.engine.ask(wanted, extra_args={"kv_cache_report_mode": "full"})
    assert followed.predicted(wanted) > 0
    for other in others:  # more than the cache holds
        followed.check_prediction(other)
    assert followed.check_prediction(wanted) == 0
    assert set(followed.apart_by_group().values()) == {(0, 0)}
