"""One call of the kernel against the steps one by one, in plain Python."""

import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockRemoved, BlockStored, EngineModel, EventBatch, Rank, Router, RouterConfig
from kvplug.events import CxlMetadata, CxlState, Tier
from kvplug.kernels.forecast import CHUNK
from tests.kernels import references
from tests.kernels.test_forecast import ReferenceForecast

WORKERS = ("a", "b", "c")
SIZE = 2
SHARE_OF_POPULAR, REQUESTS_OF_POPULARITY, REQUESTS_BEFORE = 0.3, 200, 16


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def prompt_of(document, length, question):
    return [document * 100 + i for i in range(length)] + [5000 + question] * (question % 7)


prompts = st.builds(prompt_of, st.integers(0, 1), st.sampled_from([3, 8, 20]), st.integers(0, 20))
routes = st.tuples(st.just("route"), prompts, st.integers(1, 30) | st.none())
steps = st.one_of(
    routes,
    routes,
    routes,
    st.tuples(st.just("first_token"), st.integers(0, 9), st.none()),
    st.tuples(st.just("finish"), st.integers(0, 9), st.integers(1, 40) | st.none()),
    st.tuples(
        st.just("store"), st.sampled_from(WORKERS), st.tuples(prompts, st.sampled_from(Tier))
    ),
    st.tuples(st.just("remove"), st.sampled_from(WORKERS), prompts),
    st.tuples(st.just("wait"), st.floats(0, 0.5), st.none()),
)
settings = st.fixed_dictionaries(
    {
        "cost": st.sampled_from(["ms", "ms", "blocks"]),
        "ttft_slo_ms": st.sampled_from([None, None, 20.0]),
        "itl_slo_ms": st.sampled_from([None, None, 30.0]),
        "host_credit": st.sampled_from([None, None, 0.5]),
        "disk_credit": st.sampled_from([None, None, 0.0]),
        "device_credit": st.sampled_from([1.0, 1.0, 0.8]),
        "device_credit_decay": st.sampled_from([0.0, 0.0, 0.5]),
        "request_weight": st.sampled_from([0.0, 0.0, 3.0]),
    }
)
capacities = st.tuples(*(st.sampled_from([0, 6, 20, 100]) for _ in WORKERS))
models = [EngineModel(token_ms=t, attention_ms=t / 50, context_ms=0.01) for t in (0.5, 1.0, 4.0)]


