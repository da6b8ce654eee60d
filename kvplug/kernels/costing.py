"""What a request would cost on a rank: in blocks, or in milliseconds.

In:  what the rank holds of the request, what it is busy with, how fast it is.   Out: a number.

docs/routing.md explains both formulas. `blocks_cost` is that of Dynamo's KV cache routing. What is
known of ranks is in one array, a row of NUM_COLUMNS for each. Reference: the formulas in plain
Python (tests/kernels/test_costing.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import f8, inlined, kernel, void, writes

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Index = int | np.int64

# What is known of a rank, float64[NUM_COLUMNS] of each. What it is busy with: the predicted prefill
# of requests without a first token, and of the oldest of them, computed since FIRST_SINCE_MS; how
# many such requests there are, and how many in flight; tokens to compute for them; tokens and
# distinct blocks of the prompts in flight; blocks that requests without a first token will store.
# Its cache: blocks on its device, UNKNOWN_BLOCKS if nobody tells, and for how many there is room,
# 0 if nobody knows. How fast it is: kvplug/router/engine_model.py. USUAL_WAIT_MS: what requests
# would have waited there of late, as noted last at NOTED_MS.
(
    WAITING_MS, FIRST_MS, FIRST_SINCE_MS, NUM_WAITING, NUM_RUNNING, PREFILL_TOKENS, CONTEXT_TOKENS,
    ACTIVE_BLOCKS, COMING_BLOCKS, RESIDENT_BLOCKS, CAPACITY_BLOCKS,
    FIXED_MS, TOKEN_MS, ATTENTION_MS, HOST_MS, DISK_MS, POOL_MS,
    BUSY_MS, STEP_MS, SEQUENCE_MS, CONTEXT_MS, USUAL_WAIT_MS, NOTED_MS, NUM_COLUMNS,
) = range(24)  # fmt: skip

NEVER_MS = -1e15  # NOTED_MS before the first request
UNKNOWN_BLOCKS = -1.0

# What the requests of one model and block size are like, as moving means. ANSWER_MS: from the first
# token to the last. DISTINCT_BLOCKS: of prompts, blocks that not every candidate held; HELD_BLOCKS:
# of these, those that the chosen one held.
(
    NUM_ROUTED, LAST_MS, GAP_MS, WORK_MS, PROMPT_BLOCKS, CACHED_BLOCKS, ANSWER_TOKENS, ANSWER_MS,
    DISTINCT_BLOCKS, HELD_BLOCKS,
) = range(10)  # fmt: skip
USUAL_CAPACITY = 10  # blocks of a rank's cache, of those that are known; 0: of none
# Of the request at hand: leading blocks whose popularity was asked, and that every candidate holds;
# -1 if there is but one.
ASKED_BLOCKS, COMMON_BLOCKS = 11, 12
TRAFFIC_WIDTH = 13

# A queue is priced as if the fleet were busy nine tenths of the time at most: at 1 a price has no
# bound, and 0.8 or 0.95 instead made no difference that could be measured.
_MAX_UTILISATION = 0.9
# To evict for a prompt here while another rank has room for it costs what is evicted twice: it
# comes back, and evicts again.
_PRICE_WITH_ROOM = 2.0
# Whoever waits until others leave room in a cache has as many behind as before.
_PRICE_OF_ROOM = 2.0
# Where a prefix goes, so many times as many requests follow as blocks are found again on average,
# and so many at most. A long wait is a rare one and says little of the next: of a wait, so many
# mean prefills count at most (docs/decisions.md, 49 and 50).
_PRICE_OF_LATER, _MOST_LATER, _LONGEST_WAIT = 1.5, 40.0, 2.5
# The mean of waits is over so many requests, and as many for each rank of a large fleet, but not
# over a longer time.
_REQUESTS_OF_WAIT, _REQUESTS_OF_RANK, _MEMORY_MS = 64.0, 16.0, 30_000.0
_REQUESTS_OF_RATE, _REQUESTS_OF_REUSE, _ANSWERS_OF_MEAN = 64.0, 1000.0, 50.0
# A first burst is not taken for the rate: until then FIRST_GAP_MS is believed as many times.
FIRST_GAP_MS, _FIRST_REQUESTS = 100.0, 8.0


class Fleet(NamedTuple):
    """What holds for all ranks as one request is routed.

    delayed: how many requests' worth of work is behind a millisecond of prefill, so what it delays;
    reuse: how likely an evicted block is wanted again; block_ms: to compute a block, on average;
    capacity: in blocks, of ranks whose own is not known; answer_tokens: that are expected; stay_ms:
    for how long a request needs its blocks, 0 if no capacity is known; num_later: requests that
    will follow this one to its rank; mean_wait_ms, least_wait_ms: of the usual waits of candidates.
    """

    delayed: float
    reuse: float
    block_ms: float
    capacity: float
    answer_tokens: float
    stay_ms: float
    num_later: float
    mean_wait_ms: float
    least_wait_ms: float
    now_ms: float


class Prompt(NamedTuple):
    """Of a request: its tokens, its full blocks, tokens per block, how long its answer may get."""

    num_tokens: float
    num_blocks: float
    block_size: float
    max_answer_tokens: float


class Found(NamedTuple):
    """Of a prompt on a rank: leading blocks that need not be computed, in any tier, and on its
    device; how long it takes to load the others.
    """

    num_blocks: float
    num_on_device: float
    loading_ms: float


@inlined
def of(ranks: F64, rank: Index, column: int) -> float:
    """What is known of a rank."""
    return float(ranks[NUM_COLUMNS * rank + column])


@inlined
def blocks_cost(
    prompt_blocks: float, num_full_blocks: int, overlap_weight: float,
    credit: float, prefill_blocks: float, active_blocks: float, active_depth: Index,
) -> float:  # fmt: skip
    """overlap_weight * prefill + decode, in blocks.

    prefill: what the rank already has to prefill, plus this prompt, less its credit, at least 0.
    decode: blocks of live requests there, plus this prompt's that no live request there shares.
    """
    prefill = max(0.0, prefill_blocks + prompt_blocks - credit)
    return overlap_weight * prefill + (active_blocks + num_full_blocks - active_depth)


@inlined
def cached_tokens(prompt: Prompt, num_found: float) -> float:
    """An engine computes a prompt's last token in any case, for the answer's first one."""
    return max(0.0, min(num_found * prompt.block_size, prompt.num_tokens - 1.0))


@inlined
def prefill_ms(token_ms: float, attention_ms: float, new: float, cached: float) -> float:
    """To compute new tokens behind cached ones."""
    return token_ms * new + attention_ms * (new * (cached + 0.5 * new))


@inlined
def wait_ms(ranks: F64, rank: Index, now_ms: float) -> float:
    """Until the rank has prefilled what was routed to it. It is taken to be at work on the oldest
    request, but never further than that one.
    """
    since = max(0.0, now_ms - of(ranks, rank, FIRST_SINCE_MS))
    left = float(of(ranks, rank, WAITING_MS) - min(since, of(ranks, rank, FIRST_MS)))
    return left if of(ranks, rank, NUM_WAITING) > 0.5 else 0.0


@inlined
def _busy_ms(ranks: F64, rank: Index) -> float:
    """What a prefill takes longer while others decode."""
    is_busy = of(ranks, rank, NUM_RUNNING) > of(ranks, rank, NUM_WAITING)
    return of(ranks, rank, BUSY_MS) if is_busy else 0.0


@inlined
def _is_known(ranks: F64, rank: Index, now_ms: float) -> bool:
    """Whether requests could have gone there of late: not so for a newcomer, nor for a rank that
    was away.
    """
    return bool(now_ms - of(ranks, rank, NOTED_MS) < _MEMORY_MS)


@inlined
def _usual_waits(ranks: F64, candidates: I64, now_ms: float) -> tuple[float, float]:
    """The mean and the least of what is known; 0 if nothing is."""
    total, num_known, least = 0.0, 0, np.inf
    for i in range(len(candidates)):
        if _is_known(ranks, candidates[i], now_ms):
            wait = of(ranks, candidates[i], USUAL_WAIT_MS)
            total, num_known, least = total + wait, num_known + 1, min(least, wait)
    return (total / num_known, least) if num_known > 0 else (0.0, 0.0)


@inlined
def _usual_wait_ms(ranks: F64, rank: Index, fleet: Fleet) -> float:
    """Of a rank of which nothing is known, the mean: at 0 it would draw all at once."""
    if _is_known(ranks, rank, fleet.now_ms):
        return of(ranks, rank, USUAL_WAIT_MS)
    return fleet.mean_wait_ms


@inlined
def note_waits(ranks: F64, candidates: I64, fleet: Fleet, waits: F64, traffic: F64) -> None:
    """Move the usual wait of each candidate on by what this request would have waited there:
    requests that come at random see what is usual (Wolff 1982). A request that could go to one
    rank only says nothing of where others should go.
    """
    least_share = 1.0 / max(_REQUESTS_OF_WAIT, _REQUESTS_OF_RANK * len(waits))
    longest = _LONGEST_WAIT * traffic[WORK_MS]
    for i in range(len(candidates) if len(candidates) > 1 else 0):
        rank, row = candidates[i], NUM_COLUMNS * candidates[i]
        wait, usual = min(waits[rank], longest), _usual_wait_ms(ranks, rank, fleet)
        share = least_share
        if _is_known(ranks, rank, fleet.now_ms):
            share = max(least_share, (fleet.now_ms - of(ranks, rank, NOTED_MS)) / _MEMORY_MS)
        ranks[row + USUAL_WAIT_MS] = usual + share * (wait + _busy_ms(ranks, rank) - usual)
        ranks[row + NOTED_MS] = fleet.now_ms


@inlined
def capacity_of_rank(ranks: F64, rank: Index, usual: float) -> float:
    """In blocks; what it holds fits into it."""
    known = of(ranks, rank, CAPACITY_BLOCKS)
    return float(max(known if known > 0.0 else usual, of(ranks, rank, RESIDENT_BLOCKS)))


@inlined
def is_cache_known(ranks: F64, rank: Index) -> bool:
    """Whether anybody tells how many blocks the rank holds."""
    return bool(of(ranks, rank, RESIDENT_BLOCKS) >= 0.0)


@inlined
def filled_blocks(ranks: F64, rank: Index) -> float:
    """What the rank holds, as far as that is known, and what is on its way there."""
    return float(max(0.0, of(ranks, rank, RESIDENT_BLOCKS)) + of(ranks, rank, COMING_BLOCKS))


class Times(NamedTuple):
    """Milliseconds: the time to first token of a request on a rank, and what it costs the fleet."""

    own: float
    fleet: float


@inlined
def time_between_tokens(ranks: F64, rank: Index, num_more: float, tokens_more: float) -> float:
    """Milliseconds of a decoding step with so many more requests and prompt tokens."""
    sequences = of(ranks, rank, SEQUENCE_MS) * (of(ranks, rank, NUM_RUNNING) + num_more)
    context = of(ranks, rank, CONTEXT_MS) * (of(ranks, rank, CONTEXT_TOKENS) + tokens_more)
    return float(of(ranks, rank, STEP_MS) + sequences + context)


@inlined
def _decoding_ms(ranks: F64, rank: Index, prompt: Prompt, answer: float) -> float:
    """By how much the answer slows others down."""
    longer = of(ranks, rank, SEQUENCE_MS) + of(ranks, rank, CONTEXT_MS) * (
        prompt.num_tokens + 0.5 * answer
    )
    return float(longer * of(ranks, rank, NUM_RUNNING) * answer)


@inlined
def _room_wait_ms(ranks: F64, rank: Index, over: float, capacity: float, stay_ms: float) -> float:
    """Until those before it have ended, if so many blocks of the requests in flight, this one
    included, do not fit into the cache: who waits, over who runs, times how long these stay (Little
    1961). Who waits may wait for the prefill; at least half of those that fit are taken to run.
    """
    if over <= 0.0:
        return 0.0
    in_flight, waiting = of(ranks, rank, NUM_RUNNING), of(ranks, rank, NUM_WAITING)
    active = max(1.0, of(ranks, rank, ACTIVE_BLOCKS))
    num_fit = in_flight * min(1.0, capacity / active)
    running = max(1.0, max(in_flight - waiting, 0.5 * num_fit))
    return float(stay_ms * (waiting + min(1.0, over * in_flight / active)) / running)


@inlined
def _num_evicted(filled: float, num_new: float, num_blocks: float, capacity: float) -> float:
    """Blocks that make room for those that a prompt brings. What was over before it came counts by
    the share of the prompt that is new: whoever brings little waits behind it, and adds nothing.
    """
    before = max(0.0, filled - capacity)
    own = max(0.0, filled + num_new - capacity) - before
    return own + before * min(1.0, num_new / max(1.0, num_blocks))


@inlined
def times_of(
    ranks: F64, rank: Index, prompt: Prompt, fleet: Fleet, waited_ms: float, found: Found
) -> Times:
    """Of a request on a rank: its own time to first token, to which the fleet's costs add what its
    prefill delays, what it evicts, waiting for room, what requests that follow it will wait, what
    its answer slows down.
    """
    cached = cached_tokens(prompt, found.num_blocks)
    token, attention = of(ranks, rank, TOKEN_MS), of(ranks, rank, ATTENTION_MS)
    work = found.loading_ms + prefill_ms(token, attention, prompt.num_tokens - cached, cached)
    own = waited_ms + of(ranks, rank, FIXED_MS) + _busy_ms(ranks, rank) + work
    capacity = capacity_of_rank(ranks, rank, fleet.capacity)
    answer = fleet.answer_tokens
    new_blocks = prompt.num_blocks - found.num_on_device + answer / prompt.block_size
    filled = filled_blocks(ranks, rank)
    num_evicted = _num_evicted(filled, new_blocks, prompt.num_blocks, capacity)
    evicted = fleet.reuse * fleet.block_ms * num_evicted
    filled += new_blocks
    # Nothing is behind a prefill on a rank whose cache is empty: nobody is sent there.
    delayed = fleet.delayed * min(1.0, filled / capacity)
    if not is_cache_known(ranks, rank):
        # Who counts on nothing there loses nothing, and sends others there whatever it holds.
        evicted, delayed = 0.0, fleet.delayed
    over = of(ranks, rank, ACTIVE_BLOCKS) + new_blocks - capacity
    room_wait = _PRICE_OF_ROOM * _room_wait_ms(ranks, rank, over, capacity, fleet.stay_ms)
    # Who has the prefix there stays: to compute it elsewhere takes room, too.
    room_wait *= min(1.0, new_blocks / max(1.0, prompt.num_blocks))
    later = fleet.num_later * (_usual_wait_ms(ranks, rank, fleet) - fleet.least_wait_ms)
    others = delayed * work + (1.0 + delayed) * evicted + room_wait + later
    return Times(own, own + others + _decoding_ms(ranks, rank, prompt, answer))


@inlined
def fill_waits(ranks: F64, now_ms: float, out_waits: F64) -> None:
    """out_waits[r] = wait_ms of rank r."""
    for r in range(len(out_waits)):
        out_waits[r] = wait_ms(ranks, r, now_ms)


@inlined
def _usual_capacity(ranks: F64, candidates: I64, known: float) -> float:
    """Of ranks whose capacity nobody knows: the known ones' usual one, else that of the fullest."""
    most = 1.0
    for i in range(len(candidates)):
        most = max(most, filled_blocks(ranks, candidates[i]) + 1.0)
    return known if known > 0.0 else most


