"""The plain reference implementations of the kernels: what each computes, as a child could check
it.
"""

import json
import struct

import xxhash


def hash_windows(tokens, window, stride, seed):
    windows = [tokens[i : i + window] for i in range(0, len(tokens) - window + 1, stride)]
    return [xxhash.xxh3_64_intdigest(struct.pack(f"<{window}I", *w), seed) for w in windows]


def hash_blocks(tokens, block_size, seed):
    return hash_windows(tokens, block_size, block_size, seed)


def chain_blocks(block_hashes, parent, seed):
    chained = []
    for block_hash in block_hashes:
        if parent is None:
            parent = block_hash
        else:
            parent = xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, block_hash), seed)
        chained.append(parent)
    return chained


def fnv1a(tokens, block_size, parent):
    hashes, h = [], parent
    for i in range(len(tokens) // block_size):
        h = 14695981039346656037 ^ (h * 1099511628211 % 2**64)
        for token in tokens[i * block_size : (i + 1) * block_size]:
            h = (h ^ token) * 1099511628211 % 2**64
        hashes.append(h)
    return hashes


def _has(rank, holders, own, pools):
    """The classes in which a rank has a block that these holders have."""
    mine = {own[h][1] for h in holders if h in own and own[h][0] == rank}
    return mine | {3 for h in holders if rank in pools.get(h, ())}


def lengths(holders_of_block, own, pools, credits, num_ranks):
    """([[depth of each rank] for each scope], [credit of each rank])."""
    kinds = [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 3}]
    has = [[_has(r, holders, own, pools) for holders in holders_of_block] for r in range(num_ranks)]
    depths = [
        [[*(bool(classes & kind) for classes in has[rank]), False].index(False)
         for rank in range(num_ranks)]
        for kind in kinds
    ]  # fmt: skip
    credit = [
        sum(max(credits[c] for c in classes) for classes in has[rank][: depths[3][rank]])
        for rank in range(num_ranks)
    ]
    return depths, credit


RANK_COLUMNS = (
    *("waiting_ms", "first_ms", "first_since_ms", "num_waiting", "num_running", "prefill_tokens"),
    *("context_tokens", "active_blocks", "coming_blocks", "resident_blocks", "capacity_blocks"),
    *("fixed_ms", "token_ms", "attention_ms", "host_ms", "disk_ms", "pool_ms"),
    *("busy_ms", "step_ms", "sequence_ms", "context_ms", "usual_wait_ms"),
    "noted_ms",
)


def blocks_cost(prompt_blocks, num_full_blocks, weight, credit, prefill, active, active_depth):
    return [
        weight * max(0.0, p + prompt_blocks - c) + (a + num_full_blocks - d)
        for c, p, a, d in zip(credit, prefill, active, active_depth, strict=True)
    ]


def waits_ms(ranks, now_ms):
    """What each rank still has to prefill; the oldest request is being computed."""
    return [
        r["waiting_ms"] - min(max(0.0, now_ms - r["first_since_ms"]), r["first_ms"])
        if r["num_waiting"]
        else 0.0
        for r in ranks
    ]


def busy_ms(rank):
    return rank["busy_ms"] if rank["num_running"] > rank["num_waiting"] else 0.0


def usual_waits_ms(ranks, now_ms):
    """Of each rank; the mean of the others where nothing was noted for half a minute."""
    is_known = [now_ms - r["noted_ms"] < 30_000 for r in ranks]
    known = [r["usual_wait_ms"] for r, yes in zip(ranks, is_known, strict=True) if yes] or [0.0]
    mean = sum(known) / len(known)
    return [r["usual_wait_ms"] if yes else mean for r, yes in zip(ranks, is_known, strict=True)]


def next_usual_waits_ms(ranks, now_ms, waits, work_ms):
    """The means after one more request, whose wait counts as 2.5 mean prefills at most."""
    means = []
    for rank, wait, usual in zip(ranks, waits, usual_waits_ms(ranks, now_ms), strict=True):
        share, age_ms = 1 / max(64, 16 * len(ranks)), now_ms - rank["noted_ms"]
        share = max(share, age_ms / 30_000) if age_ms < 30_000 else share
        means.append(usual + share * (min(wait, 2.5 * work_ms) + busy_ms(rank) - usual))
    return means


def overflow(over, num_new, num_blocks):
    """Blocks that a prompt pushes out; `over`: blocks over capacity before, below 0 is room."""
    before = max(0.0, over)
    return max(0.0, over + num_new) - before + before * min(1.0, num_new / max(1.0, num_blocks))


