"""How long hashing takes: 32,768 tokens, by step, block size and scheme.

usage: python -m tests.benchmarks.hashing [number of runs, 300]

Microseconds, the least and the median. A call crosses from Python once, which is in the numbers.
"""

import sys
from functools import partial
from statistics import median
from time import perf_counter_ns

import numpy as np

from kvplug.hash_schemes import SCHEME_NAMES, scheme_named
from kvplug.hash_schemes.vllm import ALGORITHMS
from kvplug.hashing import BASE_SEED, BlockHasher, as_tokens
from kvplug.kernels import hashing as kernels
from tests.benchmarks.splitmix import prompt

NUM_TOKENS = 32_768


def microseconds(call, num_runs):
    times = []
    for _ in range(num_runs):
        started = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - started)
    return min(times) / 1000, median(times) / 1000


def steps():
    """(name, call) of everything that is measured."""
    token_ids = prompt(1, NUM_TOKENS)
    tokens, hasher = as_tokens(token_ids), BlockHasher(16)
    hashes = hasher.block_hashes(tokens)
    chained, seed = np.empty_like(hashes), np.uint64(BASE_SEED)
    yield "list -> array", lambda: as_tokens(token_ids)
    yield "list -> block hashes", lambda: hasher.block_hashes(as_tokens(token_ids))
    for size in (4, 16, 32, 64, 128):
        yield f"array -> block hashes, size {size}", partial(BlockHasher(size).block_hashes, tokens)
    windows = BlockHasher(16, bigrams=True)
    yield "array -> block hashes, size 16, bigrams", lambda: windows.block_hashes(tokens)
    yield "chain of 2,048", lambda: kernels.chain_blocks(hashes, False, seed, seed, chained)
    yield "array -> sequence hashes, size 16", lambda: hasher.sequence_hashes(tokens)
    for name in SCHEME_NAMES:
        seed_of_vllm = "0" if name in ALGORITHMS else None
        scheme = scheme_named(name, block_size=16, hash_seed=seed_of_vllm)
        yield f"array -> {name}, size 16", partial(scheme.sequence_hashes, tokens)


def main(num_runs):
    for name, call in steps():
        call()
        least, middle = microseconds(call, num_runs)
        sys.stdout.write(f"{name:42} {least:8.1f} {middle:8.1f}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
