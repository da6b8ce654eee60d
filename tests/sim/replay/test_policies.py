"""Who gets a request: each policy on small cases, the router among them."""

import numpy as np
import pytest

from kvplug.errors import ConfigError
from kvplug.sim.replay.engine import CacheEvent, EngineSpec
from kvplug.sim.replay.fleet import Arrivals, replay
from kvplug.sim.replay.policies import CacheAware, make_policy
from kvplug.sim.replay.workload import BlockSource, Documents, request_of

SPECS = [EngineSpec(num_blocks=1000)] * 3
NAMES = ["kv", "kv:blocks=2", "round_robin", "random", "least_loaded", "cache_aware"]
SOURCE = BlockSource(0)


def prompt(prefix=None, num_tokens=800):
    return request_of(SOURCE, SOURCE.take(0) if prefix is None else prefix, num_tokens, 1, 16)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_makes_the_same_choices_again(name):
    recipe = Documents(num_requests=80, num_documents=6, document=600, own=(10, 60), answer=8)
    runs = [
        replay(recipe.make(1), SPECS, make_policy(name, SPECS, 5), Arrivals(clients=6)).engine
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*runs)
    assert set(runs[0].tolist()) == {0, 1, 2}


UNKNOWN = ("best", "", "kv:weight=2", "kv:blocks=", "kv:blocks=many", "random:blocks=1")
UNKNOWN += ("kv:", "kv:events=on", "kv=events=off", "kv:blocks:3", "kv:mode=", "kv:mode=best")
UNKNOWN += ("kv:block_size=3", "kv:request_weight=much", "kv:mode=random:", "kv::blocks=1")


REPLICAS = ["kv:routers=2", "kv:routers=3:sync_ms=5", "kv:routers=2:sync_ms=5:sync_loss=0.1"]


@pytest.mark.parametrize("name", [*REPLICAS, "kv:routers=2:sync_ms=5:sync_s=2"])
def test_several_routers_make_the_same_choices_again(name):
    recipe = Documents(num_requests=80, num_documents=6, document=600, own=(10, 60), answer=8)
    runs = [
        replay(recipe.make(1), SPECS, make_policy(name, SPECS, 5), Arrivals(rate=40.0)).engine
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*runs)
    assert set(runs[0].tolist()) == {0, 1, 2}


def test_one_router_of_one_decides_as_the_router():
    recipe = Documents(num_requests=80, num_documents=6, document=600, own=(10, 60), answer=8)
    runs = [
        replay(recipe.make(1), SPECS, make_policy(name, SPECS, 5), Arrivals(rate=40.0)).engine
        for name in ("kv", "kv:routers=1:sync_ms=0")
    ]
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize("name", ["kv:routers=0", "kv:routers=65", "kv:sync_ms=5", "kv:routers="])
def test_what_cannot_be_of_several_routers_is_rejected(name):
    with pytest.raises(ConfigError, match="expected"):
        make_policy(name, SPECS, 0)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_nobody_knows_is_rejected(name):
    with pytest.raises(ConfigError, match="expected"):
        make_policy(name, SPECS, 0)


def test_a_negative_weight_is_rejected():
    with pytest.raises(ConfigError, match="expected a finite number of at least 0, got -1"):
        make_policy("kv:blocks=-1", SPECS, 0)


def test_the_least_loaded_is_the_one_with_the_fewest_in_flight():
    policy = make_policy("least_loaded", SPECS, 0)
    first = [policy.choose(number, prompt(), 0.0) for number in range(3)]
    assert sorted(first) == [0, 1, 2]
    policy.on_finished(1, 1, 1.0)
    assert policy.choose(3, prompt(), 1.0) == first[1]


def test_cache_aware_goes_where_most_of_the_prefix_was_sent():
    policy = make_policy("cache_aware", SPECS, 0)
    request = prompt()
    engine = policy.choose(0, request, 0.0)
    assert all(policy.choose(n, prompt(request.blocks, 1000), 0.0) == engine for n in range(1, 9))
    little = prompt(request.blocks[:10], 800)  # a fifth of the prompt
    assert policy.choose(9, little, 0.0) != engine


