"""The plain twins of the kernels: what each computes, as a child could check it."""

import struct
from itertools import groupby

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


def segments(set_of_block):
    """[(end, set), ...] of consecutive equal sets."""
    ends, end = [], 0
    for set_id, run in groupby(set_of_block):
        end += len(list(run))
        ends.append((end, set_id))
    return ends


def overlap(holders_of_block, rank_of_holder, credit_of_holder):
    """Per rank (depth, credit) over a list of sets of holders, one per leading block."""
    result = {}
    for rank in set(rank_of_holder):
        depth, credit = 0, 0.0
        for holders in holders_of_block:
            credits = [credit_of_holder[h] for h in holders if rank_of_holder[h] == rank]
            if not credits:
                break
            depth, credit = depth + 1, credit + max(credits)
        result[rank] = (depth, credit)
    return result


def cost(prompt_blocks, num_full_blocks, weight, credit, prefill, active, active_depth):
    return [
        weight * max(0.0, p + prompt_blocks - c) + (a + num_full_blocks - d)
        for c, p, a, d in zip(credit, prefill, active, active_depth, strict=True)
    ]
