"""Requests to ranks, in one call: hash, match, cost, pick, account.

In:  token ids or sequence hashes, who may take the requests; bundles (kernels/bundle.py) of an
     index (kernels/matching.py) and of what the fleet is busy with.
Out: for each request the rank and what was expected of it; the request counted as the rank's load,
     its blocks expected there.

A fleet with several indexes does it in two stages: SCORE on each, then ACCOUNT on the index of the
rank that was picked. Made of parts of the files that it names. Reference: the steps one by one, in
plain Python (tests/kernels/test_routing.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import active_blocks, costing, expiring, forecast, matching, reach
from kvplug.kernels._jit import f8, i8, inlined, kernel, reads, u4, u8, writes
from kvplug.kernels.bundle import f64_of, i32_of, i64_of, u64_of
from kvplug.kernels.costing import Fleet, Prompt, Ranks
from kvplug.kernels.hashing import fill_sequence_hashes
from kvplug.kernels.table import has_room

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Index = int | np.int64

# What to do.
SCORE, ACCOUNT, BOTH = 1, 2, 3
# Arrays of the fleet's bundle. INDEX_RANKS: int64[ranks], the index's number of each rank of the
# fleet, 0 for those in another index, which are no candidates. COSTS, OWN_MS, CREDITS (blocks) and
# WAITS (ms): of each rank, for the request at hand. EXPECTED...: kernels/expiring.py.
(
    SETTINGS, COLUMNS, TRAFFIC, INDEX_RANKS, COSTS, OWN_MS, CREDITS, WAITS, ACTIVE,
    FORECAST_SLOTS, FORECAST_KEYS, FORECAST_LINKS, FORECAST_ENDS,
    POPULAR_KEYS, POPULAR_COUNTS,
    EXPECTED_SLOTS, EXPECTED_KEYS, EXPECTED_DEADLINES, EXPECTED_LINKS, EXPECTED_STATE,
) = range(20)  # fmt: skip
# SETTINGS, float64. COST_IN_MS: 1 for milliseconds, 0 for blocks. Objectives: 0 for none.
(
    COST_IN_MS, OVERLAP_WEIGHT, TEMPERATURE, EXPECTED_TTL_S, USES_EVENTS, TTFT_OBJECTIVE_MS,
    ITL_OBJECTIVE_MS, MAX_EXPECTED, MAX_MORE_EXPIRED, NUM_SETTINGS,
) = range(10)  # fmt: skip
# Out, float64, of each request.
(
    RANK, COST, DEPTH, OWN, PREFILL, COMING, NEW_TOKENS, CACHED_TOKENS, AHEAD_TOKENS, IS_BUSY,
    NUM_OUT,
) = range(11)  # fmt: skip

_BASE_SEED, _NO_PARENT = np.uint64(1337), np.uint64(0)  # kvplug/hashing.py
_0, _1, _11, _27, _30, _31 = (np.uint64(n) for n in (0, 1, 11, 27, 30, 31))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64 (Steele, Lea, Flood 2014)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
# A rank that cannot meet an objective comes after all that can.
_LAST_RESORT = 1e12
# A prefix whose requests would keep a rank of its own busy will use a copy often: it costs this
# share of its price. From 0.03 to 0.3, and accumulated regret instead, did the same.
_SHARE_OF_POPULAR = 0.3
_REQUESTS_OF_POPULARITY = 200.0


class Request(NamedTuple):
    """hashes: of its full blocks."""

    hashes: U64
    prompt: Prompt
    now_s: float


@inlined
def _forecast_of(bundle: U64) -> forecast.Forecast:
    return forecast.Forecast(
        u64_of(bundle, FORECAST_SLOTS), u64_of(bundle, FORECAST_KEYS),
        i32_of(bundle, FORECAST_LINKS), i64_of(bundle, FORECAST_ENDS),
    )  # fmt: skip


@inlined
def _held_then(request: Request, rank: Index, at: Index, held: I64, bundle: U64) -> float:
    """Blocks of credit at the time at which the rank will serve the request, if its cache is full
    and others are before it. Lower tiers and pools do not lose what the device evicts.
    """
    num = len(held) // matching.NUM_ROWS
    credit = held[matching.CREDIT * num :].view(np.float64)[at]
    anywhere = held[reach.ANY * num + at]
    on_device = held[reach.ON_DEVICE * num + at]
    then = np.float64(forecast.num_held(_forecast_of(bundle), rank, request.hashes))
    if anywhere == on_device:
        return then
    return max(then, credit - max(0.0, on_device - then))


@inlined
def _fill_credits(request: Request, candidates: I64, fleet: Fleet, held: I64, bundle: U64) -> None:
    """CREDITS of each candidate: blocks that it need not compute, lower tiers as they count."""
    num, has_forecast = len(held) // matching.NUM_ROWS, f64_of(bundle, SETTINGS)[COST_IN_MS] > 0
    credit, credits = held[matching.CREDIT * num :].view(np.float64), f64_of(bundle, CREDITS)
    ranks, index_ranks = costing.ranks_of(f64_of(bundle, COLUMNS)), i64_of(bundle, INDEX_RANKS)
    for rank in range(len(credits)):
        credits[rank] = credit[index_ranks[rank]]
    for i in range(len(candidates)):
        rank = candidates[i]
        capacity = costing.capacity_of_rank(ranks, rank, fleet.capacity)
        if has_forecast and costing.filled_blocks(ranks, rank) > capacity:
            credits[rank] = _held_then(request, rank, index_ranks[rank], held, bundle)


@inlined
def _fill_costs_in_blocks(request: Request, candidates: I64, bundle: U64) -> None:
    ranks, credits = costing.ranks_of(f64_of(bundle, COLUMNS)), f64_of(bundle, CREDITS)
    costs, active = f64_of(bundle, COSTS), u64_of(bundle, ACTIVE)
    weight, prompt = f64_of(bundle, SETTINGS)[OVERLAP_WEIGHT], request.prompt
    for i in range(len(candidates)):
        rank = candidates[i]
        costs[rank] = costing.blocks_cost(
            prompt.num_tokens / prompt.block_size, len(request.hashes), weight, credits[rank],
            ranks.prefill_tokens[rank] / prompt.block_size,
            ranks.active_blocks[rank],
            active_blocks.shared(active, request.hashes, rank),
        )  # fmt: skip


@inlined
def _fill_times(request: Request, fleet: Fleet, bundle: U64) -> None:
    """COSTS and OWN_MS of all ranks, in milliseconds."""
    ranks, waits = costing.ranks_of(f64_of(bundle, COLUMNS)), f64_of(bundle, WAITS)
    costs, own, credits = f64_of(bundle, COSTS), f64_of(bundle, OWN_MS), f64_of(bundle, CREDITS)
    for rank in range(len(costs)):
        times = costing.times_of(ranks, rank, request.prompt, fleet, waits[rank], credits[rank])
        own[rank], costs[rank] = times.own, times.fleet


@inlined
def _cheapest(candidates: I64, costs: F64) -> Index:
    best = np.int64(candidates[0])
    for i in range(1, len(candidates)):
        if costs[candidates[i]] < costs[best]:
            best = np.int64(candidates[i])
    return best


@inlined
def _popularity(request: Request, credit: float, bundle: U64) -> float:
    """The share of requests, of late, that have the prefix in common which the credit is for."""
    keys, counts = u64_of(bundle, POPULAR_KEYS), f64_of(bundle, POPULAR_COUNTS)
    now = f64_of(bundle, TRAFFIC)[costing.NUM_ROUTED]
    key = request.hashes[max(0, np.int64(credit) - 1)]
    at = np.int64(key % np.uint64(len(keys)))
    count = counts[2 * at] * np.exp((counts[2 * at + 1] - now) / _REQUESTS_OF_POPULARITY)
    if keys[at] != key and count >= 1.0:
        return 0.0  # the slot belongs to one that is asked for more
    count = count + 1.0 if keys[at] == key else 1.0
    keys[at], counts[2 * at], counts[2 * at + 1] = key, count, now
    seen = 1.0 - np.exp(-(now + 1.0) / _REQUESTS_OF_POPULARITY)
    return count / (_REQUESTS_OF_POPULARITY * seen)


@inlined
def _encourage_copies(request: Request, candidates: I64, fleet: Fleet, bundle: U64) -> None:
    """Lower the costs of copying a prefix that has the traffic of a rank for each of its copies."""
    costs, credits = f64_of(bundle, COSTS), f64_of(bundle, CREDITS)
    credit = credits[_cheapest(candidates, costs)]
    if credit < 1.0 or len(candidates) < 2:
        return
    share, num_copies = _popularity(request, credit, bundle), 0
    for i in range(len(candidates)):
        num_copies += credits[candidates[i]] >= credit
    if share * len(candidates) < num_copies:
        return
    ranks, waits = costing.ranks_of(f64_of(bundle, COLUMNS)), f64_of(bundle, WAITS)
    prompt = request.prompt
    for i in range(len(candidates)):
        rank = candidates[i]
        if credits[rank] < credit:
            as_copy = costing.times_of(ranks, rank, prompt, fleet, waits[rank], credit)
            price = costs[rank] - as_copy.fleet
            costs[rank] -= (1.0 - _SHARE_OF_POPULAR) * price


@inlined
def _raise_misses(candidates: I64, bundle: U64) -> None:
    """Ranks that will miss an objective come last."""
    settings, ranks = f64_of(bundle, SETTINGS), costing.ranks_of(f64_of(bundle, COLUMNS))
    costs, own = f64_of(bundle, COSTS), f64_of(bundle, OWN_MS)
    for i in range(len(candidates)):
        rank = candidates[i]
        running = ranks.num_running[rank] + 1.0
        step = ranks.step_ms[rank]
        step += ranks.sequence_ms[rank] * running
        late = settings[TTFT_OBJECTIVE_MS] > 0 and own[rank] > settings[TTFT_OBJECTIVE_MS]
        slow = settings[ITL_OBJECTIVE_MS] > 0 and step > settings[ITL_OBJECTIVE_MS]
        costs[rank] += _LAST_RESORT * (np.float64(late) + np.float64(slow))


@inlined
def _score(request: Request, candidates: I64, fleet: Fleet, held: I64, bundle: U64) -> None:
    """COSTS, OWN_MS and CREDITS of each candidate."""
    settings = f64_of(bundle, SETTINGS)
    _fill_credits(request, candidates, fleet, held, bundle)
    _fill_times(request, fleet, bundle)
    if settings[COST_IN_MS] > 0:
        _encourage_copies(request, candidates, fleet, bundle)
    else:
        _fill_costs_in_blocks(request, candidates, bundle)
    if settings[TTFT_OBJECTIVE_MS] > 0 or settings[ITL_OBJECTIVE_MS] > 0:
        _raise_misses(candidates, bundle)


@inlined
def _next_random(state: np.uint64) -> np.uint64:
    state = (state ^ (state >> _30)) * _MIX_1
    state = (state ^ (state >> _27)) * _MIX_2
    return state ^ (state >> _31)


@inlined
def _fraction(state: np.uint64) -> float:
    return np.float64(_next_random(state) >> _11) * 2.0**-53


@inlined
def _pick_lowest(candidates: I64, costs: F64, random: np.uint64) -> Index:
    """The lowest cost; exact ties at random: the k-th of them takes the place with chance 1 / k."""
    best, num_best = np.int64(candidates[0]), 1
    for i in range(1, len(candidates)):
        rank = np.int64(candidates[i])
        if costs[rank] < costs[best]:
            best, num_best = rank, 1
        elif costs[rank] == costs[best]:
            num_best += 1
            random += _GOLDEN
            if _fraction(random) * num_best < 1.0:
                best = rank
    return best


@inlined
def _pick_softmax(candidates: I64, costs: F64, temperature: float, random: np.uint64) -> Index:
    """A rank with chance ~ exp(-cost / temperature), costs rescaled to [0, 1]."""
    low = costs[candidates[0]]
    high = low
    for i in range(1, len(candidates)):
        low, high = min(low, costs[candidates[i]]), max(high, costs[candidates[i]])
    span, total = high - low if high > low else 1.0, 0.0
    for i in range(len(candidates)):
        total += np.exp(-(costs[candidates[i]] - low) / span / temperature)
    left = _fraction(random + _GOLDEN) * total
    for i in range(len(candidates)):
        left -= np.exp(-(costs[candidates[i]] - low) / span / temperature)
        if left < 0.0:
            return np.int64(candidates[i])
    return np.int64(candidates[len(candidates) - 1])


@inlined
def _pick(candidates: I64, random: np.uint64, bundle: U64) -> Index:
    costs, temperature = f64_of(bundle, COSTS), f64_of(bundle, SETTINGS)[TEMPERATURE]
    if temperature > 0:
        return _pick_softmax(candidates, costs, temperature, random)
    return _pick_lowest(candidates, costs, random)


@inlined
def _expected_ring(bundle: U64) -> expiring.Ring:
    return expiring.Ring(
        u64_of(bundle, EXPECTED_KEYS), f64_of(bundle, EXPECTED_DEADLINES),
        i32_of(bundle, EXPECTED_LINKS), i64_of(bundle, EXPECTED_STATE),
    )  # fmt: skip


@inlined
def _can_account(request: Request, rank: Index, bundle: U64) -> bool:
    settings, num_blocks = f64_of(bundle, SETTINGS), len(request.hashes)
    fits = has_room(u64_of(bundle, ACTIVE), num_blocks)
    if settings[COST_IN_MS] > 0:
        fits = fits and forecast.can_use(_forecast_of(bundle), num_blocks)
    if settings[EXPECTED_TTL_S] > 0:
        at, slots = i64_of(bundle, INDEX_RANKS)[rank], u64_of(bundle, EXPECTED_SLOTS)
        capacity, ring = np.int64(settings[MAX_EXPECTED]), _expected_ring(bundle)
        fits = fits and expiring.can_insert(slots, ring, at, num_blocks, capacity)
    return bool(fits)


@inlined
def _expect(request: Request, rank: Index, depth: Index, bundle: U64) -> None:
    """The rank is about to hold the prompt. What events do not confirm is renewed by each request
    that has it.
    """
    settings, ring = f64_of(bundle, SETTINGS), _expected_ring(bundle)
    first = depth if settings[USES_EVENTS] > 0 else np.int64(0)
    last = min(len(request.hashes), first + np.int64(settings[MAX_EXPECTED]))
    if settings[EXPECTED_TTL_S] > 0 and last > first:
        at = i64_of(bundle, INDEX_RANKS)[rank]
        ring.state[expiring.NUM_LOST] += len(request.hashes) - last
        max_expired = last - first + np.int64(settings[MAX_MORE_EXPIRED])
        expiring.insert_blocks(
            u64_of(bundle, EXPECTED_SLOTS), ring, at, request.now_s, settings[EXPECTED_TTL_S],
            max_expired, request.hashes[first:last],
        )  # fmt: skip


@inlined
def _tell(request: Request, rank: Index, held: I64, bundle: U64, out: F64) -> None:
    """What was known of the rank before it had the request."""
    ranks, prompt = costing.ranks_of(f64_of(bundle, COLUMNS)), request.prompt
    num, credit = len(held) // matching.NUM_ROWS, f64_of(bundle, CREDITS)[rank]
    cached = costing.cached_tokens(prompt, credit)
    new = prompt.num_tokens - cached
    token, attention = ranks.token_ms[rank], ranks.attention_ms[rank]
    out[RANK], out[COST] = rank, f64_of(bundle, COSTS)[rank]
    out[DEPTH] = held[matching.DEPTH * num + i64_of(bundle, INDEX_RANKS)[rank]]
    out[OWN], out[NEW_TOKENS], out[CACHED_TOKENS] = f64_of(bundle, OWN_MS)[rank], new, cached
    out[PREFILL] = costing.prefill_ms(token, attention, new, cached)
    out[COMING] = max(0.0, prompt.num_blocks - credit)
    still = f64_of(bundle, WAITS)[rank] / max(ranks.waiting_ms[rank], 1e-9)
    out[AHEAD_TOKENS] = still * ranks.coming_blocks[rank] * prompt.block_size
    running = ranks.num_running[rank]
    out[IS_BUSY] = np.float64(running > ranks.num_waiting[rank])


@inlined
def _add_load(ranks: Ranks, rank: Index, request: Request, num_active: Index, out: F64) -> None:
    prompt = request.prompt
    if ranks.num_waiting[rank] < 0.5:
        ranks.first_ms[rank] = out[PREFILL]
        ranks.first_since_ms[rank] = 1e3 * request.now_s
    ranks.waiting_ms[rank] += out[PREFILL]
    ranks.num_waiting[rank] += 1
    ranks.num_running[rank] += 1
    prefill_tokens = prompt.num_tokens - out[DEPTH] * prompt.block_size
    ranks.prefill_tokens[rank] += prefill_tokens
    ranks.coming_blocks[rank] += out[COMING]
    ranks.active_blocks[rank] += num_active


@inlined
def _account(request: Request, rank: Index, fleet: Fleet, bundle: U64, out: F64) -> None:
    """The rank has the request: its load, the forecast of its cache, what is expected there."""
    ranks, prompt = costing.ranks_of(f64_of(bundle, COLUMNS)), request.prompt
    coming = out[COMING]
    num_active = active_blocks.add(u64_of(bundle, ACTIVE), request.hashes, rank)
    if f64_of(bundle, SETTINGS)[COST_IN_MS] > 0:
        capacity = np.int64(costing.capacity_of_rank(ranks, rank, fleet.capacity))
        new_blocks = np.int64(coming + fleet.answer_tokens / prompt.block_size)
        forecast.use(_forecast_of(bundle), rank, request.hashes, new_blocks, capacity)
    _add_load(ranks, rank, request, num_active, out)
    costing.note_request(
        f64_of(bundle, TRAFFIC), 1e3 * request.now_s, out[PREFILL], prompt.num_blocks,
        prompt.num_blocks - coming,
    )  # fmt: skip
    _expect(request, rank, np.int64(out[DEPTH]), bundle)


@kernel(
    i8(
        i8, reads(u4), reads(i8), i8, u8, f8, u8, f8, reads(i8), reads(u8), reads(u8),
        writes(u8), writes(i8), writes(f8),
    )
)  # fmt: skip
def route(
    stages: Index, tokens: U32, ends: I64, block_size: Index, seed: np.uint64,
    now_s: float, random: np.uint64, max_answer_tokens: float, candidates: I64,
    index: U64, bundle: U64, hashes: U64, held: I64, out: F64,
) -> Index:  # fmt: skip
    """Do the stages for request after request; returns how many are done: fewer than there are if
    an array has to grow first, for the first that is not.

    tokens: uint32, request i up to ends[i]; hashes: uint64, filled with those of their full blocks.
    Without tokens there is one request of ends[0] tokens, and it has all hashes. held: as
    matching.overlap; out: float64[requests * NUM_OUT]. SCORE leaves COSTS, OWN_MS, CREDITS and
    WAITS; ACCOUNT alone takes the rank candidates[0], and what SCORE left.
    """
    ranks, traffic = costing.ranks_of(f64_of(bundle, COLUMNS)), f64_of(bundle, TRAFFIC)
    waits, start, first = f64_of(bundle, WAITS), np.int64(0), np.int64(0)
    for i in range(len(ends)):
        num_tokens = ends[i] - start
        last = first + num_tokens // block_size if len(tokens) > 0 else np.int64(len(hashes))
        mine, row = hashes[first:last], out[NUM_OUT * i : NUM_OUT * (i + 1)]
        prompt = Prompt(
            np.float64(num_tokens), np.float64(len(mine)), np.float64(block_size), max_answer_tokens
        )
        request, rank = Request(mine, prompt, now_s), np.int64(candidates[0])
        costing.fill_waits(ranks, 1e3 * now_s, waits)
        fleet = costing.fleet_of(ranks, traffic, candidates, prompt, waits)
        if stages & SCORE != 0:
            if len(tokens) > 0:
                its_tokens = tokens[start : ends[i]]
                fill_sequence_hashes(its_tokens, block_size, seed, _NO_PARENT, _BASE_SEED, mine)
            matching.fill_answer(mine, now_s, index, held)
            _score(request, candidates, fleet, held, bundle)
        if stages == BOTH:
            rank = _pick(candidates, random + np.uint64(i) * _GOLDEN, bundle)
        if stages & ACCOUNT != 0:
            if not _can_account(request, rank, bundle):
                return i
            _tell(request, rank, held, bundle, row)
            _account(request, rank, fleet, bundle, row)
        start, first = ends[i], last
    return len(ends)
