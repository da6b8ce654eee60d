"""Streams over engines that break off: every token once, in order, and no load left."""

import asyncio
import gc
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug import BlockStored, EventBatch, Namespace, Rank, Router, RouterConfig
from kvplug.errors import (
    ConfigError,
    HashingError,
    NoWorkerError,
    RequestRefusedError,
    WorkerLostError,
)
from kvplug.push_router import KvPushRouter, Output
from kvplug.router.config import Mode
from kvplug.router.observer import RouterObserver
from kvplug.router.options import MoeQuery
from tests.push_router.virtual_engines import VirtualEngines, answer_of
from tests.router.test_migration import live
from tests.waiting import until

PROMPT = list(range(100, 140))
A, B, C = map(Rank, "abc")


class Fleet:
    """Workers a, b and c; `breaks`: after how many tokens each engine is lost."""

    def __init__(self, *, breaks=None, chunk=1, workers="abc", limit=3, **settings):
        self.engines = VirtualEngines(chunk=chunk)
        self.engines.breaks = breaks or {}
        self.router = Router(
            RouterConfig(block_size=4, **settings),
            clock=self.engines.clock,
            random_=random.Random(0),
        )
        for worker in workers:
            self.router.add_worker(worker)
        self.losses = []
        self.push_router = KvPushRouter(
            self.router,
            self.engines,
            migration_limit=limit,
            on_worker_lost=lambda *loss: self.losses.append(loss),
        )

    async def stream(self, max_tokens=10, **options):
        conditions = {"max_tokens": max_tokens, **options.pop("stop_conditions", {})}
        return await self.push_router.generate(PROMPT, stop_conditions=conditions, **options)

    def assert_idle(self):
        assert len(self.router.load) == len(self.router.load.active) == 0
        assert not live(self.router).any()
        assert self.engines.num_open == 0


async def tokens_of(stream):
    """Of the whole answer, and its finish reason."""
    parts = [part async for part in stream]
    assert all("finish_reason" not in part for part in parts[:-1])
    return [token for part in parts for token in part["token_ids"]], parts[-1]["finish_reason"]


async def test_an_answer_comes_as_dicts_of_tokens():
    fleet = Fleet(chunk=4)
    stream = await fleet.stream(10)
    parts = [part async for part in stream]
    assert [len(part["token_ids"]) for part in parts] == [4, 4, 2]
    assert [part.get("finish_reason") for part in parts] == [None, None, "length"]
    assert [token for part in parts for token in part["token_ids"]] == answer_of(PROMPT, 10)
    assert await anext(stream, "at its end") == "at its end"
    fleet.assert_idle()


async def test_the_engine_gets_what_the_caller_said():
    fleet = Fleet(workers="a")
    stream = await fleet.stream(
        model="m",
        namespace=Namespace("adapter", "salt"),
        stop_conditions={"ignore_eos": True, "min_tokens": 3, "stop_token_ids": [7]},
        sampling_options={"temperature": 0.7, "top_p": 0.9},
    )
    await tokens_of(stream)
    [(rank, request)] = fleet.engines.asked
    assert (rank, list(request.token_ids), request.model) == (A, PROMPT, "m")
    assert request.namespace == Namespace("adapter", "salt")
    stop = request.stop_conditions
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos) == (10, 3, True)
    assert stop.stop_token_ids == (7,)
    assert request.sampling_options.given() == {"temperature": 0.7, "top_p": 0.9}
    assert request.dp_rank is None


async def test_a_rank_is_named_where_a_worker_has_several():
    fleet = Fleet(workers="")
    fleet.router.add_worker("a", dp_size=2)
    for dp_rank in (0, 1):
        await tokens_of(await fleet.stream(worker_id="a", dp_rank=dp_rank))
    asked = [(rank.dp_rank, request.dp_rank) for rank, request in fleet.engines.asked]
    assert asked == [(0, 0), (1, 1)]


