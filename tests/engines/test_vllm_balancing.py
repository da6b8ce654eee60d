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
# One rank has room for 5 of the documents, both for all.
NUM_DOCUMENTS, DOCUMENT_TOKENS = 8, 16 * BLOCK_SIZE


def ids(rng, count):
    return [rng.randrange(10, 3900) for _ in range(count)]


def documents(seed):
    rng = random.Random(seed)
    return [ids(rng, DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]


def cached_share(engine, seed):
    """Of the tokens of questions about documents, in an order that the seed gives."""
    rng, known = random.Random(seed), documents(seed)
    prompts = [[*rng.choice(known), *ids(rng, 20)] for _ in range(80)]
    cached = [engine.complete(prompt) for prompt in prompts]
    return sum(cached) / sum(map(len, prompts))


def until_found(engine, document, **fields):
    """Wait until requests go where the document is: events take some milliseconds to each of the
    front ends, and one request after another would be sent to each rank in turn by vLLM.
    """

    def is_found():
        prompts = [[*document, *[20 + number] * 20] for number in range(6)]
        return all(engine.complete(each, **fields) == DOCUMENT_TOKENS for each in prompts)

    wait_until(is_found, "requests find the document")


@uses(OURS)
@pytest.mark.parametrize("engine_rank", [0, 1])
def test_prompts_go_to_the_rank_that_has_their_prefix(engine, engine_rank):
    """Once the client has named the rank, which is respected."""
    [document, *_] = documents(10 + engine_rank)
    assert engine.complete(document, rank=engine_rank) == 0
    assert engine.complete([*document, 7], rank=1 - engine_rank) == 0
    engine.empty_cache()
    engine.complete(document, rank=engine_rank)
    until_found(engine, document)


@uses(OURS, OWN)
def test_more_is_cached_than_with_vllms_own_balancing(engines):
    shares = []
    for engine in engines:
        engine.empty_cache()
        shares.append(cached_share(engine, seed=1))
    ours, own = shares
    assert ours > 0.8  # 72 of 80 prompts can find their document
    assert ours > own + 0.1


@uses(OURS)
def test_salts_keep_prompts_apart(engine):
    document = documents(3)[0]
    assert engine.complete(document, cache_salt="a") == 0
    assert engine.complete(document, cache_salt="b") == 0
    for salt in "ab":
        until_found(engine, document, cache_salt=salt)


@uses(OURS)
def test_streams_are_in_a_folder_for_this_user_alone(engine):
    [folder] = {Path(found) for found in re.findall(r"ipc://(\S+)/events\b", engine.log())}
    assert folder.stat().st_mode & 0o777 == 0o700


@uses(ONE_FRONT_END)
def test_vllm_goes_on_when_the_processes_that_send_events_are_killed(engine):
    """Last, as the engine stays so. One front end starts cores itself, and loads Numba later."""
    assert cached_share(engine, seed=4) > 0.8
    killed = senders(engine)
    assert killed
    for process in killed:
        os.kill(process, signal.SIGKILL)
    # Without events it is as good as vLLM's own way, and never worse than an error.
    assert cached_share(engine, seed=5) > 0.4


def senders(engine):
    """Processes that send events of the engine."""
    found = []
    for process in engine.process.members():
        command = Path(f"/proc/{process}/cmdline").read_bytes()
        if b"kvplug.engines.sender" in command:
            found.append(process)
    return found
