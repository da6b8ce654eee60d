"""The plain twins of the kernels: what each computes, as a child could check it."""

import struct

import xxhash


def hash_blocks(tokens, block_size, seed):
    num_blocks = len(tokens) // block_size
    blocks = [tokens[i * block_size : (i + 1) * block_size] for i in range(num_blocks)]
    return [xxhash.xxh3_64_intdigest(struct.pack(f"<{block_size}I", *b), seed) for b in blocks]


def chain_blocks(block_hashes, parent, seed):
    chained = []
    for block_hash in block_hashes:
        if parent is None:
            parent = block_hash
        else:
            parent = xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, block_hash), seed)
        chained.append(parent)
    return chained


def _has(rank, holders, own, pools):
    """The classes in which a rank has a block that these holders have."""
    mine = {own[h][1] for h in holders if h in own and own[h][0] == rank}
    return mine | {3 for h in holders if rank in pools.get(h, ())}


def reaches(holders_of_block, own, pools, credits, num_ranks):
    """([[depth of each rank] for each reach], [credit of each rank])."""
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


def cost(prompt_blocks, num_full_blocks, weight, credit, prefill, active, active_depth):
    return [
        weight * max(0.0, p + prompt_blocks - c) + (a + num_full_blocks - d)
        for c, p, a, d in zip(credit, prefill, active, active_depth, strict=True)
    ]