class ReferenceRouter:
    """What the router knows besides its index and its load, and how it decides by that."""

    def __init__(self, router, config):
        self.router, self.config = router, config
        self.forecasts = [ReferenceForecast() for _ in WORKERS]
        self.popular, self.num_routed = {}, 0
        self.live = defaultdict(list)  # rank number: prompts

    @property
    def ranks(self):
        rows = self.router.load.ranks.tolist()
        return [dict(zip(references.RANK_COLUMNS, row, strict=True)) for row in rows]

    def costs(self, tokens, hashes, traffic, now_ms, max_tokens):
        """[cost], [(found, on device, loading ms)] of each rank."""
        ranks, num_blocks = self.ranks, len(tokens) // SIZE
        answer = math.inf if max_tokens is None else max_tokens
        found = self.found(hashes, ranks, traffic)
        request = ranks, traffic, now_ms, len(tokens), SIZE, answer
        times = references.fleet_costs(*request, found)
        costs = [fleet for _, fleet in times]
        if self.config.cost == "ms":
            best = min(costs)
            best_at = costs.index(best)
            if self.is_popular(hashes, found, found[best_at][0]):
                copy = [(found[best_at][0], found[best_at][0], 0.0)] * len(ranks)
                for r, (_, cheap) in enumerate(references.fleet_costs(*request, copy)):
                    could_win = SHARE_OF_POPULAR * costs[r] < best
                    if found[r][0] < found[best_at][0] and could_win:
                        costs[r] = cheap + SHARE_OF_POPULAR * (costs[r] - cheap)
            waits = references.waits_ms(ranks, now_ms)
            fleet = references.fleet_of(ranks, traffic, now_ms, waits, num_blocks, SIZE, answer)
            block_ms = SIZE * sum(r["token_ms"] for r in ranks) / len(ranks)
            for r, lost in enumerate(self.lost_credit(tokens, hashes)):
                blocks = (1 + fleet["behind"]) * lost
                blocks += self.config.request_weight * ranks[r]["num_running"]
                costs[r] += block_ms * blocks
        else:
            overlap = self.router.index.overlap(hashes, now_ms / 1e3)
            costs = references.blocks_cost(
                len(tokens) / SIZE, num_blocks, 1.0,
                overlap.credit - self.lost_credit(tokens, hashes),
                [r["prefill_tokens"] / SIZE for r in ranks],
                [r["active_blocks"] for r in ranks],
                [self.shared(hashes, r) for r in range(len(ranks))],
            )  # fmt: skip
            costs = [
                cost + self.config.request_weight * rank["num_running"]
                for cost, rank in zip(costs, ranks, strict=True)
            ]
        for r, (own, _) in enumerate(times):
            rank = ranks[r]
            between = rank["step_ms"] + rank["sequence_ms"] * (rank["num_running"] + 1)
            between += rank["context_ms"] * (rank["context_tokens"] + len(tokens))
            costs[r] += 1e12 * (own > (self.config.ttft_slo_ms or math.inf))
            costs[r] += 1e12 * (between > (self.config.itl_slo_ms or math.inf))
        return costs, found

    def lost_credit(self, tokens, hashes):
        """By how many blocks what each rank has on its device counts for less."""
        queued = np.array([rank["prefill_tokens"] for rank in self.ranks])
        prompts_ahead = (queued - queued.min()) / SIZE / max(1, math.ceil(len(tokens) / SIZE))
        decay = 1 / (1 + self.config.device_credit_decay * prompts_ahead)
        return (1 - self.config.device_credit * decay) * self.router.index.overlap(hashes).device

    def found(self, hashes, ranks, traffic):
        overlap = self.router.index.overlap(hashes, 0.0)
        usual = traffic["usual_capacity"]
        num_new = len(hashes)
        filled = [r["resident_blocks"] + r["coming_blocks"] for r in ranks]
        usual = usual or max(f + 1 for f in filled)
        rows = []
        for number, rank in enumerate(ranks):
            device, host = int(overlap.device[number]), int(overlap.host[number])
            disk, anywhere = int(overlap.disk[number]), int(overlap.held[number])
            loading = SIZE * (
                (host - device) * rank["host_ms"]
                + (disk - host) * rank["disk_ms"]
                + (anywhere - disk) * rank["pool_ms"]
            )
            row = (anywhere, device, loading)
            capacity = max(rank["capacity_blocks"] or usual, rank["resident_blocks"])
            if self.config.cost == "ms" and filled[number] > capacity:
                then = self.forecasts[number].num_held(hashes.tolist())
                if then < anywhere + CHUNK:
                    then = min(then, anywhere)
                lower, lost = anywhere - device, max(0, device - then)
                row = (then, then, 0.0)
                if lower:
                    row = (max(then, anywhere), then, loading * (lower + lost) / lower)
            rows.append(row)
        assert num_new >= max(row[0] for row in rows)
        return rows

    def shared(self, hashes, number):
        blocks = {h for prompt in self.live[number] for h in prompt}
        return [*(h in blocks for h in hashes.tolist()), False].index(False)

    def is_popular(self, hashes, found, num_blocks):
        if num_blocks < 1:
            return False
        key, now = int(hashes[int(num_blocks) - 1]), self.num_routed
        count, at = self.popular.get(key, (0.0, now))
        count = count * math.exp((at - now) / REQUESTS_OF_POPULARITY) + 1
        self.popular[key] = (count, now)
        num_seen = now + 1 + REQUESTS_BEFORE
        seen = REQUESTS_OF_POPULARITY * (1 - math.exp(-num_seen / REQUESTS_OF_POPULARITY))
        copies = sum(row[0] >= num_blocks for row in found)
        return count / seen * len(found) >= copies

    def routed(self, number, hashes, found, traffic, max_tokens):
        self.num_routed += 1
        self.live[number].append(hashes.tolist())
        if self.config.cost == "ms":
            answer = min(traffic["answer_tokens"], math.inf if max_tokens is None else max_tokens)
            new = int(max(0, len(hashes) - found[number][1]) + answer / SIZE)
            self.forecasts[number].use(hashes.tolist(), new, self.capacity(number, traffic))

    def capacity(self, number, traffic):
        ranks = self.before
        usual = traffic["usual_capacity"]
        usual = usual or max(r["resident_blocks"] + r["coming_blocks"] + 1 for r in ranks)
        rank = ranks[number]
        return int(max(rank["capacity_blocks"] or usual, rank["resident_blocks"]))