@pytest.mark.parametrize("breaks_at", [0, 1, 5, 9])
@pytest.mark.parametrize("chunk", [1, 3])
async def test_a_broken_answer_goes_on_elsewhere(breaks_at, chunk):
    fleet = Fleet(breaks={"a": breaks_at}, chunk=chunk)
    conditions = {"min_tokens": 7}
    stream = await fleet.stream(10, worker_id="a", stop_conditions=conditions)
    tokens, reason = await tokens_of(stream)
    assert (tokens, reason) == (answer_of(PROMPT, 10), "length")
    [(failed, lost, migration)] = fleet.losses
    assert (failed, migration.failed, str(lost)) == (A, A, "a has failed")
    assert stream.rank == migration.decision.rank != A
    request = fleet.engines.asked[1][1]
    assert request.token_ids == PROMPT + tokens[:breaks_at]
    stop = request.stop_conditions
    assert (stop.max_tokens, stop.min_tokens) == (10 - breaks_at, max(0, 7 - breaks_at))
    fleet.assert_idle()


async def test_an_answer_that_lacks_only_its_end_is_whole():
    fleet = Fleet(breaks={"a": 10})
    tokens, reason = await tokens_of(await fleet.stream(10, worker_id="a"))
    assert (tokens, reason) == (answer_of(PROMPT, 10), "length")
    assert len(fleet.engines.asked) == 1
    fleet.assert_idle()


async def test_an_answer_that_breaks_twice_goes_on_twice():
    fleet = Fleet(breaks={"a": 4, "b": 2})
    stream = await fleet.stream(10, worker_id="a")
    fleet.router.route([1] * 4000, request_id="load", worker="c")  # so that b is second
    tokens, _ = await tokens_of(stream)
    assert tokens == answer_of(PROMPT, 10)
    assert [rank for rank, _ in fleet.engines.asked] == [A, B, C]
    assert [len(request.token_ids) - len(PROMPT) for _, request in fleet.engines.asked] == [0, 4, 6]
    fleet.router.finish("load")
    fleet.assert_idle()


async def read_until_lost(stream):
    """The tokens that came, and what the error says."""
    tokens = []
    try:
        async for part in stream:
            tokens += part["token_ids"]
    except WorkerLostError as error:
        return tokens, str(error)
    raise AssertionError("it came to its end")


async def test_when_all_workers_fail_the_tokens_so_far_came_before_the_error():
    fleet = Fleet(breaks={"a": 3, "b": 2, "c": 1})
    tokens, message = await read_until_lost(await fleet.stream(10))
    assert tokens == answer_of(PROMPT, 6)
    assert "after 6 tokens" in message
    assert "has failed" in message
    assert "no worker can take the request" in message
    assert len(fleet.losses) == 3
    assert fleet.losses[-1][2] is None
    assert sorted(rank.worker for rank in fleet.router.ranks) == ["a", "b", "c"]  # none is removed
    fleet.assert_idle()


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_a_request_migrates_as_often_as_it_may(limit):
    fleet = Fleet(breaks=dict.fromkeys("abcd", 2), workers="abcd", limit=limit)
    tokens, message = await read_until_lost(await fleet.stream(10))
    assert tokens == answer_of(PROMPT, 2 * (limit + 1))
    assert f"it has migrated as often as it may, {limit} times" in message
    assert len(fleet.engines.asked) == limit + 1
    fleet.assert_idle()


@given(
    breaks=st.lists(st.none() | st.integers(0, 12), min_size=3, max_size=3),
    max_tokens=st.integers(1, 12),
    chunk=st.integers(1, 5),
    close_after=st.none() | st.integers(0, 6),
    seed=st.integers(0, 3),
)
def test_whatever_breaks_no_token_comes_twice_and_no_load_stays(
    breaks, max_tokens, chunk, close_after, seed
):
    points = {name: at for name, at in zip("abc", breaks, strict=True) if at is not None}
    fleet = Fleet(breaks=points, chunk=chunk)
    fleet.router.route([seed] * 400, request_id="other", worker="abc"[seed % 3])

    async def consume():
        tokens, is_whole = [], False
        async with await fleet.stream(max_tokens) as stream:
            try:
                async for part in stream:
                    tokens += part["token_ids"]
                    is_whole = "finish_reason" in part
                    if close_after is not None and len(tokens) > close_after:
                        break
            except WorkerLostError:
                assert len(points) == 3
        return tokens, is_whole

    tokens, is_whole = asyncio.run(consume())
    assert tokens == answer_of(PROMPT, len(tokens))
    assert len(tokens) == max_tokens if is_whole else len(tokens) <= max_tokens
    if close_after is None and len(points) < 3:
        assert is_whole
    asked = [rank for rank, _ in fleet.engines.asked]
    assert len(set(asked)) == len(asked)  # none is asked again
    fleet.router.finish("other")
    fleet.assert_idle()


