"""A hybrid model whose engine publishes full attention alone: a prefix counts where one ended."""

import pytest

from kvplug import Rank, Router, RouterConfig
from kvplug.events import AllBlocksCleared, BlockRemoved, Tier
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import Trust
from tests.ingest.publisher import message, stored

RANK = Rank("w")
TOKENS = range(1, 100)
LONG = 61  # tokens: 15 full blocks and one more


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=4, speculative_ttl_s=0.0))
    router.add_worker("w")
    return router


@pytest.fixture
def follower(router):
    follower = Follower(router, RANK)
    follower.hides_states = True
    follower.on_connected()
    return follower


def cached(router, num_tokens=LONG):
    decision = router.route(TOKENS[:num_tokens])
    router.finish(decision.request_id)
    return decision.cached_tokens


def test_a_prefix_counts_if_it_is_all_that_was_stored(router, follower):
    follower.receive([message(0, stored(1, 5))])
    assert cached(router) == cached(router, 21) == 20
    assert cached(router, 20) == 0, "its last token is computed in any case"
    assert cached(router, 17) == 0
    assert len(router.index) == 5


def test_an_end_that_is_continued_counts_no_more(router, follower):
    follower.receive([message(0, stored(1, 5))])
    follower.receive([message(1, stored(21, 2, parent=1004))])
    assert (cached(router), cached(router, 25)) == (28, 0)


def test_what_is_removed_counts_no_more(router, follower):
    follower.receive([message(0, stored(1, 5))])
    follower.receive([message(1, BlockRemoved(block_hashes=(1004, 1003)))])
    assert (cached(router), len(router.index)) == (0, 3)
    follower.receive([message(2, stored(17, 1, parent=1003))])
    assert follower.skipped["unknown_parent"] == 1
    assert cached(router) == 0


def test_removals_elsewhere_change_nothing(router, follower):
    follower.receive([message(0, stored(1, 5), stored(1, 5, tier=Tier.HOST))])
    follower.receive([message(1, BlockRemoved(block_hashes=(1004,), tier=Tier.HOST))])
    assert cached(router) == 20
    assert follower.skipped == {}


def test_a_cache_that_is_emptied_has_no_ends(router, follower):
    follower.receive([message(0, stored(1, 5))])
    follower.receive([message(1, AllBlocksCleared()), message(2, stored(1, 5))])
    assert cached(router) == 20


def test_it_is_stale_and_says_why(follower):
    follower.receive([message(0, stored(1, 5))])
    assert follower.trust.level is Trust.STALE
    assert "windows or states" in follower.trust.reason


def test_a_worker_that_turns_out_to_have_windows_starts_over(router):
    follower = Follower(router, RANK)
    follower.can_replay = True
    follower.on_connected()
    follower.replayed([message(0, stored(1, 5))])
    follower.replay_ended()
    assert cached(router, 17) == 16
    follower.hides_states = True
    assert (cached(router, 17), follower.replay_request.first) == (0, 0)
    follower.replayed([message(0, stored(1, 5))])
    follower.replay_ended()
    assert (cached(router, 17), cached(router)) == (0, 20)
    follower.hides_states = True  # as before
    assert cached(router) == 20
