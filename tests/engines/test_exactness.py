"""A short form of `make exactness`, on the kinds of models that differ most."""

import pytest

from kvplug import Router, RouterConfig
from tests.engines.engine_pool import uses
from tests.engines.line_engine import Followed
from tests.exactness import sglang
from tests.exactness.comparison import compare
from tests.exactness.engines import ROWS as VLLM_ROWS

ROWS = VLLM_ROWS | sglang.ROWS
NAMES = (
    "five windows and full attention (Gemma 3)",
    "states and full attention (LFM2)",
    "SGLang, HiCache, salts, cache resets",
)
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
