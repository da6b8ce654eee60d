"""Real SGLang with two data-parallel ranks and KVPLUG_BALANCE=kv, and nothing else set."""

import random

import pytest

from tests.engines.balanced import BLOCK_SIZE, BalancedSglang, balanced
from tests.engines.engine_pool import uses
from tests.plugins.stock_client import wait_until

OURS = balanced("balanced-sglang", BalancedSglang, num_blocks=96)
DOCUMENT_TOKENS = 16 * BLOCK_SIZE

pytestmark = uses(OURS)


def document(seed):
    rng = random.Random(seed)
    return [rng.randrange(10, 3900) for _ in range(DOCUMENT_TOKENS)]


def until_found(engine, prompt, **fields):
    """Wait until one request after another finds it: SGLang takes its ranks in turn."""

    def is_found():
        prompts = [[*prompt, *[20 + number] * 20] for number in range(4)]
        return all(engine.complete(each, **fields) == DOCUMENT_TOKENS for each in prompts)

    wait_until(is_found, "requests find the document")


@pytest.mark.parametrize("engine_rank", [0, 1])
def test_prompts_go_to_the_rank_that_has_their_prefix(engine, engine_rank):
    asked = document(engine_rank)
    assert engine.complete(asked, rank=engine_rank) == 0
    until_found(engine, asked)
    assert engine.complete([*asked, 7], rank=1 - engine_rank) == 0  # the client's word counts


def test_salts_keep_prompts_apart(engine):
    asked = document(2)
    assert engine.complete(asked, cache_salt="a") == 0
    assert engine.complete(asked, cache_salt="b") == 0
    for salt in "ab":
        until_found(engine, asked, cache_salt=salt)


def test_extra_keys_keep_prompts_apart(engine):
    asked = document(3)
    assert engine.complete(asked, extra_key="a") == 0
    assert engine.complete(asked, extra_key="b") == 0
    for key in "ab":
        until_found(engine, asked, extra_key=key)


def test_nothing_has_failed(engine):
    """Last."""
    assert "balances its data-parallel ranks itself" not in engine.log()
