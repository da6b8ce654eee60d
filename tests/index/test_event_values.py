"""Events made by hand, with values that none can have: each is refused whole, and counted."""

import numpy as np
import pytest
from msgspec import structs

from kvplug import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Namespace,
    Rank,
    Router,
)
from kvplug.events import BlockCopied, CxlMetadata, CxlState, CxlStateTransition, MoeLabel

POOLED = CxlMetadata(state=CxlState.CXL_POOLED, pool_id=1, accessible_workers=("b",))
STORED = BlockStored(block_hashes=(1, 2), token_ids=tuple(range(8)), block_size=4)
MOVED = CxlStateTransition(block_hashes=(9,), new_state=CxlState.CXL_POOLED, pool_id=1)
BEFORE = BlockStored(block_hashes=(9,), token_ids=(9,) * 4, block_size=4)
AFTER = BlockStored(block_hashes=(10,), token_ids=(8,) * 4, block_size=4)

NO_ROWS = [None, -1, 1.5, "ab", b"ab", object(), np.zeros((2, 2), dtype=np.uint64)]
NO_HASHES = [(-1, 2), (2**64, 2), (1.5, 2), ("a", "b"), (None, 2)]
NO_COUNTS = [-1, 1.5, "a", True, [], 2**70]
BAD = [
    *[structs.replace(STORED, block_hashes=value) for value in NO_ROWS + NO_HASHES],
    *[structs.replace(STORED, token_ids=value) for value in [*NO_ROWS, (-1,) * 8, (2**32,) * 8]],
    *[structs.replace(STORED, block_size=value) for value in [None, "a", 1.5, True]],
    *[structs.replace(STORED, parent=value) for value in [-1, 2**64, "a", 1.5, ()]],
    *[structs.replace(STORED, namespace=value) for value in ["x", ("x",), Namespace(lora_name=3)]],
    *[structs.replace(STORED, tier=value) for value in [None, 3, -1, "DEVICE", []]],
    *[structs.replace(STORED, extra_keys=value) for value in ["x", ((2**64,),), ((-1,),), (3,)]],
    *[structs.replace(STORED, group=value) for value in [None, *NO_COUNTS[1:]]],
    structs.replace(STORED, attention=None),
    structs.replace(STORED, sliding_window="long"),
    *[structs.replace(STORED, bigrams=value) for value in [None, "x", 1]],
    *[structs.replace(STORED, cxl=value) for value in ["x", structs.replace(POOLED, state="x")]],
    structs.replace(STORED, cxl=structs.replace(POOLED, pool_id="x")),
    structs.replace(STORED, cxl=structs.replace(POOLED, accessible_workers="b")),
    *[structs.replace(STORED, moe=value) for value in ["x", MoeLabel([], 2), MoeLabel(1, "x")]],
    *[BlockCopied(block_hashes=value) for value in NO_ROWS + NO_HASHES],
    BlockCopied(block_hashes=(9,), tier=None),
    *[BlockRemoved(block_hashes=value) for value in NO_ROWS + NO_HASHES],
    BlockRemoved(block_hashes=(9,), tier="HOST"),
    BlockRemoved(block_hashes=(9,), group="x"),
    AllBlocksCleared(tier=3),
    AllBlocksCleared(tier=[]),
    *[structs.replace(MOVED, block_hashes=value) for value in NO_ROWS + NO_HASHES],
    structs.replace(MOVED, new_state="cxl"),
    structs.replace(MOVED, pool_id=()),
    structs.replace(MOVED, accessible_workers=3),
    "no event",
    None,
]


@pytest.mark.parametrize("bad", BAD, ids=lambda event: repr(event)[:60])
def test_an_event_with_a_bad_value_is_refused_and_the_others_are_not(bad):
    index = BlockIndex(4)
    index.add_rank(Rank("a"))
    applied = index.apply(Rank("a"), EventBatch(events=(BEFORE, bad, AFTER)))
    assert (applied.num_stored, applied.num_removed, applied.num_moved) == (2, 0, 0)
    assert set(applied.rejected) == {"bad_value"}
    index.check()


@pytest.mark.parametrize("bad", BAD, ids=lambda event: repr(event)[:60])
def test_a_bad_first_event_says_nothing_of_the_block_size(bad):
    router = Router()
    router.add_worker("a")
    applied = router.apply(Rank("a"), EventBatch(events=(bad, BEFORE)))
    assert applied.num_stored == 1
    assert router.index.block_size == 4


def test_an_event_without_a_single_bad_value_is_applied():
    rich = structs.replace(
        STORED, namespace=Namespace(salt="x"), extra_keys=((2**64 - 1,), ()), cxl=POOLED,
        moe=MoeLabel(0, 1), sliding_window=None, tier=0,
    )  # fmt: skip
    index = BlockIndex(4)
    for rank in (Rank("a"), Rank("b")):
        index.add_rank(rank)
    rows = structs.replace(AFTER, block_hashes=[10], token_ids=np.full(4, 8))
    applied = index.apply(Rank("a"), EventBatch(events=(rich, rows)))
    assert (applied.num_stored, applied.rejected) == (3, {})
