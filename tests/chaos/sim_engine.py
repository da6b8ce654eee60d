"""A simulated engine that tells what it holds, as a program: python -m tests.chaos.sim_engine.

In:  the flags of kvplug.sim.engine; $ORACLE_SOCKET, a unix socket for questions.
Out: kvplug.sim.engine's service; to any question, the ids of its cached blocks and the number of
the last message that it published (tests/engines/start_plugin/published.py).
"""

import asyncio
import os

from kvplug.sim.engine_config import parse
from kvplug.sim.engine_service import EngineService
from kvplug.vllm_hashes import event_id
from tests.chaos.asking import answer_in_background
from tests.engines.start_plugin.published import last_number


class CountingService(EngineService):
    """Counts the batches on their way to the publisher."""

    num_batches = 0

    def _publish_as(self, rank):
        publish = super()._publish_as(rank)

        def count_and_publish(batch):
            self.num_batches += 1
            publish(batch)

        return count_and_publish

    def held(self):
        hashes = self.engines[0].cache.pool.cached_hashes()
        last = last_number(self._publishers[0], self.num_batches)
        return {"blocks": list(map(event_id, hashes)), "last": last}


async def serve(config):
    loop = asyncio.get_running_loop()
    async with CountingService(config) as service:

        async def held():  # in the loop, between two steps
            return service.held()

        answer_in_background(
            os.environ["ORACLE_SOCKET"],
            lambda _: asyncio.run_coroutine_threadsafe(held(), loop).result(),
        )
        await service.stepping


if __name__ == "__main__":
    asyncio.run(serve(parse()[0]))