async def test_an_early_close_frees_the_load_and_stops_the_engine():
    fleet = Fleet()
    stream = await fleet.stream()
    await anext(stream)
    assert (len(fleet.router.load), fleet.engines.num_open) == (1, 1)
    await stream.aclose()
    fleet.assert_idle()
    await stream.aclose()  # is nothing new


async def test_a_stream_of_which_nothing_was_read_frees_its_load():
    fleet = Fleet()
    stream = await fleet.stream()
    assert len(fleet.router.load) == 1
    await stream.aclose()
    assert fleet.engines.asked == []
    fleet.assert_idle()


async def test_a_stream_that_is_dropped_is_closed():
    fleet = Fleet()
    stream = await fleet.stream()
    await anext(stream)
    del stream
    gc.collect()
    await until(lambda: len(fleet.router.load) == 0, "asyncio has closed it")
    fleet.assert_idle()


class Silent:
    """An engine that never says anything."""

    def __init__(self):
        self.is_asked, self.is_closed = asyncio.Event(), False

    async def generate(self, rank, request):
        try:
            self.is_asked.set()
            await asyncio.Event().wait()
            yield Output((1,))
        finally:
            self.is_closed = True


async def test_a_cancelled_consumer_frees_the_load():
    router, client = Router(), Silent()
    router.add_worker("a")
    stream = await KvPushRouter(router, client).generate(PROMPT)
    reading = asyncio.create_task(anext(stream))
    await client.is_asked.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert client.is_closed
    assert len(router.load) == 0


class CountingRouter(Router):
    """Counts renewals by request id, and keeps the options of migrations."""

    def __init__(self, config=None):
        super().__init__(config)
        self.num_renewed, self.migrated = Counter(), []

    def renew(self, request_id):
        self.num_renewed[request_id] += 1
        return super().renew(request_id)

    def migrate(self, request_id, token_ids, **options):
        self.migrated.append((list(token_ids), options))
        return super().migrate(request_id, token_ids, **options)


async def test_a_request_is_renewed_until_its_stream_ends():
    router, client = CountingRouter(RouterConfig(request_expiry_s=0.02)), Silent()
    router.add_worker("a")
    push_router = KvPushRouter(router, client)
    streams = [await push_router.generate(PROMPT) for _ in range(2)]
    ended, lasting = (stream.request_id for stream in streams)
    tasks = [asyncio.create_task(anext(stream)) for stream in streams]
    await until(lambda: router.num_renewed[ended] > 2, "it is renewed")
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    num_ended, num_lasting = router.num_renewed[ended], router.num_renewed[lasting]
    await until(lambda: router.num_renewed[lasting] > num_lasting + 2, "the other one goes on")
    assert router.num_renewed[ended] == num_ended
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert len(router.load) == 0


async def test_a_migration_is_of_the_rest_of_the_answer():
    router, engines = CountingRouter(), VirtualEngines()
    router.add_worker("a", model="m", taints={"t"})
    router.add_worker("b", model="m", taints={"t"})
    engines.breaks["a"] = 4
    stream = await KvPushRouter(router, engines).generate(
        PROMPT,
        model="m",
        namespace=Namespace("adapter"),
        stop_conditions={"max_tokens": 10},
        worker_id="a",
        required_taints=["t"],
        session="s",
    )
    tokens, _ = await tokens_of(stream)
    [(token_ids, options)] = router.migrated
    assert token_ids == PROMPT + tokens[:4]
    assert options == {
        **{"namespace": Namespace("adapter"), "exclude": {"a"}, "model": "m", "override": None},
        **{"max_tokens": 6, "required_taints": ["t"], "session": "s"},
    }


