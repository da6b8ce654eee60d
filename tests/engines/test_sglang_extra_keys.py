"""Requests with an extra_key to a real SGLang: the router expects what SGLang has cached."""

import random

import pytest

from kvplug import Namespace
from kvplug.events import salt_with_extra_key
from kvplug.hashing import as_tokens, seed_of
from tests.engines.engine_pool import uses
from tests.engines.plugged_sglang import BLOCK_SIZE, last_message, plugged_sglang
from tests.engines.test_sglang_plugin import blocks_in_index, following, tokens
from tests.plugins.stock_client import wait_until

FORMATS = ("default", "dynamo")
KEYS = [(None, None), ("a", None), ("b", None), ("a", "salt"), (None, "salt")]


def keyed(events_format):
    engine = plugged_sglang(f"keyed-{events_format}", events={"format": events_format})
    return pytest.param(events_format, marks=uses(engine))


def cached(engine, prompt, key, salt):
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "extra_key": key,
        "cache_salt": salt,
    }
    reply = engine.endpoint.post("/generate", body, timeout_s=120)
    assert reply.status == 200, reply
    return reply.body["meta_info"]["cached_tokens"]


def expected(router, prompt, key, salt):
    namespace = Namespace(salt=salt_with_extra_key(salt or "", key or ""))
    hashes = router.index.hasher.sequence_hashes(as_tokens(prompt), seed_of(namespace))
    [depth] = router.index.overlap(hashes, now_s=0.0).depth
    return min(int(depth), (len(prompt) - 1) // BLOCK_SIZE) * BLOCK_SIZE


@pytest.mark.parametrize("events_format", [keyed(each) for each in FORMATS])
def test_the_router_knows_what_is_cached_under_each_key(engine, events_format):
    rnd = random.Random(12)
    prompts = [tokens(rnd, 200), tokens(rnd, 100)]
    with following(engine) as (router, [follower]):
        wait_until(lambda: follower.about is not None, "its hello has come")
        assert follower.about.names_extra_keys
        for _ in range(2):
            for key, salt in rnd.sample(KEYS, len(KEYS)):
                for prompt in prompts:
                    said = expected(router, prompt, key, salt)
                    assert cached(engine, prompt, key, salt) == said, (key, salt)
                    last = last_message(engine)
                    wait_until(lambda n=last: follower.sequencer.last == n, "all has arrived")
        assert dict(follower.skipped) == {}
        num_blocks = sum(len(prompt) // BLOCK_SIZE for prompt in prompts) * len(KEYS)
        assert len(blocks_in_index(router)) == num_blocks
        assert engine.ask_oracle()["num_slots"] == num_blocks * BLOCK_SIZE
        engine.server.empty_cache()
        wait_until(lambda: not blocks_in_index(router), "the flush has arrived")