def room_wait_ms(rank, excess, capacity, stay_ms):
    """Until requests have left room: who waits, over who runs, times how long they stay."""
    if excess <= 0:
        return 0.0
    in_flight, active = rank["num_running"], max(1.0, rank["active_blocks"])
    fit = in_flight * min(1.0, capacity / active)
    running = max(1.0, in_flight - rank["num_waiting"], fit / 2)
    return stay_ms * (rank["num_waiting"] + min(1.0, excess * in_flight / active)) / running


def fleet_of(ranks, traffic, now_ms, waits, num_blocks, size, max_answer):
    """What holds for all ranks as a request comes."""
    answer = min(traffic["answer_tokens"], max_answer)
    filled = [max(0, r["resident_blocks"]) + r["coming_blocks"] for r in ranks]
    usual = traffic["usual_capacity"] or max(f + 1 for f in filled)
    sizes = [max(r["capacity_blocks"] or usual, r["resident_blocks"]) for r in ranks]
    needed = num_blocks + answer / size
    has_room = any(
        f + needed <= c and r["resident_blocks"] >= 0
        for f, c, r in zip(filled, sizes, ranks, strict=True)
    )
    block_ms = size * sum(r["token_ms"] for r in ranks) / len(ranks)
    load = min(0.9, traffic["work_ms"] / max(traffic["gap_ms"] * len(ranks), 1e-9))
    mean_job = max(traffic["work_ms"], block_ms, 1e-6)
    reuse = traffic["cached_blocks"] / max(traffic["prompt_blocks"], 1e-9)
    new_blocks = max(traffic["distinct_blocks"] - traffic["held_blocks"], 1e-9)
    return {
        "filled": filled,
        "sizes": sizes,
        "answer": answer,
        "behind": load / (1 - load) * (sum(waits) / len(ranks) / mean_job + 0.5),
        "block_price": block_ms * (max(2.0, reuse) if has_room else reuse),
        "stay": traffic["work_ms"] + traffic["answer_ms"] if traffic["usual_capacity"] else 0.0,
        "num_later": min(40.0, 1.5 * traffic["held_blocks"] / new_blocks),
        "usual_waits": usual_waits_ms(ranks, now_ms),
    }


def fleet_costs(ranks, traffic, now_ms, num_tokens, size, max_answer, found):
    """[(own ms, ms for the fleet)] of each rank, as docs/routing.md has it."""
    num_blocks, waits = num_tokens // size, waits_ms(ranks, now_ms)
    fleet = fleet_of(ranks, traffic, now_ms, waits, num_blocks, size, max_answer)
    costs = []
    of_ranks = zip(
        ranks, waits, found, fleet["filled"], fleet["sizes"], fleet["usual_waits"], strict=True
    )
    for r, wait, mine, there, capacity, usual in of_ranks:
        num_blocks_found, num_on_device, loading_ms = mine
        cached = max(0.0, min(num_blocks_found * size, num_tokens - 1))
        new = num_tokens - cached
        prefill = r["token_ms"] * new + r["attention_ms"] * new * (cached + new / 2) + loading_ms
        own = wait + r["fixed_ms"] + busy_ms(r) + prefill
        stored = num_blocks - num_on_device + fleet["answer"] / size
        evicted = fleet["block_price"] * overflow(there - capacity, stored, num_blocks)
        delayed = fleet["behind"] * min(1.0, (there + stored) / capacity)
        if r["resident_blocks"] < 0:  # nobody knows
            evicted, delayed = 0.0, fleet["behind"]
        waited = 2 * room_wait_ms(
            r, r["active_blocks"] + stored - capacity, capacity, fleet["stay"]
        )
        waited *= min(1.0, stored / max(1, num_blocks))
        later = fleet["num_later"] * (usual - min(fleet["usual_waits"]))
        longer = r["sequence_ms"] + r["context_ms"] * (num_tokens + fleet["answer"] / 2)
        decode = longer * r["num_running"] * fleet["answer"]
        others = delayed * prefill + (1 + delayed) * evicted + waited + later + decode
        costs.append((own, own + others))
    return costs


def json_items(text):
    """(begin, end, number of separators) of each item, by the standard library's decoder.

    The text is compact JSON as json.dumps writes it: no white space.
    """
    at, items, decoder = 1, [], json.JSONDecoder()
    while at < len(text) - 1:
        value, end = decoder.raw_decode(text, at)
        items.append((at, end, _num_separators(value)))
        at = end + 1
    return items


def _num_separators(value):
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    own = 2 * len(value) - 1 if isinstance(value, dict) else len(value) - 1
    return max(own, 0) + sum(map(_num_separators, inner))
