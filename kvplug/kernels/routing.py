"""Requests to ranks, in one call: hash, match, cost, pick, account.

In:  token ids or sequence hashes, who may take the requests; bundles (kernels/bundle.py) of an
     index (kernels/matching.py) and of what the fleet is busy with (kernels/scoring.py).
Out: for each request the rank, and the prediction for it; the request counted as the rank's load,
     its blocks expected there.

A fleet with several indexes does it in two stages: SCORE on each, then ACCOUNT on the index of the
rank that was picked. Made of parts of the files that it names. Reference: the steps one by one, in
plain Python (tests/kernels/test_routing.py).
"""

import numpy as np
import numpy.typing as npt

from kvplug.kernels import (
    active_blocks,
    costing,
    expiring,
    forecast,
    matching,
    prefix_lengths,
    scoring,
)
from kvplug.kernels._jit import f8, i8, inlined, kernel, reads, u4, u8, writes
from kvplug.kernels.bundle import f64_of, i32_of, i64_of, u64_of
from kvplug.kernels.costing import NUM_COLUMNS, Fleet, Prompt, of
from kvplug.kernels.hashing import fill_sequence_hashes
from kvplug.kernels.scoring import (
    Request,
    fill_scores,
    forecast_of,
    found_of,
    note_popularity,
    prefix_length,
)
from kvplug.kernels.table import has_room

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Index = int | np.int64

# What to do. With PEEK besides, SCORE learns nothing from the request.
SCORE, ACCOUNT, BOTH, PEEK = 1, 2, 3, 4
# Of each request, float64: what is known of it; what becomes of it.
(
    NUM_TOKENS, NOW_S, MAX_ANSWER_TOKENS,
    RANK, COST, DEPTH, OWN, PREFILL_TOKENS, PREFILL, COMING, NEW_TOKENS, CACHED_TOKENS,
    HOST_TOKENS, DISK_TOKENS, POOL_TOKENS, AHEAD_TOKENS, IS_BUSY, RESIDENT,
    REQUEST_WIDTH,
) = range(19)  # fmt: skip

# A prompt counts as on its way for its time in the queue, but a prediction may be wrong.
_LONGEST_QUEUE_S = 30.0
# Overdue blocks are dropped when requests end, as nobody waits for that; here only if little is
# free, so that the ring does not grow for want of requests that end.
_FREE_PER_BLOCK = 4
_BASE_SEED, _NO_PARENT = np.uint64(1337), np.uint64(0)  # kvplug/hashing.py
_11, _27, _30, _31 = (np.uint64(n) for n in (11, 27, 30, 31))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64 (Steele, Lea, Flood 2014)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@inlined
def _next_random(state: np.uint64) -> np.uint64:
    state = (state ^ (state >> _30)) * _MIX_1
    state = (state ^ (state >> _27)) * _MIX_2
    return state ^ (state >> _31)


@inlined
def _fraction(state: np.uint64) -> float:
    return np.float64(_next_random(state) >> _11) * 2.0**-53


@inlined
def _pick_cheapest(candidates: I64, costs: F64, random: np.uint64) -> Index:
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
def _misses(cost: float, low: float) -> bool:
    """Whether a rank misses an objective that the cheapest one meets."""
    return cost - low >= 0.5 * scoring.LAST_RESORT


@inlined
def _range_of(candidates: I64, costs: F64) -> tuple[float, float]:
    """The lowest and the highest cost of ranks that may be picked."""
    low = costs[candidates[0]]
    for i in range(1, len(candidates)):
        low = min(low, costs[candidates[i]])
    high = low
    for i in range(len(candidates)):
        if not _misses(costs[candidates[i]], low):
            high = max(high, costs[candidates[i]])
    return low, high


