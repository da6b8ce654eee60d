"""What a request costs on each candidate, in the unit that is configured.

In:  its hashes; what ranks hold of it (kernels/matching.py); bundles (kernels/bundle.py).
Out: COSTS, OWN_MS and FOUND of each candidate.

Parts for kernels/routing.py. The formulas are those of kernels/costing.py; added here are what
full caches will have lost by then (kernels/forecast.py), prefixes so popular that a copy pays, and
objectives, credits, and what a request says of ranks. Reference: plain Python
(tests/kernels/test_routing.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import active_blocks, costing, forecast, matching, prefix_lengths
from kvplug.kernels._jit import inlined
from kvplug.kernels.bundle import f64_of, i32_of, i64_of, u64_of
from kvplug.kernels.costing import Fleet, Found, Prompt, of

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Index = int | np.int64

# The arrays of a bundle for one index of the fleet. INDEX: the bundle of kernels/matching.py. HELD:
# its answer for the request at hand. INDEX_RANKS: int64[ranks], the index's number of each rank of
# the fleet, 0 for those in another index, which are no candidates. Of each rank, for the request at
# hand: COSTS, OWN_MS, WAITS (ms) and FOUND, float64[3 * ranks], the columns of costing.Found.
# EXPECTED...: kernels/expiring.py.
(
    SETTINGS, INDEX, HELD, RANKS, TRAFFIC, INDEX_RANKS, COSTS, OWN_MS, WAITS, FOUND, ACTIVE,
    FORECAST_SLOTS, FORECAST_KEYS, FORECAST_LINKS, FORECAST_ENDS,
    POPULAR_KEYS, POPULAR_COUNTS,
    EXPECTED_SLOTS, EXPECTED_KEYS, EXPECTED_DEADLINES, EXPECTED_LINKS, EXPECTED_STATE,
    FACTORS, BONUS,
) = range(24)  # fmt: skip
# SETTINGS, float64. COST_IN_MS: 1 for milliseconds, 0 for blocks. Objectives: 0 for none.
# KEEPS_FORECAST: 1 if requests of this router usually cost milliseconds. HAS_CREDITS: 1 if any of
# the three settings after it differs from its default. IS_ADJUSTED: 1 if the request at hand has
# FACTORS, float64[ranks], of its costs, and a BONUS, float64[ranks], in blocks.
(
    BLOCK_SIZE, COST_IN_MS, OVERLAP_WEIGHT, TEMPERATURE, EXPECTED_TTL_S, USES_EVENTS,
    TTFT_OBJECTIVE_MS, ITL_OBJECTIVE_MS, MAX_EXPECTED, MAX_MORE_EXPIRED, KEEPS_FORECAST,
    HAS_CREDITS, DEVICE_CREDIT, CREDIT_DECAY, REQUEST_WEIGHT, IS_ADJUSTED, NUM_SETTINGS,
) = range(17)  # fmt: skip

# A rank that cannot meet an objective comes after all that can: it costs so much more.
LAST_RESORT = 1e12
# A prefix whose requests would keep a rank of its own busy will use a copy often: it costs this
# share of its price. From 0.03 to 0.3, and accumulated regret instead, did the same.
_SHARE_OF_POPULAR = 0.3
_REQUESTS_OF_POPULARITY = 200.0
# A share of the first few requests says little: it is taken as if so many others had come before.
_REQUESTS_BEFORE = 16.0


class Request(NamedTuple):
    """hashes: of its full blocks."""

    hashes: U64
    prompt: Prompt
    now_s: float


@inlined
def forecast_of(bundle: U64) -> forecast.Forecast:
    """The forecast's arrays."""
    return forecast.Forecast(
        u64_of(bundle, FORECAST_SLOTS), u64_of(bundle, FORECAST_KEYS),
        i32_of(bundle, FORECAST_LINKS), i64_of(bundle, FORECAST_ENDS),
    )  # fmt: skip


