"""Numba kernels: flat arrays in, flat arrays out. They know nothing else of kvplug.

    hashing         token ids -> block hashes -> sequence hashes (XXH3-64)
    fnv1a           token ids -> sequence hashes (FNV-1a)
    cbor            token ids -> CBOR, for hashes of vLLM
    table           an open-addressing table, u64 -> u64
    holders         interned sets of holders
    runs            blocks that follow each other and are held by the same set
    msgpack         items of msgpack in an array of bytes
    json_items      where the fields of a large JSON object are
    versioned       arrays that one process writes and others read, without a lock
    costing         overlap and load -> the cost of a request on a rank

made of parts of those:

    residency       which holder has which block: what store and remove share
    store           blocks come to a holder
    remove          blocks leave a holder
    membership      the blocks of one event -> the index, changed
    wire            plain event messages -> records
    packed          packed events -> where their parts are
    applying        many records, or packed events -> the index, changed
    sweeping        many blocks out of the index at once: clears
    evicting        the same: tails of runs that are cut short
    checking        what must be true of every block
    path            a request along its runs: where its blocks are in table and runs
    prefix_lengths  sets of holders along a request -> how much of it each rank holds
    cache_groups    how long a prefix engines with hybrid models can reuse
    matching        the blocks of a request -> how much of it each rank holds
    expiring        blocks that a rank is expected to hold for a while
    active_blocks   blocks of live requests, by rank
    forecast        what the cache of a rank will hold once it has served its queue
    peer_load       what several processes are busy with, as one load
    candidates      ranks by what they are busy with
    scoring         a request -> what it costs on each candidate
    routing         requests -> ranks, in one call

and how they are compiled and called:

    _jit            the decorators; the only file that imports numba
    bundle          many arrays as one argument
    handover        a lock goes from one thread to another one that waits awake

Those of the first part do not import each other. A kernel takes at most eight arguments. The names
of output arrays start with `out_`. A kernel is compiled when it is first called; `compile_all`
compiles all that are imported.
"""

from kvplug.kernels._jit import compile_all

__all__ = ["compile_all"]
