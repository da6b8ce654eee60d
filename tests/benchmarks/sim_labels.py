"""Part of `make sim-modes`: what taints, expert labels and CXL pools do to decisions.

In:  seeds.   Out: rows of what the router decided.

Taints are on engines in virtual time, as in sim_modes. Labels and pools have no engines: events are
applied as engines would publish them, requests stay in flight for a number of later requests. So
shares are of real decisions, but times are the router's own predictions with a given model of the
engines; nothing here says how long a real pool takes, or what an aligned block is worth to a model.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from kvplug.errors import NoWorkerError
from kvplug.events import BlockStored, CxlMetadata, CxlState, EventBatch, MoeLabel, Rank
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from kvplug.router.decider import Decision
from kvplug.router.engine_model import EngineModel
from kvplug.router.options import MoeQuery, RouteOptions, RouterConfigOverride
from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals, replay
from kvplug.sim.replay.policies import Kv
from kvplug.sim.replay.report import markdown
from kvplug.sim.replay.workload import Request, Unshared
from tests.benchmarks.outcome_workloads import TIME_MODEL

Row = dict[str, Any]
_SIZE, _IN_FLIGHT, _GAP_S = 16, 8, 0.25
_WEIGHTS: Final = (-1.0, 0.0, 0.25, 0.5, 1.0, 2.0)
_MODEL = EngineModel(fixed_ms=20.0, token_ms=0.125, pool_ms=0.02)


class Tainted(Kv):
    """The first half of the engines is `near`; requests prefer that, or require it."""

    def __init__(
        self, specs: Sequence[EngineSpec], seed: int, weight: float | None, cost: str = "ms"
    ) -> None:
        super().__init__(specs, seed, RouterConfig(block_size=_SIZE, cost=cost))
        self.weight, self.num_near = weight, len(specs) // 2
        for number in range(self.num_near):
            self.router.add_worker(f"engine-{number}", taints=["near"])

    def options(self, request: Request) -> RouteOptions:
        """A weight of None requires the taint."""
        if self.weight is None:
            return {"required_taints": ["near"]}
        return {"preferred_taints": {"near": self.weight}}


def taints(seeds: Sequence[int], num_requests: int = 300) -> list[Row]:
    """Prompts that share nothing, 12 at a time, on four engines of which two have the taint."""
    specs = (EngineSpec(num_blocks=2048, time_model=TIME_MODEL),) * 4
    recipe = Unshared(num_requests=num_requests, prompt=(400, 1600), answer=16)
    rows = []
    for cost in ("ms", "blocks"):
        for weight in (*_WEIGHTS, None):
            outcomes = [
                replay(recipe.make(seed), specs, Tainted(specs, seed, weight, cost),
                       Arrivals(clients=12), seed=seed)
                for seed in seeds
            ]  # fmt: skip
            shares = [float((outcome.engine < 2).mean()) for outcome in outcomes]
            ttft_ms = fmean(1e3 * float(outcome.ttft_s.mean()) for outcome in outcomes)
            rows.append({
                "cost": cost, "taint": "required" if weight is None else f"preferred, {weight:g}",
                "share": fmean(shares), "least": min(shares), "most": max(shares),
                "ttft_ms": ttft_ms,
            })  # fmt: skip
    return rows


class Flow:
    """Requests through a router, one every _GAP_S: each has its first token when the next one
    comes, and is over when _IN_FLIGHT more have come.
    """

    def __init__(self, workers: Sequence[str], seed: int, **settings: Any) -> None:
        self.random, self.now = random.Random(seed), 0.0
        config = RouterConfig(block_size=_SIZE, **settings)
        self.router = Router(config, clock=lambda: self.now, random_=random.Random(seed))
        for worker in workers:
            self.router.add_worker(worker)
            self.router.set_cache_capacity(Rank(worker), 8192)
            self.router.set_engine_model(Rank(worker), _MODEL)
        self._in_flight: deque[str] = deque()

    def words(self, num_blocks: int) -> tuple[int, ...]:
        """Tokens that nobody else has."""
        return tuple(self.random.choices(range(50_000), k=num_blocks * _SIZE))

    def send(self, tokens: Sequence[int], **options: Any) -> Decision:
        """Route it."""
        self.now += _GAP_S
        if self._in_flight:
            self.router.first_token(self._in_flight[-1])
        if len(self._in_flight) >= _IN_FLIGHT:
            self.router.finish(self._in_flight.popleft(), 16)
        decision = self.router.route(list(tokens), **options)
        self._in_flight.append(decision.request_id)
        return decision

    def store(self, worker: str, tokens: tuple[int, ...], **labels: Any) -> None:
        """The worker has the blocks of these tokens; equal blocks have equal names."""
        num_blocks = len(tokens) // _SIZE
        names = tuple(hash(tokens[: (at + 1) * _SIZE]) % 2**63 for at in range(num_blocks))
        event = BlockStored(
            block_hashes=names, token_ids=tokens[: num_blocks * _SIZE], block_size=_SIZE, **labels
        )
        self.router.apply(Rank(worker), EventBatch(events=(event,)))


def experts(seeds: Sequence[int], num_requests: int = 600) -> list[Row]:
    """20 documents of 32 blocks, each on three of 4 workers with a different one of 4 experts. A
    request is about any document, with any expert: three quarters could go to an aligned copy.
    """
    ways: dict[str, dict[str, Any]] = {
        "no query": {},
        "query, boost 1": {"boost": 1.0},
        "query, boost 8": {"boost": 8.0},
        "query, boost 32": {"boost": 32.0},
        "query, no fallback": {"boost": 1.0, "fallback": False},
    }
    return [
        {"routing": name, **_mean_row([_experts_once(seed, num_requests, **way) for seed in seeds])}
        for name, way in ways.items()
    ]


def _experts_once(
    seed: int, num_requests: int, boost: float | None = None, fallback: bool = True
) -> Row:
    workers = [f"w{number}" for number in range(4)]
    flow = Flow(workers, seed, moe_boost=1.0 if boost is None else boost)
    documents = [flow.words(32) for _ in range(20)]
    label_of: dict[tuple[str, int], int] = {}
    for number, document in enumerate(documents):
        for expert, worker in enumerate(flow.random.sample(workers, 3)):
            label_of[worker, number] = (expert + number) % 4
            flow.store(worker, document, moe=MoeLabel(0, label_of[worker, number]))
    num_aligned = num_cached = num_refused = 0
    for _ in range(num_requests):
        number, expert = flow.random.randrange(20), flow.random.randrange(4)
        tokens, query = documents[number] + flow.words(2), None
        if boost is not None:
            query = MoeQuery(layer=0, expert=expert, fallback_to_unlabeled=fallback)
        try:
            decision = flow.send(tokens, override=RouterConfigOverride(moe_query=query))
        except NoWorkerError:  # no copy has this expert: the caller asks again without the query
            num_refused += 1
            decision = flow.send(tokens)
        num_aligned += label_of.get((decision.rank.worker, number)) == expert
        num_cached += decision.overlap_blocks >= 32
    return {
        "aligned": num_aligned / num_requests, "cached": num_cached / num_requests,
        "refused": num_refused / num_requests,
    }  # fmt: skip


def pools(seeds: Sequence[int], num_requests: int = 300) -> list[Row]:
    """Two prefill workers compute 40 documents of 128 blocks; a decode worker is chosen for each
    request out of four, of which two can read the prefill workers' pool. Then it fails in the
    middle of its answer, and another one is chosen to go on; the columns `recover...` are of
    readers that fail.
    """
    return [
        {"blocks in a pool": name, **_mean_row([_pools_once(s, num_requests, on) for s in seeds])}
        for name, on in (("no", False), ("yes", True))
    ]


def _pools_once(seed: int, num_requests: int, has_pool: bool) -> Row:
    decoders = [f"d{number}" for number in range(4)]
    readers = ("d0", "d1")
    flow = Flow([*decoders, "p0", "p1"], seed)
    documents = [flow.words(128) for _ in range(40)]
    labels = _labels("p0", readers) if has_pool else {}
    for number, document in enumerate(documents):
        flow.store(f"p{number % 2}", document, **labels)
    rows = list(_failures(flow, documents, decoders, readers, num_requests, has_pool))
    return _mean_row(rows)


def _labels(owner: str, readers: Sequence[str]) -> dict[str, CxlMetadata]:
    return {"cxl": CxlMetadata(CxlState.CXL_POOLED, 1, (owner, *readers))}


def _failures(
    flow: Flow, documents: Sequence[tuple[int, ...]], decoders: Sequence[str],
    readers: Sequence[str], num_requests: int, has_pool: bool,
) -> Iterator[Row]:  # fmt: skip
    for _ in range(num_requests):
        tokens = flow.random.choice(documents) + flow.words(2)
        first = flow.send(tokens, workers=decoders)
        failed = first.rank.worker
        # The engine that fails has written what it had into the pool, the answer so far as well.
        tokens += flow.words(4)
        if has_pool and failed in readers:
            flow.store(failed, tokens, **_labels(failed, readers))
        left = [worker for worker in decoders if worker != failed]
        again = flow.send(tokens, workers=left)
        yield {
            "to readers": float(failed in readers),
            "cached": first.overlap_blocks / first.prompt_blocks,
            "ttft_ms": first.predicted_ttft_ms,
        }
        if failed in readers:
            yield {
                "recovered by reader": float(again.rank.worker in readers),
                "recovered cached": again.overlap_blocks / again.prompt_blocks,
                "recovery_ms": again.predicted_ttft_ms,
            }


def _mean_row(rows: Sequence[Mapping[str, float]]) -> Row:
    """Of each column, over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row[name] for row in rows if name in row) for name in names}


def run(num_seeds: int) -> dict[str, list[Row]]:
    """{name: rows}."""
    seeds = range(1, num_seeds + 1)
    return {"taints": taints(seeds), "experts": experts(seeds), "pools": pools(seeds)}


def tables_of(results: Mapping[str, Sequence[Row]]) -> str:
    """A table each."""
    parts = []
    for name, rows in results.items():
        cells = [[_cell(column, value) for column, value in row.items()] for row in rows]
        parts.append(f"{name}\n\n{markdown(list(rows[0]), cells)}")
    return "\n\n".join(parts)


def _cell(column: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.1f}" if column.endswith("_ms") else f"{value:.1%}"