@inlined
def prefix_length(held: I64, which: Index, at: Index) -> Index:
    """How long a prefix rank `at` of the index holds; which: a row of kernels/matching.py."""
    return np.int64(held[which * (len(held) // matching.NUM_ROWS) + at])


@inlined
def found_of(bundle: U64, rank: Index) -> Found:
    """What `fill_scores` found there."""
    found = f64_of(bundle, FOUND)
    num_ranks = len(found) // 3
    return Found(found[rank], found[num_ranks + rank], found[2 * num_ranks + rank])


@inlined
def _loading_ms(ranks: F64, rank: Index, at: Index, prompt: Prompt, held: I64) -> float:
    """To bring what lower tiers have to the device. Each length includes the nearer memory, so what
    is loaded from a tier is by how much it lengthens the prefix.
    """
    on_device, in_host = (
        prefix_length(held, prefix_lengths.ON_DEVICE, at),
        prefix_length(held, prefix_lengths.IN_HOST, at),
    )
    on_disk, anywhere = (
        prefix_length(held, prefix_lengths.ON_DISK, at),
        prefix_length(held, prefix_lengths.ANY, at),
    )
    host_ms = of(ranks, rank, costing.HOST_MS) * (in_host - on_device)
    disk_ms = of(ranks, rank, costing.DISK_MS) * (on_disk - in_host)
    pool_ms = of(ranks, rank, costing.POOL_MS) * (anywhere - on_disk)
    return float(prompt.block_size * (host_ms + disk_ms + pool_ms))


@inlined
def _find(
    prompt: Prompt, rank: Index, at: Index, confidence: float, ranks: F64, held: I64
) -> Found:
    """What the rank has of a prompt now; `confidence`: how far that can be relied on."""
    depth, anywhere = (
        prefix_length(held, matching.DEPTH, at),
        prefix_length(held, prefix_lengths.ANY, at),
    )
    num_blocks = depth - (1.0 - confidence) * anywhere
    lower = anywhere - prefix_length(held, prefix_lengths.ON_DEVICE, at)
    if lower == 0:
        return Found(num_blocks, num_blocks, 0.0)
    loading_ms = _loading_ms(ranks, rank, at, prompt, held)
    return Found(num_blocks, num_blocks - confidence * lower, confidence * loading_ms)


@inlined
def _find_then(request: Request, rank: Index, found: Found, bundle: U64) -> Found:
    """As it will be when the rank serves the request, if its cache is full and others are before
    it. Lower tiers do not lose what the device evicts, but it has to be loaded.
    """
    then = np.float64(forecast.num_held(forecast_of(bundle), rank, request.hashes))
    # The forecast goes by chunks: within one, what is there now is better known.
    if then < found.num_blocks + forecast.CHUNK:
        then = np.float64(min(then, found.num_blocks))
    if found.num_blocks <= found.num_on_device:
        return Found(then, then, 0.0)
    num_lower = found.num_blocks - found.num_on_device
    num_lost = max(0.0, found.num_on_device - then)
    loading_ms = found.loading_ms * (num_lower + num_lost) / num_lower
    return Found(max(then, found.num_blocks), then, loading_ms)


@inlined
def _fill_times(request: Request, candidates: I64, fleet: Fleet, held: I64, bundle: U64) -> None:
    """FOUND, OWN_MS, and COSTS in milliseconds."""
    ranks, index_ranks = f64_of(bundle, RANKS), i64_of(bundle, INDEX_RANKS)
    costs, own, waits = f64_of(bundle, COSTS), f64_of(bundle, OWN_MS), f64_of(bundle, WAITS)
    out, num_ranks = f64_of(bundle, FOUND), len(index_ranks)
    common = np.inf
    confidences = f64_of(u64_of(bundle, INDEX), matching.CREDITS)[prefix_lengths.NUM_MASKS :]
    settings = f64_of(bundle, SETTINGS)
    has_forecast, has_events = settings[KEEPS_FORECAST] > 0, settings[USES_EVENTS] > 0
    for i in range(len(candidates)):
        rank = candidates[i]
        at = index_ranks[rank]
        found = _find(request.prompt, rank, at, confidences[at], ranks, held)
        capacity = costing.capacity_of_rank(ranks, rank, fleet.capacity)
        is_over = costing.filled_blocks(ranks, rank) > capacity
        # Without events, nothing but the forecast tells what is gone.
        is_blind = not has_events and costing.is_cache_known(ranks, rank)
        if has_forecast and (is_over or is_blind):
            found = _find_then(request, rank, found, bundle)
        out[rank], out[num_ranks + rank] = found.num_blocks, found.num_on_device
        out[2 * num_ranks + rank] = found.loading_ms
        times = costing.times_of(ranks, rank, request.prompt, fleet, waits[rank], found)
        own[rank], costs[rank] = times.own, times.fleet
        common = min(common, found.num_blocks)
    f64_of(bundle, TRAFFIC)[costing.COMMON_BLOCKS] = common if len(candidates) > 1 else -1.0


@inlined
def _fewest_prefill_tokens(candidates: I64, ranks: F64) -> float:
    fewest = np.inf
    for i in range(len(candidates)):
        fewest = min(fewest, of(ranks, candidates[i], costing.PREFILL_TOKENS))
    return float(fewest)


@inlined
def _lost_credit(
    prompt: Prompt, rank: Index, fewest_tokens: float, held: I64, bundle: U64
) -> float:  # fmt: skip
    """By how many blocks what the rank has on its device counts for less: (1 - c * f) of them, f =
    1 / (1 + decay * blocks that it has to prefill before, beyond those of the least busy candidate
    / blocks of the prompt). The credit and decay of Dynamo 1.6.1.
    """
    settings, ranks = f64_of(bundle, SETTINGS), f64_of(bundle, RANKS)
    at = i64_of(bundle, INDEX_RANKS)[rank]
    confidence = f64_of(u64_of(bundle, INDEX), matching.CREDITS)[prefix_lengths.NUM_MASKS + at]
    expected = prefix_length(held, matching.DEPTH, at) - prefix_length(held, prefix_lengths.ANY, at)
    num_blocks = expected + confidence * prefix_length(held, prefix_lengths.ON_DEVICE, at)
    ahead = (of(ranks, rank, costing.PREFILL_TOKENS) - fewest_tokens) / prompt.block_size
    whole = max(1.0, np.ceil(prompt.num_tokens / prompt.block_size))
    kept = settings[DEVICE_CREDIT] / (1.0 + settings[CREDIT_DECAY] * ahead / whole)
    return float((1.0 - kept) * num_blocks)


@inlined
def _fill_costs_in_blocks(request: Request, candidates: I64, held: I64, bundle: U64) -> None:
    ranks, index_ranks = f64_of(bundle, RANKS), i64_of(bundle, INDEX_RANKS)
    costs, active = f64_of(bundle, COSTS), u64_of(bundle, ACTIVE)
    credits = held[matching.CREDIT * (len(held) // matching.NUM_ROWS) :].view(np.float64)
    settings, prompt = f64_of(bundle, SETTINGS), request.prompt
    weight, has_credits = settings[OVERLAP_WEIGHT], settings[HAS_CREDITS] > 0
    fewest = _fewest_prefill_tokens(candidates, ranks) if has_credits else 0.0
    for i in range(len(candidates)):
        rank, lost = candidates[i], 0.0
        if has_credits:
            lost = _lost_credit(prompt, rank, fewest, held, bundle)
        costs[rank] = costing.blocks_cost(
            prompt.num_tokens / prompt.block_size, len(request.hashes), weight,
            credits[index_ranks[rank]] - lost,
            of(ranks, rank, costing.PREFILL_TOKENS) / prompt.block_size,
            of(ranks, rank, costing.ACTIVE_BLOCKS),
            active_blocks.shared(active, request.hashes, rank),
        )  # fmt: skip
        if has_credits:
            costs[rank] += settings[REQUEST_WEIGHT] * of(ranks, rank, costing.NUM_RUNNING)


@inlined
def _credit_in_ms(
    request: Request, candidates: I64, fleet: Fleet, held: I64, bundle: U64
) -> None:  # fmt: skip
    """The same settings in milliseconds: a block that counts for less is computed for as much."""
    ranks, costs = f64_of(bundle, RANKS), f64_of(bundle, COSTS)
    weight, fewest = (
        f64_of(bundle, SETTINGS)[REQUEST_WEIGHT],
        _fewest_prefill_tokens(candidates, ranks),
    )
    for i in range(len(candidates)):
        rank = candidates[i]
        lost = _lost_credit(request.prompt, rank, fewest, held, bundle)
        blocks = (1.0 + fleet.delayed) * lost + weight * of(ranks, rank, costing.NUM_RUNNING)
        costs[rank] += fleet.block_ms * blocks


@inlined
def _adjust(candidates: I64, fleet: Fleet, bundle: U64) -> None:
    """What the request says of ranks: a factor of the cost, and blocks that it is lower by. It may
    go below zero, so that a bonus counts where nothing is left to prefill, too.
    """
    settings, costs = f64_of(bundle, SETTINGS), f64_of(bundle, COSTS)
    factors, bonus = f64_of(bundle, FACTORS), f64_of(bundle, BONUS)
    block = settings[OVERLAP_WEIGHT]
    if settings[COST_IN_MS] > 0:
        block = (1.0 + fleet.delayed) * fleet.block_ms
    for i in range(len(candidates)):
        rank = candidates[i]
        costs[rank] = factors[rank] * costs[rank] - block * bonus[rank]


@inlined
def _cheapest(candidates: I64, costs: F64) -> Index:
    best = np.int64(candidates[0])
    for i in range(1, len(candidates)):
        if costs[candidates[i]] < costs[best]:
            best = np.int64(candidates[i])
    return best


@inlined
def _count_of(key: np.uint64, bundle: U64) -> float:
    """How many requests, of late, had the prefix; -1 if its slot is another's that is asked for."""
    keys, counts = u64_of(bundle, POPULAR_KEYS), f64_of(bundle, POPULAR_COUNTS)
    now = f64_of(bundle, TRAFFIC)[costing.NUM_ROUTED]
    at = np.int64(key % np.uint64(len(keys)))
    count = counts[2 * at] * np.exp((counts[2 * at + 1] - now) / _REQUESTS_OF_POPULARITY)
    if keys[at] == key:
        return float(count)
    return -1.0 if count >= 1.0 else 0.0


@inlined
def _popularity(request: Request, num_blocks: float, bundle: U64) -> float:
    """The share of requests, of late, that have so many leading blocks in common, this one too."""
    traffic = f64_of(bundle, TRAFFIC)
    traffic[costing.ASKED_BLOCKS] = num_blocks
    num_seen = traffic[costing.NUM_ROUTED] + 1.0 + _REQUESTS_BEFORE
    share = 1.0 - np.exp(-num_seen / _REQUESTS_OF_POPULARITY)
    count = _count_of(request.hashes[np.int64(max(1.0, num_blocks)) - 1], bundle) + 1.0
    return float(count / (_REQUESTS_OF_POPULARITY * share))


@inlined
def note_popularity(request: Request, bundle: U64) -> None:
    """The request was routed: count it for the prefix whose popularity was asked."""
    keys, counts = u64_of(bundle, POPULAR_KEYS), f64_of(bundle, POPULAR_COUNTS)
    traffic = f64_of(bundle, TRAFFIC)
    if traffic[costing.ASKED_BLOCKS] > 0:
        key = request.hashes[np.int64(max(1.0, traffic[costing.ASKED_BLOCKS])) - 1]
        count, at = _count_of(key, bundle), np.int64(key % np.uint64(len(keys)))
        if count >= 0.0:
            keys[at], counts[2 * at] = key, count + 1.0
            counts[2 * at + 1] = traffic[costing.NUM_ROUTED]


@inlined
def _encourage_copies(request: Request, candidates: I64, fleet: Fleet, bundle: U64) -> None:
    """Lower the costs of copying a prefix that has the traffic of a rank for each of its copies."""
    costs, num_found = f64_of(bundle, COSTS), f64_of(bundle, FOUND)
    f64_of(bundle, TRAFFIC)[costing.ASKED_BLOCKS] = 0.0
    cheapest = _cheapest(candidates, costs)
    num_blocks, least = num_found[cheapest], costs[cheapest]
    if num_blocks < 1.0 or len(candidates) < 2:
        return
    share, num_copies = _popularity(request, num_blocks, bundle), 0
    for i in range(len(candidates)):
        num_copies += num_found[candidates[i]] >= num_blocks
    if share * len(candidates) < num_copies:
        return
    ranks, waits = f64_of(bundle, RANKS), f64_of(bundle, WAITS)
    copy = Found(num_blocks, num_blocks, 0.0)
    for i in range(len(candidates)):
        rank = candidates[i]
        # Even for nothing, a copy is no cheaper than _SHARE_OF_POPULAR of its cost.
        if num_found[rank] < num_blocks and _SHARE_OF_POPULAR * costs[rank] < least:
            with_copy = costing.times_of(ranks, rank, request.prompt, fleet, waits[rank], copy)
            costs[rank] -= (1.0 - _SHARE_OF_POPULAR) * (costs[rank] - with_copy.fleet)


@inlined
def _raise_misses(request: Request, candidates: I64, bundle: U64) -> None:
    """Ranks that will miss an objective come last."""
    settings, ranks = f64_of(bundle, SETTINGS), f64_of(bundle, RANKS)
    costs, own = f64_of(bundle, COSTS), f64_of(bundle, OWN_MS)
    ttft_ms, itl_ms = settings[TTFT_OBJECTIVE_MS], settings[ITL_OBJECTIVE_MS]
    for i in range(len(candidates)):
        rank = candidates[i]
        between = costing.time_between_tokens(ranks, rank, 1.0, request.prompt.num_tokens)
        num_missed = np.float64(ttft_ms > 0 and own[rank] > ttft_ms)
        num_missed += np.float64(itl_ms > 0 and between > itl_ms)
        costs[rank] += LAST_RESORT * num_missed


@inlined
def fill_scores(request: Request, candidates: I64, fleet: Fleet, held: I64, bundle: U64) -> None:
    """COSTS, OWN_MS and FOUND of each candidate."""
    settings = f64_of(bundle, SETTINGS)
    _fill_times(request, candidates, fleet, held, bundle)
    if settings[COST_IN_MS] > 0:
        _encourage_copies(request, candidates, fleet, bundle)
        if settings[HAS_CREDITS] > 0:
            _credit_in_ms(request, candidates, fleet, held, bundle)
    else:
        f64_of(bundle, TRAFFIC)[costing.ASKED_BLOCKS] = 0.0
        _fill_costs_in_blocks(request, candidates, held, bundle)
    if settings[IS_ADJUSTED] > 0:
        _adjust(candidates, fleet, bundle)
    if settings[TTFT_OBJECTIVE_MS] > 0 or settings[ITL_OBJECTIVE_MS] > 0:
        _raise_misses(request, candidates, bundle)
