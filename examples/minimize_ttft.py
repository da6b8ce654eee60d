"""A policy of your own: each prompt goes to the worker that has the least to prefill before it.

Run it: python -m examples.minimize_ttft

`get_potential_loads` tells what each worker would have to compute, and `worker_id` sends the
request there. Two simulated engines in this process answer; for real ones take a VllmClient or
SglangClient (docs/migration.md).
"""

import asyncio
from collections.abc import AsyncGenerator

from kvplug import Rank, Router, RouterConfig
from kvplug.push_router import GenerateRequest, KvPushRouter, Output
from kvplug.sim.engine import SimulatedEngine

DOCUMENT = list(range(1000))  # token ids
MAX_TOKENS = 4


class SimulatedEngines:
    """A WorkerClient; the router hears of what its engines cache."""

    def __init__(self, router: Router, workers: str) -> None:
        self._router = router
        self._engines = {Rank(worker): SimulatedEngine() for worker in workers}

    async def generate(self, rank: Rank, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        """Tokens as the engine makes them."""
        engine, now_s = self._engines[rank], 0.0
        work = engine.submit(request.token_ids, request.stop_conditions.max_tokens or MAX_TOKENS)
        try:
            while step := engine.step(now_s):
                now_s = step.ended_at
                self._router.apply(rank, step.batch())
                for token in step.emitted:
                    if token.request is work:
                        yield Output([token.token_id], token.finish_reason)
        finally:
            engine.abort(work)  # if nobody reads on


async def ask(push_router: KvPushRouter, question: int) -> None:
    """Send a question where the least has to be prefilled before its first token."""
    prompt = [*DOCUMENT, 9000 + question]
    loads = await push_router.get_potential_loads(prompt)
    best = min(loads, key=lambda load: load["potential_prefill_tokens"])
    stream = await push_router.generate(
        prompt, worker_id=best["worker_id"], stop_conditions={"max_tokens": MAX_TOKENS}
    )
    tokens = [token async for part in stream for token in part["token_ids"]]
    to_prefill = {load["worker_id"]: load["potential_prefill_tokens"] for load in loads}
    print(f"question {question}: {best['worker_id']} of {to_prefill}, {len(tokens)} tokens")


async def main() -> None:
    """Questions about one document; the worker that has it gets them until another is sooner."""
    router = Router(RouterConfig(block_size=16))
    for worker in "ab":
        router.add_worker(worker)
    push_router = KvPushRouter(router, SimulatedEngines(router, "ab"))
    for question in range(3):
        await ask(push_router, question)
    # A long prompt waits on the worker that has the document.
    holder, _ = await push_router.best_worker_id(DOCUMENT)
    async with await push_router.generate(range(5000, 8000), worker_id=holder):
        await ask(push_router, 3)


if __name__ == "__main__":
    asyncio.run(main())