def test_cache_aware_goes_by_load_when_loads_differ_too_much():
    policy = make_policy("cache_aware", SPECS, 0)
    request = prompt()
    num_most = CacheAware.BALANCE_ABS + 1
    chosen = [policy.choose(number, request, 0.0) for number in range(num_most)]
    assert set(chosen) == {chosen[0]}
    assert policy.choose(num_most, request, 0.0) != chosen[0]


def test_kv_goes_where_the_events_say_that_the_prefix_is():
    policy = make_policy("kv", SPECS, 0)
    request = prompt(num_tokens=8000)
    policy.on_cache_events(2, [CacheEvent([], request.blocks, None)], 0.0)
    assert policy.choose(0, prompt(request.blocks, 8100), 0.0) == 2


def test_kv_forgets_what_was_removed():
    policy = make_policy("kv:blocks=1", SPECS, 0)
    request = prompt(num_tokens=8000)
    stored = CacheEvent([], request.blocks, None)
    for engine in range(3):
        policy.on_cache_events(engine, [stored], 0.0)
    removed = CacheEvent(request.blocks.tolist(), SOURCE.take(0), None)
    for engine in (0, 2):
        policy.on_cache_events(engine, [removed], 1.0)
    assert policy.choose(0, prompt(request.blocks, 8100), 1.0) == 1


def test_kv_without_events_goes_where_it_sent_the_prefix():
    policy = make_policy("kv:events=off", SPECS, 0)
    request = prompt(num_tokens=8000)
    first = policy.choose(0, request, 0.0)
    policy.on_first_token(0, 1.0)
    policy.on_finished(0, 1, 1.0)
    other = (first + 1) % len(SPECS)
    policy.on_cache_events(other, [CacheEvent([], request.blocks, None)], 1.0)  # nobody listens
    assert policy.choose(1, prompt(request.blocks, 8100), 1.0) == first


@pytest.mark.parametrize(("share", "known"), [("0", 0.0), ("0.5", 200.0), ("2", 800.0)])
def test_kv_can_be_told_other_capacities(share, known):
    specs = [EngineSpec(num_blocks=400)] * 3
    policy = make_policy(f"kv:capacity={share}", specs, 0)
    sizes = [policy.router.cache_size(rank) for rank in policy.router.ranks]
    assert [size.capacity for size in sizes] == [known] * 3


def test_kv_takes_several_options():
    router = make_policy("kv:blocks=2:request_weight=3:mode=power_of_two", SPECS, 0).router
    config = router.config
    assert (config.weight, config.request_weight, config.mode) == (2, 3, "power_of_two")


@pytest.mark.parametrize("mode", ["direct", "rendezvous_hash"])
def test_kv_sends_a_session_where_it_went_before(mode):
    policy = make_policy(f"kv:mode={mode}", SPECS, 0)
    requests = [prompt() for _ in range(24)]
    for number, request in enumerate(requests):
        request.session = f"session {number % 12}"
    chosen = [policy.choose(number, request, 0.0) for number, request in enumerate(requests)]
    assert chosen[:12] == chosen[12:]
    assert set(chosen) == {0, 1, 2}


def test_kv_keeps_documents_apart_where_turns_do_not():
    recipe = Documents(num_requests=150, num_documents=9, document=1600, own=32, answer=1)
    specs = [EngineSpec(num_blocks=400)] * 3  # four documents each
    shares = {
        name: replay(recipe.make(0), specs, make_policy(name, specs, 0), Arrivals(clients=3))
        for name in ("kv", "round_robin")
    }
    kv, turns = (o.hit_tokens.sum() / o.prompt_tokens.sum() for o in shares.values())
    assert kv > turns + 0.3