async def test_the_router_hears_of_first_tokens_and_ends():
    fleet = Fleet(breaks={"a": 3})
    stream = await fleet.stream(10, worker_id="a")
    load, request_id = fleet.router.load, stream.request_id
    seen = [load.request(request_id).first_token_s async for _ in stream]
    # Of each engine its own first token, after its prefill.
    assert None not in seen
    assert len(set(seen)) == 2
    quality = fleet.router.model_quality(stream.rank)
    assert (quality.num_first_tokens, quality.num_answers) == (2, 1)


class Refusing:
    async def generate(self, rank, request):
        yield Output((1,))
        raise RequestRefusedError("too long")


async def test_a_refused_request_goes_nowhere_else():
    router = Router()
    for worker in "ab":
        router.add_worker(worker)
    stream = await KvPushRouter(router, Refusing()).generate(PROMPT)
    assert (await anext(stream))["token_ids"] == [1]
    with pytest.raises(RequestRefusedError):
        await anext(stream)
    assert len(router.load) == 0


class Endless:
    """Its streams end without saying why; `num_asked` times."""

    num_asked = 0

    async def generate(self, rank, request):
        self.num_asked += 1
        yield Output((self.num_asked,))


async def test_a_stream_that_just_ends_is_a_lost_worker():
    router, client = Router(), Endless()
    for worker in "ab":
        router.add_worker(worker)
    stream = await KvPushRouter(router, client).generate(PROMPT)
    tokens, message = await read_until_lost(stream)
    assert tokens == [1, 2]
    assert "without a finish reason" in message


async def test_a_worker_that_was_removed_meanwhile_is_left_as_well():
    fleet = Fleet(breaks={"a": 3})
    stream = await fleet.stream(10, worker_id="a")
    tokens = (await anext(stream))["token_ids"]
    fleet.router.remove_worker("a")
    rest, _ = await tokens_of(stream)
    assert tokens + rest == answer_of(PROMPT, 10)
    [(failed, _, migration)] = fleet.losses
    assert (failed, migration) == (A, None)
    assert stream.rank in (B, C)
    fleet.assert_idle()


async def test_a_worker_that_was_removed_may_end_its_answer():
    fleet = Fleet()
    stream = await fleet.stream(10, worker_id="a")
    tokens = (await anext(stream))["token_ids"]
    fleet.router.remove_worker("a")
    rest, _ = await tokens_of(stream)
    assert tokens + rest == answer_of(PROMPT, 10)
    assert not fleet.router.finish(stream.request_id)
    fleet.assert_idle()


async def test_constraints_hold_after_a_failure():
    fleet = Fleet(breaks={"a": 3})
    await tokens_of(await fleet.stream(worker_id="a", workers=["a", "c"]))
    assert [rank for rank, _ in fleet.engines.asked] == [A, C]


@pytest.mark.parametrize("mode", [m for m in Mode.__args__ if m != "direct"])
async def test_requests_migrate_in_every_mode(mode):
    fleet = Fleet(breaks=dict.fromkeys("ab", 2), mode=mode)
    tokens, _ = await tokens_of(await fleet.stream(session="s"))
    assert tokens == answer_of(PROMPT, 10)
    fleet.assert_idle()


class Costs(RouterObserver):
    def __init__(self):
        self.costs = []

    def on_decision(self, decision, request):
        self.costs.append(decision.cost)


