"""Which holder has which block, in arrays: what kernels/store.py and kernels/remove.py share.

In:  runs, hash spaces, numbers of sets.   Out: who has a run; runs made, and blocks taken out.

    table          sequence hash -> place (run and depth, kernels/runs.py)
    engine hashes  engine hash -> sequence hash, for the ranks of one hash space
    copies         hash xor mark of the holder -> (holder, copies above the first one)
    runs           kernels/runs.py
    bits, meta, intern, header    kernels/holders.py

Made of parts of these files. Reference: tests/index/reference.py.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels import holders, runs
from kvplug.kernels._jit import inlined
from kvplug.kernels.bundle import i64_of, u32_of, u64_of
from kvplug.kernels.table import value_of

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = int | np.int64

_0, _1 = np.uint64(0), np.uint64(1)
# The first arrays of a bundle (kernels/bundle.py) of a block store.
TABLE, COPIES, RUNS, BITS, META, INTERN, HEADER, NUM_ARRAYS = range(8)


class Blocks(NamedTuple):
    """The arrays of kvplug/index/block_store.py."""

    table: U64
    copies: U64
    runs: U64
    bits: U64
    meta: U64
    intern: U32
    header: I64


class SpaceArrays(NamedTuple):
    """A hash space. slots: a table engine hash -> sequence hash, of length 0 for blocks without
    engine hashes; members: the bits of its holders, of length 0 if every holder is in it.
    """

    slots: U64
    members: U64


@inlined
def blocks_of(bundle: U64) -> Blocks:
    """The arrays of a block store, from a bundle that begins with them."""
    return Blocks(
        u64_of(bundle, TABLE), u64_of(bundle, COPIES), u64_of(bundle, RUNS), u64_of(bundle, BITS),
        u64_of(bundle, META), u32_of(bundle, INTERN), i64_of(bundle, HEADER),
    )  # fmt: skip


@inlined
def copy_key(hash_: np.uint64, holder: Index) -> np.uint64:
    """Where the copies of a block by a holder are counted."""
    return hash_ ^ holders.mark_of(holder)


@inlined
def set_of(blocks: Blocks, run: np.uint64) -> np.int64:
    """The set of a run."""
    return runs.set_of(blocks.runs, run)


@inlined
def is_held_by(blocks: Blocks, run: np.uint64, holder: Index) -> bool:
    """Whether the holder has the blocks of the run."""
    return bool(
        holders.contains(blocks.bits, blocks.header[holders.WORDS], set_of(blocks, run), holder)
    )


@inlined
def has_engine_hash(blocks: Blocks, space: SpaceArrays, set_id: Index) -> bool:
    """Whether a rank of the hash space is in the set: then its blocks have engine hashes there."""
    return bool(holders.has_any(blocks.bits, blocks.header[holders.WORDS], set_id, space.members))


@inlined
def new_run(
    blocks: Blocks, set_id: Index, depth: np.uint64, seed: np.uint64, parent: np.uint64
) -> np.uint64:
    """A run without blocks, whose first one will be at `depth`, behind the block `parent`."""
    run = runs.create(blocks.runs, np.uint64(set_id), depth, seed)
    holders.retain(blocks.meta, set_id)
    runs.put(blocks.runs, run, runs.PARENT, parent)
    return run


@inlined
def hang(
    blocks: Blocks, run: np.uint64, created: np.uint64, depth: np.uint64, hash_: np.uint64
) -> None:
    """A new run for a block that is about to leave `run` hangs where the block hung, if that is
    known.
    """
    if depth == runs.get(blocks.runs, run, runs.START):
        runs.inherit_parent(blocks.runs, run, created)
    elif depth == runs.get(blocks.runs, run, runs.END):
        runs.link(blocks.runs, run, created, hash_)


@inlined
def take_out(blocks: Blocks, run: np.uint64, depth: np.uint64, hash_: np.uint64) -> None:
    """The block leaves its run; an empty run is freed."""
    runs.take_out(blocks.runs, run, depth, hash_)
    if runs.num_blocks(blocks.runs, run) == _0:
        set_id = set_of(blocks, run)
        runs.free(blocks.runs, run)
        holders.release(blocks.bits, blocks.meta, blocks.intern, blocks.header, set_id)


@inlined
def follows(
    blocks: Blocks, run: np.uint64, set_id: Index, depth: np.uint64, family: np.uint64
) -> bool:
    """Whether the run ends right before the depth, with this set; and then is of the family."""
    if run == runs.NO_RUN or set_of(blocks, run) != set_id:
        return False
    is_next = runs.get(blocks.runs, run, runs.END) + _1 == depth
    if not is_next or not runs.takes_family(blocks.runs, run, family):
        return False
    runs.join_family(blocks.runs, run, family)
    return True


@inlined
def hash_of(space: SpaceArrays, engine_hash: np.uint64) -> np.uint64:
    """The sequence hash of an engine hash, 0 if the hash space does not have it."""
    return value_of(space.slots, engine_hash)
