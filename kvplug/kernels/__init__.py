"""Ground floor: Numba kernels. Flat arrays in, flat arrays out; nothing else is known here.

    hashing    token ids -> block hashes -> sequence hashes (XXH3-64)
    fnv1a      token ids -> sequence hashes (FNV-1a)
    cbor       token ids -> CBOR, for hashes of vLLM
    table      an open-addressing table u64 -> u64
    holders    interned sets of holders
    runs       blocks that follow each other and are held by the same set
    msgpack    items of msgpack in an array of bytes
    bundle     many arrays as one argument
    costing    overlap and load -> cost per rank

made of parts of those:

    expiring   what a rank is taken to hold for a while
    residency  what the next two have in common
    joining    blocks join a holder
    leaving    blocks leave a holder
    prefix_lengths  how far long a prefix of a request each rank holds, border by border
    matching   a request's blocks -> how much of it each rank holds
    pricing    tokens of a request -> what it would cost on each rank
    wire       stock event messages -> records
    packed     packed events -> where their parts are
    applying   records, or packed events -> the index, changed
    storing    the blocks of one event -> the index, changed
    sweeping   many blocks out of the index at once: clears
    evicting   the same: tails of runs that are cut short
    checking   what must be true of every block

The first do not import each other. The names of output arrays start with `out_`. A kernel is
compiled when it is first called; `compile_all` does it for all that are imported.
"""

from kvplug.kernels._jit import compile_all

__all__ = ["compile_all"]