@inlined
def _pick_softmax(candidates: I64, costs: F64, temperature: float, random: np.uint64) -> Index:
    """A rank with chance ~ exp(-cost / temperature), costs rescaled to [0, 1]."""
    low, high = _range_of(candidates, costs)
    span, total = high - low if high > low else 1.0, 0.0
    for i in range(len(candidates)):
        if not _misses(costs[candidates[i]], low):
            total += np.exp((low - costs[candidates[i]]) / span / temperature)
    left, last = _fraction(random + _GOLDEN) * total, np.int64(candidates[0])
    for i in range(len(candidates)):
        if not _misses(costs[candidates[i]], low):
            last = np.int64(candidates[i])
            left -= np.exp((low - costs[last]) / span / temperature)
            if left < 0.0:
                break
    return last


@inlined
def _pick(candidates: I64, random: np.uint64, bundle: U64) -> Index:
    costs, settings = f64_of(bundle, scoring.COSTS), f64_of(bundle, scoring.SETTINGS)
    temperature = settings[scoring.TEMPERATURE]
    if temperature > 0:
        return _pick_softmax(candidates, costs, temperature, random)
    return _pick_cheapest(candidates, costs, random)


@inlined
def _expected_ring(bundle: U64) -> expiring.Ring:
    return expiring.Ring(
        u64_of(bundle, scoring.EXPECTED_KEYS), f64_of(bundle, scoring.EXPECTED_DEADLINES),
        i32_of(bundle, scoring.EXPECTED_LINKS), i64_of(bundle, scoring.EXPECTED_STATE),
    )  # fmt: skip


@inlined
def _can_account(request: Request, rank: Index, bundle: U64) -> bool:
    settings, num_blocks = f64_of(bundle, scoring.SETTINGS), len(request.hashes)
    fits = has_room(u64_of(bundle, scoring.ACTIVE), num_blocks)
    if settings[scoring.KEEPS_FORECAST] > 0:
        fits = fits and forecast.can_use(forecast_of(bundle), num_blocks)
    if settings[scoring.EXPECTED_TTL_S] > 0:
        at = i64_of(bundle, scoring.INDEX_RANKS)[rank]
        slots, ring = u64_of(bundle, scoring.EXPECTED_SLOTS), _expected_ring(bundle)
        capacity = np.int64(settings[scoring.MAX_EXPECTED])
        fits = fits and expiring.can_insert(slots, ring, at, num_blocks, capacity)
    return bool(fits)


@inlined
def _expect(request: Request, rank: Index, depth: Index, own_ms: float, bundle: U64) -> None:
    """The rank is about to hold the prompt, once it has come to it in `own_ms`. What events do not
    confirm is renewed by each request that has it.
    """
    settings, ring = f64_of(bundle, scoring.SETTINGS), _expected_ring(bundle)
    first = np.int64(depth if settings[scoring.USES_EVENTS] > 0 else 0)
    last = np.int64(min(len(request.hashes), first + settings[scoring.MAX_EXPECTED]))
    if settings[scoring.EXPECTED_TTL_S] > 0 and last > first:
        at = i64_of(bundle, scoring.INDEX_RANKS)[rank]
        ring.state[expiring.NUM_LOST] += len(request.hashes) - last
        num_blocks, max_expired = last - first, np.int64(0)
        if expiring.num_free(ring) < _FREE_PER_BLOCK * num_blocks:
            max_expired = num_blocks + np.int64(settings[scoring.MAX_MORE_EXPIRED])
        queued_s = (
            min(1e-3 * own_ms, _LONGEST_QUEUE_S) if settings[scoring.USES_EVENTS] > 0 else 0.0
        )
        ttl_s = settings[scoring.EXPECTED_TTL_S] + queued_s
        expiring.insert_blocks(
            u64_of(bundle, scoring.EXPECTED_SLOTS), ring, at, request.now_s,
            ttl_s, max_expired, request.hashes[first:last],
        )  # fmt: skip