@inlined
def _utilisation(traffic: F64, num_ranks: Index) -> float:
    offered = traffic[WORK_MS] / max(traffic[GAP_MS] * num_ranks, 1e-9)
    return float(min(_MAX_UTILISATION, offered))


@inlined
def _num_later(distinct: float, held: float) -> float:
    """Requests that follow one to its rank. A block that each request finds with the probability p
    is found p / (1 - p) times after it was computed (the mean of a geometric distribution).
    """
    return min(_MOST_LATER, _PRICE_OF_LATER * held / max(distinct - held, 1e-9))


@inlined
def fleet_of(
    ranks: F64, traffic: F64, candidates: I64, prompt: Prompt, waits: F64, now_ms: float
) -> Fleet:
    """The state of the fleet as a request comes.

    By queueing theory (M/G/1) a job of x ms delays others by x * load / (1 - load) * (the work that
    waits / the mean job + 1/2): whoever comes before the queue is empty.
    """
    num_ranks = len(candidates)
    capacity = _usual_capacity(ranks, candidates, traffic[USUAL_CAPACITY])
    answer_tokens = min(traffic[ANSWER_TOKENS], prompt.max_answer_tokens)
    needed = prompt.num_blocks + answer_tokens / prompt.block_size
    waiting, token_ms, num_with_room = 0.0, 0.0, 0
    for i in range(num_ranks):
        rank = candidates[i]
        waiting += waits[rank]
        token_ms += of(ranks, rank, TOKEN_MS)
        filled = filled_blocks(ranks, rank) + needed
        has_room = filled <= capacity_of_rank(ranks, rank, capacity)
        num_with_room += has_room and is_cache_known(ranks, rank)
    waiting, block_ms = waiting / num_ranks, token_ms / num_ranks * prompt.block_size
    mean_wait, least_wait = _usual_waits(ranks, candidates, now_ms)
    load = _utilisation(traffic, num_ranks)
    mean_job = max(traffic[WORK_MS], block_ms, 1e-6)
    reuse = traffic[CACHED_BLOCKS] / max(traffic[PROMPT_BLOCKS], 1e-9)
    return Fleet(
        load / (1.0 - load) * (waiting / mean_job + 0.5),
        max(_PRICE_WITH_ROOM, reuse) if num_with_room > 0 else reuse,
        block_ms,
        capacity,
        answer_tokens,
        traffic[WORK_MS] + traffic[ANSWER_MS] if traffic[USUAL_CAPACITY] > 0.0 else 0.0,
        _num_later(traffic[DISTINCT_BLOCKS], traffic[HELD_BLOCKS]),
        mean_wait,
        least_wait,
        now_ms,
    )