def make_router(config, capacities, clock, seed=0):
    router = Router(config, clock=clock, random_=random.Random(seed))
    for worker, capacity, model in zip(WORKERS, capacities, models, strict=True):
        router.add_worker(worker)
        router.set_engine_model(Rank(worker), model)
        if capacity:
            router.set_cache_capacity(Rank(worker), capacity)
    return router


def engine_hashes_of(tokens):
    return tuple(hash(tuple(tokens[:end])) % 2**63 for end in range(SIZE, len(tokens) + 1, SIZE))


def tell(router, step, worker, what):
    if step == "store":
        tokens, tier = what
        event = BlockStored(
            block_hashes=engine_hashes_of(tokens),
            token_ids=tuple(tokens),
            block_size=SIZE,
            tier=tier,
        )
    else:
        event = BlockRemoved(block_hashes=engine_hashes_of(what))
    router.apply(Rank(worker), EventBatch(events=(event,)))


def traffic_of(router):
    group = router.fleet_index.groups[0]
    arrays = router._decider._arrays_of(group)
    columns = ("num_routed", "last_ms", "gap_ms", "work_ms", "prompt_blocks", "cached_blocks")
    columns += ("answer_tokens", "answer_ms", "distinct_blocks", "held_blocks", "usual_capacity")
    return dict(zip(columns, arrays.traffic.tolist(), strict=False))


@given(settings, capacities, st.lists(steps, min_size=20, max_size=40), st.integers(0, 99))
def test_a_choice_is_what_the_steps_one_by_one_come_to(settings, capacities, steps, seed):
    config = RouterConfig(block_size=SIZE, speculative_ttl_s=0.0, **settings)
    clock = Clock()
    router = make_router(config, capacities, clock, seed)
    reference, live = ReferenceRouter(router, config), []
    for step, first, second in steps:
        if step == "wait":
            clock.now_s += first
        elif step in ("store", "remove"):
            tell(router, step, first, second)
        elif step == "route":
            live.append(route_and_compare(router, reference, first, second, 1e3 * clock.now_s))
        elif live and step == "first_token":
            router.first_token(live[first % len(live)][0])
        elif live:
            request_id, number, hashes = live.pop(first % len(live))
            router.finish(request_id, second)
            reference.live[number].remove(hashes)
    router.index.check()


def route_and_compare(router, reference, tokens, max_tokens, now_ms):
    hashes = router.index.hasher.sequence_hashes(np.array(tokens, dtype=np.uint32))
    traffic, reference.before = traffic_of(router), reference.ranks
    costs, found = reference.costs(tokens, hashes, traffic, now_ms, max_tokens)
    resident = router.index.overlap(hashes).held.tolist()
    decision = router.route(tokens, max_tokens=max_tokens)
    number = WORKERS.index(decision.rank.worker)
    assert router.load.request(decision.request_id).resident_blocks == resident[number]
    assert decision.cost == pytest.approx(costs[number], rel=1e-9, abs=1e-9)
    assert costs[number] <= min(costs) * (1 + 1e-9) + 1e-9
    reference.routed(number, hashes, found, traffic, max_tokens)
    require_noted(traffic, traffic_of(router), reference, number, len(tokens), found, now_ms)
    require_waits_noted(reference, traffic["work_ms"], now_ms)
    return decision.request_id, number, hashes.tolist()


def require_noted(before, after, reference, number, num_tokens, found, now_ms):
    """The means have moved on."""
    rank, num_blocks = reference.before[number], num_tokens // SIZE
    cached = max(0, min(found[number][0] * SIZE, num_tokens - 1))
    new = num_tokens - cached
    pairs = new * (cached + new / 2)
    work = rank["token_ms"] * new + rank["attention_ms"] * pairs + found[number][2]
    n = before["num_routed"]
    gap = before["gap_ms"]
    if n:
        gap += max(1 / 64, 1 / (n + 8)) * (now_ms - before["last_ms"] - gap)
    mean = before["work_ms"] + max(1 / 64, 1 / (n + 1)) * (work - before["work_ms"])
    coming = max(0, num_blocks - found[number][1])
    common = min(row[0] for row in found)
    expected = {
        "num_routed": n + 1, "last_ms": now_ms, "gap_ms": gap, "work_ms": mean,
        "prompt_blocks": 0.999 * before["prompt_blocks"] + num_blocks,
        "cached_blocks": 0.999 * before["cached_blocks"] + num_blocks - coming,
        "distinct_blocks": 0.999 * before["distinct_blocks"] + num_blocks - common,
        "held_blocks": 0.999 * before["held_blocks"] + found[number][0] - common,
    }  # fmt: skip
    assert {name: after[name] for name in expected} == pytest.approx(expected)