@pytest.mark.parametrize("query", [None, {"layer": 0, "expert": 1}, MoeQuery(layer=0, expert=1)])
async def test_an_override_is_of_this_request_and_its_migrations(query):
    fleet, costs = Fleet(breaks={"a": 2}, speculative_ttl_s=0.0), Costs()
    fleet.router.set_observer(costs)
    override = {"overlap_score_weight": 2.0, "moe_query": query}
    await tokens_of(await fleet.stream(worker_id="a", router_config_override=override))
    blocks = len(PROMPT) // 4
    assert costs.costs == [2.0 * blocks + blocks, 2.0 * (blocks + 0.5) + blocks]
    await tokens_of(await fleet.stream(worker_id="b"))
    assert costs.costs[2] not in costs.costs[:2]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"token_ids": [-1]}, HashingError, "cannot hash tokens"),
        ({"worker_id": "nobody"}, NoWorkerError, "nobody"),
        ({"model": 3}, ConfigError, "model"),
        ({"stop_conditions": {"max_tokens": 0}}, ConfigError, "stop_conditions"),
        ({"stop_conditions": {"max_token": 5}}, ConfigError, "max_token"),
        ({"stop_conditions": 5}, ConfigError, "stop_conditions"),
        ({"sampling_options": {"temperature": "hot"}}, ConfigError, "sampling_options"),
        ({"sampling_options": {"n": 2}}, ConfigError, "got 'n'"),
        ({"router_config_override": {"weight": 2}}, ConfigError, "router_config_override"),
        ({"router_config_override": {"overlap_score_weight": -1}}, ConfigError, "1e9"),
        ({"max_tokens": 5}, TypeError, "max_tokens"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_at_once(options, error, text):
    fleet = Fleet()
    with pytest.raises(error, match=text):
        await fleet.push_router.generate(**{"token_ids": PROMPT, **options})
    fleet.assert_idle()


async def test_the_best_worker_is_told_and_nothing_booked():
    fleet = Fleet()
    event = BlockStored(block_hashes=(1, 2), token_ids=tuple(PROMPT[:8]), block_size=4)
    fleet.router.apply(B, EventBatch(events=(event,)))
    best = fleet.push_router.best_worker_id
    assert await best(PROMPT) == ("b", 2)
    assert await best(PROMPT, namespace=Namespace("adapter"), workers=["b"]) == ("b", 0)
    assert await best(PROMPT, workers=["a"], router_config_override={}) == ("a", 0)
    with pytest.raises(TypeError, match="worker_id"):
        await best(PROMPT, worker_id="a")
    fleet.assert_idle()


async def test_potential_loads_are_told_and_nothing_booked():
    fleet = Fleet(workers="a")
    fleet.router.add_worker("b", dp_size=2)
    event = BlockStored(block_hashes=(1, 2), token_ids=tuple(PROMPT[:8]), block_size=4)
    fleet.router.apply(Rank("b", 1), EventBatch(events=(event,)))
    stream = await fleet.stream(worker_id="a")
    loads = await fleet.push_router.get_potential_loads([*PROMPT, 1])
    assert loads == [
        {"worker_id": worker, "dp_rank": dp_rank, **load}
        for worker, dp_rank, load in [
            ("a", 0, {"potential_prefill_tokens": 41, "potential_decode_blocks": 10}),
            ("b", 0, {"potential_prefill_tokens": 41, "potential_decode_blocks": 10}),
            ("b", 1, {"potential_prefill_tokens": 33, "potential_decode_blocks": 10}),
        ]
    ]
    await stream.aclose()
    fleet.assert_idle()


@pytest.mark.parametrize("limit", [-1, 1.5, None, True])
def test_the_limit_is_a_number(limit):
    with pytest.raises(ConfigError, match="migration_limit"):
        KvPushRouter(Router(), VirtualEngines(), migration_limit=limit)


async def test_many_streams_at_once():
    fleet = Fleet(breaks={"a": 5})
    prompts = [np.arange(number, number + 30) for number in range(20)]

    async def one(prompt):
        stream = await fleet.push_router.generate(prompt, stop_conditions={"max_tokens": 9})
        return (await tokens_of(stream))[0]

    answers = await asyncio.gather(*map(one, prompts))
    assert answers == [answer_of(prompt.tolist(), 9) for prompt in prompts]
    fleet.assert_idle()


async def test_workers_that_are_allowed_stay_so_when_the_worker_has_left():
    fleet = Fleet(breaks={"a": 2})
    stream = await fleet.stream(10, worker_id="a", workers=["a"])
    tokens = (await anext(stream))["token_ids"]
    fleet.router.remove_worker("a")
    tokens += (await anext(stream))["token_ids"]
    with pytest.raises(WorkerLostError):
        await anext(stream)
    assert tokens == answer_of(PROMPT, 2)
    fleet.assert_idle()
