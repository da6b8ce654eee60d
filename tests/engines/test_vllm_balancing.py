"""Real vLLM with two data-parallel ranks and KVPLUG_BALANCE=kv, and nothing else set."""

import os
import random
import re
import signal
from pathlib import Path

import pytest

from tests.engines.balanced import BLOCK_SIZE, BalancedVllm, balanced
from tests.engines.engine_pool import uses
from tests.plugins.stock_client import wait_until

OURS = balanced("balanced-vllm", BalancedVllm, num_blocks=96)
OWN = balanced("own-vllm", BalancedVllm, num_blocks=96, balances=False)
ONE_FRONT_END = balanced("balanced-vllm-1", BalancedVllm, num_blocks=96, num_front_ends=1)
NUM_DOCUMENTS, DOCUMENT_TOKENS = 4, 16 * BLOCK_SIZE


def ids(rng, count):
    return [rng.randrange(10, 3900) for _ in range(count)]


def documents(seed):
    rng = random.Random(seed)
    return [ids(rng, DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]


def cached_share(engine, seed):
    """Of the tokens of questions about documents, in an order that the seed gives."""
    rng, known = random.Random(seed), documents(seed)
    prompts = [[*rng.choice(known), *ids(rng, 20)] for _ in range(40)]
    cached = [engine.complete(prompt) for prompt in prompts]
    return sum(cached) / sum(map(len, prompts))


@uses(OURS)
@pytest.mark.parametrize("engine_rank", [0, 1])
def test_prompts_go_to_the_rank_that_has_their_prefix(engine, engine_rank):
    """Once the client has named the rank, which is respected."""
    [document, *_] = documents(10 + engine_rank)
    assert engine.complete(document, rank=engine_rank) == 0
    assert engine.complete([*document, 7], rank=1 - engine_rank) == 0
    engine.empty_cache()
    engine.complete(document, rank=engine_rank)
    for number in range(6):  # both front ends, and once each in turn would miss
        assert engine.complete([*document, *[20 + number] * 20]) == DOCUMENT_TOKENS


@uses(OURS, OWN)
def test_more_is_cached_than_with_vllms_own_balancing(engines):
    shares = []
    for engine in engines:
        engine.empty_cache()
        shares.append(cached_share(engine, seed=1))
    ours, own = shares
    assert ours > 0.8  # 36 of 40 prompts can find their document
    assert ours > own + 0.1


@uses(OURS)
def test_salts_keep_prompts_apart(engine):
    document = documents(3)[0]
    assert engine.complete(document, cache_salt="a") == 0
    assert engine.complete(document, cache_salt="b") == 0
    for salt in "abab":
        assert engine.complete([*document, 5], cache_salt=salt) == DOCUMENT_TOKENS


@uses(OURS)
def test_streams_are_in_a_folder_for_this_user_alone(engine):
    [folder] = {Path(found) for found in re.findall(r"ipc://(\S+)/events\b", engine.log())}
    assert folder.stat().st_mode & 0o777 == 0o700


@uses(ONE_FRONT_END)
def test_vllm_goes_on_when_a_publisher_is_killed(engine):
    """Last: the engine stays without it. vLLM forks its cores here, so one front end forks, too."""
    assert cached_share(engine, seed=4) > 0.8
    for process in senders(engine):
        os.kill(process, signal.SIGKILL)
    assert cached_share(engine, seed=5) >= 0.0
    wait_until(lambda: engine.complete(documents(6)[0]) >= 0, "requests are served")
    assert "Traceback" not in engine.log()


def senders(engine):
    """Processes that send events for the engine."""
    found = []
    for process in engine.process.members():
        command = Path(f"/proc/{process}/cmdline").read_bytes()
        if b"kvplug.engines.sender" in command:
            found.append(process)
    return found