def require_waits_noted(reference, work_ms, now_ms):
    """Of each rank, whoever got the request."""
    waits = references.waits_ms(reference.before, now_ms)
    expected = references.next_usual_waits_ms(reference.before, now_ms, waits, work_ms)
    assert [rank["usual_wait_ms"] for rank in reference.ranks] == pytest.approx(expected)


IN_POOL = {"cxl": CxlMetadata(CxlState.CXL_POOLED, 0, ("a",))}
LOWER = {"host": {"tier": Tier.HOST}, "disk": {"tier": Tier.DISK}, "pool": IN_POOL}


def holding(tokens, num_on_device, tiers):
    """Worker "a" has the first blocks of 16 tokens on its device, and the next one in each tier."""
    router = Router(RouterConfig(block_size=16, speculative_ttl_s=0.0), clock=Clock())
    router.add_worker("a")
    stored = [(0, num_on_device, {})]
    stored += [(num_on_device + i, 1, LOWER[tier]) for i, tier in enumerate(tiers)]
    events = tuple(
        BlockStored(
            block_hashes=tuple(range(first + 1, first + 1 + num_blocks)),
            token_ids=tokens[16 * first : 16 * (first + num_blocks)],
            block_size=16,
            parent=first or None,
            **where,
        )
        for first, num_blocks, where in stored
    )
    assert router.apply(Rank("a"), EventBatch(events=events)).rejected == {}
    return router


@pytest.mark.parametrize(
    ("tiers", "loading_ms"),
    [
        ([], 0.0),
        (["host"], 16 * 0.05),
        (["disk"], 16 * 0.15),
        (["pool"], 16 * 0.02),
        (["host", "disk", "pool"], 16 * (0.05 + 0.15 + 0.02)),
    ],
)
def test_only_blocks_that_the_device_lacks_are_loaded(tiers, loading_ms):
    """docs/routing.md, "Loading from lower tiers": change both together."""
    tokens, num_on_device = tuple(range(203 * 16 + 1)), 200
    router = holding(tokens, num_on_device, tiers)
    model = EngineModel(fixed_ms=2.0, token_ms=0.2, host_ms=0.05, disk_ms=0.15, pool_ms=0.02)
    router.set_engine_model(Rank("a"), model)
    num_computed = (3 - len(tiers)) * 16 + 1
    expected_ms = 2.0 + loading_ms + 0.2 * num_computed
    assert router.route(tokens).predicted_ttft_ms == pytest.approx(expected_ms)


def drawn(router, num_draws=600):
    picks = Counter()
    for _ in range(num_draws):
        decision = router.route([1, 2, 3, 4])
        router.finish(decision.request_id)
        picks[decision.rank.worker] += 1
    return picks


def test_equal_costs_are_shared_out_by_chance():
    config = RouterConfig(block_size=SIZE, speculative_ttl_s=0.0)
    router = Router(config, clock=Clock())
    for worker in WORKERS:
        router.add_worker(worker)
    picks = drawn(router)
    assert all(130 < picks[worker] < 270 for worker in WORKERS)


def test_softmax_takes_costs_by_their_distance_from_the_lowest():
    config = RouterConfig(block_size=SIZE, speculative_ttl_s=0.0, temperature=0.5, cost="blocks")
    router = make_router(config, (0, 0, 0), Clock())
    tell(router, "store", "a", ([1, 2, 3, 4], Tier.DEVICE))
    tell(router, "store", "b", ([1, 2], Tier.DEVICE))
    picks = drawn(router, 2000)
    weights = [math.exp(-x / 0.5) for x in (0.0, 0.5, 1.0)]
    for worker, weight in zip(WORKERS, weights, strict=True):
        share = weight / sum(weights)
        assert abs(picks[worker] / 2000 - share) < 5 * math.sqrt(share * (1 - share) / 2000)