@inlined
def _tell(request: Request, rank: Index, held: I64, bundle: U64, out: F64) -> None:
    """What was known of the rank before it had the request."""
    ranks, prompt = f64_of(bundle, scoring.RANKS), request.prompt
    at, found = i64_of(bundle, scoring.INDEX_RANKS)[rank], found_of(bundle, rank)
    cached = costing.cached_tokens(prompt, found.num_blocks)
    new, depth = prompt.num_tokens - cached, prefix_length(held, matching.DEPTH, at)
    token, attention = of(ranks, rank, costing.TOKEN_MS), of(ranks, rank, costing.ATTENTION_MS)
    out[RANK], out[COST] = rank, f64_of(bundle, scoring.COSTS)[rank]
    out[DEPTH], out[OWN] = depth, f64_of(bundle, scoring.OWN_MS)[rank]
    out[PREFILL] = found.loading_ms + costing.prefill_ms(token, attention, new, cached)
    out[PREFILL_TOKENS] = prompt.num_tokens - depth * prompt.block_size
    out[COMING] = max(0.0, prompt.num_blocks - found.num_on_device)
    out[NEW_TOKENS], out[CACHED_TOKENS] = new, cached
    on_device, in_host = (
        prefix_length(held, prefix_lengths.ON_DEVICE, at),
        prefix_length(held, prefix_lengths.IN_HOST, at),
    )
    on_disk, anywhere = (
        prefix_length(held, prefix_lengths.ON_DISK, at),
        prefix_length(held, prefix_lengths.ANY, at),
    )
    out[HOST_TOKENS] = prompt.block_size * (in_host - on_device)
    out[DISK_TOKENS] = prompt.block_size * (on_disk - in_host)
    out[POOL_TOKENS] = prompt.block_size * (anywhere - on_disk)
    still = f64_of(bundle, scoring.WAITS)[rank] / max(of(ranks, rank, costing.WAITING_MS), 1e-9)
    out[AHEAD_TOKENS] = still * of(ranks, rank, costing.COMING_BLOCKS) * prompt.block_size
    out[IS_BUSY] = np.float64(
        of(ranks, rank, costing.NUM_RUNNING) > of(ranks, rank, costing.NUM_WAITING)
    )
    out[RESIDENT] = anywhere


@inlined
def _add_load(ranks: F64, rank: Index, request: Request, num_active: Index, out: F64) -> None:
    prompt, row = request.prompt, NUM_COLUMNS * rank
    if of(ranks, rank, costing.NUM_WAITING) < 0.5:
        ranks[row + costing.FIRST_MS] = out[PREFILL]
        ranks[row + costing.FIRST_SINCE_MS] = 1e3 * request.now_s
    ranks[row + costing.WAITING_MS] += out[PREFILL]
    ranks[row + costing.NUM_WAITING] += 1
    ranks[row + costing.NUM_RUNNING] += 1
    ranks[row + costing.PREFILL_TOKENS] += out[PREFILL_TOKENS]
    ranks[row + costing.CONTEXT_TOKENS] += prompt.num_tokens
    ranks[row + costing.COMING_BLOCKS] += out[COMING]
    ranks[row + costing.ACTIVE_BLOCKS] += num_active


@inlined
def _account(request: Request, rank: Index, fleet: Fleet, bundle: U64, out: F64) -> None:
    """The rank has the request: its load, the forecast of its cache, what is expected there."""
    ranks, prompt = f64_of(bundle, scoring.RANKS), request.prompt
    coming = out[COMING]
    num_active = active_blocks.add(u64_of(bundle, scoring.ACTIVE), request.hashes, rank)
    if f64_of(bundle, scoring.SETTINGS)[scoring.KEEPS_FORECAST] > 0:
        capacity = np.int64(costing.capacity_of_rank(ranks, rank, fleet.capacity))
        new_blocks = np.int64(coming + fleet.answer_tokens / prompt.block_size)
        forecast.use(forecast_of(bundle), rank, request.hashes, new_blocks, capacity)
        note_popularity(request, bundle)
    _add_load(ranks, rank, request, num_active, out)
    costing.note_request(
        f64_of(bundle, scoring.TRAFFIC), 1e3 * request.now_s, out[PREFILL], prompt.num_blocks,
        prompt.num_blocks - coming, found_of(bundle, rank).num_blocks,
    )  # fmt: skip
    _expect(request, rank, np.int64(out[DEPTH]), out[OWN], bundle)