@inlined
def note_request(
    traffic: F64, now_ms: float, work_ms: float,
    num_blocks: float, cached_blocks: float, found_blocks: float,
) -> None:  # fmt: skip
    """A request was routed: move the means on."""
    num_before = traffic[NUM_ROUTED]
    if num_before > 0:
        share = max(1.0 / _REQUESTS_OF_RATE, 1.0 / (num_before + _FIRST_REQUESTS))
        gap = max(0.0, now_ms - traffic[LAST_MS])
        traffic[GAP_MS] += share * (gap - traffic[GAP_MS])
    share = max(1.0 / _REQUESTS_OF_RATE, 1.0 / (num_before + 1.0))
    traffic[WORK_MS] += share * (work_ms - traffic[WORK_MS])
    kept = 1.0 - 1.0 / _REQUESTS_OF_REUSE
    common = traffic[COMMON_BLOCKS]
    if common >= 0.0:
        traffic[DISTINCT_BLOCKS] = kept * traffic[DISTINCT_BLOCKS] + num_blocks - common
        traffic[HELD_BLOCKS] = kept * traffic[HELD_BLOCKS] + found_blocks - common
    traffic[PROMPT_BLOCKS] = kept * traffic[PROMPT_BLOCKS] + num_blocks
    traffic[CACHED_BLOCKS] = kept * traffic[CACHED_BLOCKS] + cached_blocks
    traffic[LAST_MS], traffic[NUM_ROUTED] = now_ms, num_before + 1.0


@kernel(void(writes(f8), f8, f8))
def note_answer(traffic: F64, num_tokens: float, ms: float) -> None:
    """A request was answered with so many tokens, in so many ms from the first to the last."""
    share = 1.0 if traffic[ANSWER_TOKENS] == 0.0 else 1.0 / _ANSWERS_OF_MEAN
    traffic[ANSWER_TOKENS] += share * (num_tokens - traffic[ANSWER_TOKENS])
    traffic[ANSWER_MS] += share * (ms - traffic[ANSWER_MS])
