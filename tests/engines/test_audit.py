"""How often two real vLLM engines had less in their caches than the router counted on.

`make audit` prints what it finds. The caches do not hold all documents and the requests in flight:
blocks are evicted all the time, some of them between a decision and its request.
"""

import asyncio
import random
import sys
from collections import Counter
from itertools import pairwise

from kvplug.audit.expectation import Verdict
from kvplug.audit.ledger import ERROR_BOUNDS
from tests.engines.engine_pool import uses
from tests.engines.engine_start import vllm_server
from tests.engines.test_vllm_served import MODEL, routing
from tests.waiting import until

NUM_REQUESTS = 2400
NUM_DOCUMENTS = 16
CONCURRENCY = 8
BLOCK_SIZE = 32
MAX_INCORRECT_RATE = 0.001
# Of its own: whoever follows them later would have thousands of its batches to replay.
PAIR = [vllm_server(f"audited-{i}", num_gpu_blocks=160) for i in range(2)]


def prompts(seed=1):
    """Documents of 4 to 24 blocks, asked about in turn; every tenth prompt is only a document."""
    random_ = random.Random(seed)
    documents = [
        [random_.randrange(10, 4000) for _ in range(BLOCK_SIZE * random_.randint(4, 24))]
        for _ in range(NUM_DOCUMENTS)
    ]
    for number in range(NUM_REQUESTS):
        document = random_.choice(documents)
        length = 0 if number % 10 == 0 else random_.randint(1, 60)
        yield document + [random_.randrange(10, 4000) for _ in range(length)]


async def ask(client, gate, prompt, *, stream):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with gate, client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()


@uses(*PAIR)
async def test_at_most_one_request_in_a_thousand_is_incorrectly_routed(engines, capsys):
    async with routing(engines) as (service, client):
        gate = asyncio.Semaphore(CONCURRENCY)
        await asyncio.gather(
            *(ask(client, gate, p, stream=n % 2 == 0) for n, p in enumerate(prompts()))
        )

        def ledgers():
            ledgers = service.audit.ledgers()
            is_done = sum(each.num_audited for each in ledgers.values()) == NUM_REQUESTS
            return ledgers if is_done else None

        audited = await until(ledgers, "all requests are audited")
        followers = [worker.followers[0] for worker in service.fleet.workers.values()]
        num_removed = sum(follower.num_removed for follower in followers)
        with capsys.disabled():
            show(audited, num_removed)
    wrong = sum(ledger.num_wrong for ledger in audited.values())
    assert num_removed > 1000
    assert wrong / NUM_REQUESTS <= MAX_INCORRECT_RATE


def show(ledgers, num_removed):
    verdicts = sum((ledger.num_by_verdict for ledger in ledgers.values()), Counter())
    wrong = sum(ledger.num_wrong for ledger in ledgers.values())
    say(f"\n{verdicts.total()} requests audited, {num_removed} blocks evicted meanwhile")
    say(f"incorrectly routed: {wrong} ({wrong / verdicts.total():.3%})")
    for verdict in Verdict:
        say(f"  {verdict.value:<20} {verdicts[verdict]:>6}")
    for rank, ledger in ledgers.items():
        say(f"  {rank}: {ledger.num_audited} audited, accuracy {ledger.accuracy:.4f}")
    say("predicted - reported, in blocks")
    histograms = [[n for _, n in ledger.error_histogram] for ledger in ledgers.values()]
    cumulative = list(map(sum, zip(*histograms, strict=True)))
    numbers = [now - before for before, now in pairwise([0, *cumulative])]
    for bound, number in zip([*ERROR_BOUNDS, "more"], numbers, strict=True):
        say(f"  up to {bound!s:<14} {number:>6}")


def say(line):
    sys.stdout.write(line + "\n")
