"""Blocks of answers in the load, and their decay as an answer nears its end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import Rank, Router, RouterConfig
from kvplug.errors import ConfigError
from kvplug.kernels import costing

A, B = list(range(128)), [*range(96), *range(1000, 1032)]


def make_router(**settings):
    router = Router(RouterConfig(block_size=16, speculative_ttl_s=0.0, **settings))
    for worker in ("a", "b"):
        router.add_worker(worker)
    return router


def num_active(router, number=0):
    return router.load.ranks[number, costing.ACTIVE_BLOCKS]


def test_the_blocks_in_use_are_those_of_dynamo():
    router, seen = make_router(), []

    def see(done):
        assert done
        seen.append(num_active(router))

    see(router.route(A, request_id="a", workers=["a"]))
    see(router.route(B, request_id="b", workers=["a"]))  # shares 6 of its 8 blocks
    see(router.first_token("a"))
    see(router.add_output_block("a"))
    see(router.add_output_block("a", 0.5))
    see(router.finish("b"))
    see(router.add_output_block("a", decay_fraction=0.25))
    assert seen == [8, 10, 10, 11, 10, 8, 3]
    router.finish("a")
    assert num_active(router) == 0


def test_a_block_without_a_fraction_counts_1():
    router = make_router()
    router.route(A, request_id="a", workers=["a"])
    router.add_output_block("a", 0.0)
    assert num_active(router) == 0
    router.add_output_block("a")
    assert num_active(router) == 1
    router.route(B, workers=["a"], request_id="b")
    assert num_active(router) == 3


@pytest.mark.parametrize("settings", [{}, {"cost": "blocks"}])
def test_both_costs_count_blocks_of_answers(settings):
    router = make_router(**settings)
    for worker in ("a", "b"):
        router.set_cache_capacity(Rank(worker), 20)
    router.route(A, request_id="a", workers=["a"])
    router.route(A, request_id="b", workers=["b"])
    for request_id in ("a", "b"):
        router.first_token(request_id)
    for _ in range(12):
        router.add_output_block("a")
    router.set_cache_capacity(Rank("b"), 20)
    ranked = dict(router.peek([7] * 80, num_ranked=2).ranked)
    assert ranked[Rank("b")] < ranked[Rank("a")]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "half", True])
def test_a_bad_fraction_changes_nothing(fraction):
    router = make_router()
    router.route(A, request_id="a")
    with pytest.raises(ConfigError, match=r"decay_fraction must be a number in \[0, 1\], or None"):
        router.add_output_block("a", fraction)
    assert num_active(router) + num_active(router, 1) == 8


@given(st.data())
def test_whatever_the_fractions_nothing_stays(data):
    router = make_router()
    prompts = {"a": A, "b": B, "c": A[:64], "d": A}
    for request_id, prompt in prompts.items():
        router.route(prompt, request_id=request_id, workers=["a"])
    fractions = st.none() | st.floats(0, 1)
    for _ in range(data.draw(st.integers(0, 10))):
        router.add_output_block(data.draw(st.sampled_from("abcd")), data.draw(fractions))
    for request_id in data.draw(st.permutations("abcd")):
        assert num_active(router) >= 0
        router.finish(request_id)
    assert num_active(router) == 0
