"""Ground floor: Numba kernels. Flat arrays in, flat arrays out; nothing else is known here.

hashing    token ids -> block hashes -> sequence hashes (XXH3-64)
fnv1a      token ids -> sequence hashes (FNV-1a)
cbor       token ids -> CBOR, for hashes of vLLM
table      an open-addressing table u64 -> u64
holders    interned sets of holders, one set number per block
matching   a request's blocks -> segments of equal holder sets
costing    segments and load -> overlap and cost per rank

The files do not import each other: Numba caches a compiled kernel by its own file and would not
see a change in another one. The names of output arrays start with `out_`.
"""
