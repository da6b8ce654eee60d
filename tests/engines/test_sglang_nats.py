"""Real SGLang with two data-parallel ranks, over NATS: each rank has subjects of its own."""

import asyncio
import random

import pytest

from kvplug.nats.subjects import PublisherName
from tests.engines.engine_pool import uses
from tests.engines.engine_start import FORKED
from tests.engines.plugged_sglang import BLOCK_SIZE, PluggedSglang, plugged_sglang
from tests.nats_servers import Node, free_ports
from tests.plugins.nats_reader import make_stream, reading
from tests.waiting import until


class NatsSglang(PluggedSglang):
    """Its NATS server starts with it."""

    def __init__(self, python, model_dir, plugin, folder, **more):
        self.node = Node(folder, "nats", free_ports(3), "")
        env = {**FORKED, "KVPLUG_NATS": self.node.url}
        super().__init__(python, model_dir, plugin, folder, env=env, **more)

    def start(self):
        self.node.start()
        super().start()

    def stop(self):
        super().stop()
        self.node.stop()


SERVED = plugged_sglang("nats-sglang", NatsSglang, dp_size=2)


@uses(SERVED)
@pytest.mark.parametrize("rank", [0, 1])
async def test_each_rank_is_a_publisher(engine, rank):
    rnd, url = random.Random(rank), engine.server.url
    if rank == 0:
        await make_stream(engine.node.url)
    prompts = [[rnd.randrange(10, 4000) for _ in range(200)] for _ in range(4)]
    await asyncio.to_thread(engine.generate, prompts)
    async with reading(engine.node.url, PublisherName(url, rank), block_size=BLOCK_SIZE) as reader:
        held = await asyncio.to_thread(engine.cached_blocks, rank)
        assert held
        await until(lambda: reader.is_exact and reader.names() == held, "the reader is exact")
        assert (reader.about.dp_rank, reader.about.engine) == (rank, "sglang")