@inlined
def _request_of(row: F64, hashes: U64, block_size: Index) -> Request:
    prompt = Prompt(
        row[NUM_TOKENS], np.float64(len(hashes)), np.float64(block_size), row[MAX_ANSWER_TOKENS]
    )
    return Request(hashes, prompt, row[NOW_S])


@inlined
def _do_stages(
    stages: Index, request: Request, candidates: I64, random: np.uint64, bundle: U64, row: F64
) -> bool:
    """For one request whose hashes are known; False if an array has to grow first."""
    ranks, traffic = f64_of(bundle, scoring.RANKS), f64_of(bundle, scoring.TRAFFIC)
    waits, held = f64_of(bundle, scoring.WAITS), i64_of(bundle, scoring.HELD)
    now_ms, rank = 1e3 * request.now_s, candidates[0]
    costing.fill_waits(ranks, now_ms, waits)
    fleet = costing.fleet_of(ranks, traffic, candidates, request.prompt, waits, now_ms)
    if stages & SCORE != 0:
        index = u64_of(bundle, scoring.INDEX)
        # An engine computes the last token of a prompt in any case.
        max_blocks = np.int64((request.prompt.num_tokens - 1) // request.prompt.block_size)
        matching.fill_answer(request.hashes, max_blocks, request.now_s, index, held)
        fill_scores(request, candidates, fleet, held, bundle)
    if stages == BOTH:
        rank = _pick(candidates, random, bundle)
    if stages & ACCOUNT != 0 and not _can_account(request, rank, bundle):
        return False
    if stages & SCORE != 0 and stages & PEEK == 0:
        costing.note_waits(ranks, candidates, fleet, waits, traffic)
    if stages & ACCOUNT != 0:
        _tell(request, rank, held, bundle, row)
        _account(request, rank, fleet, bundle, row)
    return True


@kernel(i8(i8, u8, u8, reads(u4), reads(i8), reads(u8), writes(u8), writes(f8)))
def route(
    stages: int, seed: np.uint64, random: np.uint64, tokens: U32, candidates: I64, bundle: U64,
    hashes: U64, requests: F64,
) -> Index:  # fmt: skip
    """Do the stages for one request after the other; returns how many are done. If these are not
    all, an array has to grow before the next one.

    requests: float64[requests * REQUEST_WIDTH], of each the columns up to MAX_ANSWER_TOKENS given,
    the others filled. tokens: uint32, of all requests in a row; hashes: uint64, filled with those
    of their full blocks. Without tokens there is one request, and it has all hashes. SCORE leaves
    COSTS, OWN_MS, FOUND and WAITS; ACCOUNT alone takes the rank candidates[0], and what SCORE left.
    SCORE | PEEK leaves them, too, and no other trace.
    """
    block_size = int(f64_of(bundle, scoring.SETTINGS)[scoring.BLOCK_SIZE])
    num_requests, start, first = len(requests) // REQUEST_WIDTH, np.int64(0), np.int64(0)
    for i in range(num_requests):
        row = requests[REQUEST_WIDTH * i : REQUEST_WIDTH * (i + 1)]
        end, last = start + np.int64(row[NUM_TOKENS]), np.int64(len(hashes))
        if len(tokens) > 0:
            last = first + (end - start) // block_size
        mine = hashes[first:last]
        if len(tokens) > 0 and stages & SCORE != 0:
            its_tokens = tokens[start:end]
            fill_sequence_hashes(its_tokens, block_size, seed, _NO_PARENT, _BASE_SEED, mine)
        request = _request_of(row, mine, block_size)
        if not _do_stages(
            stages, request, candidates, random + np.uint64(i) * _GOLDEN, bundle, row
        ):
            return i
        start, first = end, last
    return num_requests
