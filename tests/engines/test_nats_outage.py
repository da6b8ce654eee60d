"""Real vLLM that publishes to NATS: it does not feel a server that is away, and is exact after."""

import asyncio
import os
import random
import statistics
import time

from kvplug.nats.subjects import PublisherName
from tests.engines.engine_pool import uses
from tests.engines.engine_start import FORKED
from tests.engines.plugged_vllm import BLOCK_SIZE, PluggedVllm, plugged_vllm
from tests.nats_servers import Node, free_ports
from tests.plugins.nats_reader import make_stream, reading
from tests.waiting import until

AWAY_S = float(os.environ.get("KVPLUG_TEST_AWAY_S", "4"))


class NatsVllm(PluggedVllm):
    """Its NATS server is not there yet when it starts."""

    def __init__(self, python, model_dir, plugin, folder):
        self.node = Node(folder, "nats", free_ports(3), "")
        env = {**FORKED, "KVPLUG_NATS": self.node.url}
        super().__init__(python, model_dir, plugin, folder, env=env)

    def stop(self):
        super().stop()
        self.node.stop()


SERVED = plugged_vllm("nats-outage", NatsVllm)


async def times_of(engine, rnd, during_s):
    """Seconds of each request of four prompts, one after the other."""
    times, until_s = [], time.monotonic() + during_s
    while time.monotonic() < until_s:
        prompts = [[rnd.randrange(10, 4000) for _ in range(200)] for _ in range(4)]
        started = time.monotonic()
        await asyncio.to_thread(engine.complete, prompts, max_tokens=4)
        times.append(time.monotonic() - started)
    return times


@uses(SERVED)
async def test_a_server_that_is_away_costs_the_engine_nothing(engine):
    rnd, node = random.Random(1), engine.node

    async def is_exact():
        held = await asyncio.to_thread(engine.ask_oracle)
        return reader.is_exact and reader.names() == set(held["blocks"])

    async def exact_within(limit_s):
        started = time.monotonic()
        while not await is_exact():
            assert time.monotonic() < started + limit_s, "the reader does not know what is held"
            await asyncio.sleep(0.05)
        return time.monotonic() - started

    without = await times_of(engine, rnd, AWAY_S)
    await asyncio.to_thread(node.start)
    await make_stream(node.url)
    async with reading(node.url, PublisherName(engine.url, 0), block_size=BLOCK_SIZE) as reader:
        await exact_within(30)
        assert reader.about.url == engine.url
        there = await times_of(engine, rnd, AWAY_S)
        loading = asyncio.create_task(times_of(engine, rnd, AWAY_S))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(node.kill)
        away = await loading
        await asyncio.to_thread(node.start)
        back_s = await exact_within(30)
    await until(lambda: "kvplug: KV events of" in engine.log(), "the log says where")
    sources = engine.event_sources()
    assert str(PublisherName(engine.url, 0)) in str(sources)
    medians = [1000 * statistics.median(each) for each in (without, there, away)]
    print(  # noqa: T201 - docs/engines.md has it
        f"a request takes {medians[0]:.0f} ms without a server, {medians[1]:.0f} with one, "
        f"{medians[2]:.0f} while it is killed (longest {max(away):.2f} s); exact {back_s:.2f} s "
        f"after it was back, {reader.num_asks} asks"
    )
    assert medians[2] < 2 * medians[1] + 20
    assert max(away) < 5.0
