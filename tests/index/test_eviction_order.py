"""What goes for room goes from the tail of its chain, however its blocks lie in runs."""

from kvplug.events import BlockCopied, BlockStored, EventBatch, Rank, Tier
from kvplug.hashing import as_tokens
from kvplug.index.block_index import BlockIndex
from kvplug.index.bounds import Bounds

A, B = Rank("a"), Rank("b")


def test_a_block_that_was_copied_from_the_middle_of_a_chain_stays_before_its_tail():
    index = BlockIndex(1, bounds=Bounds(max_blocks=10))
    for rank in (A, B):
        index.add_rank(rank)
    chain = tuple(range(1, 9))
    hashes = index.hasher.sequence_hashes(as_tokens(chain))

    def tell(rank, event):
        assert index.apply(rank, EventBatch(events=(event,))).num_stored == len(event.block_hashes)
        index.check()

    def store(*tokens):
        tell(A, BlockStored(block_hashes=tokens, token_ids=tokens, block_size=1))

    store(*chain)
    tell(B, BlockCopied(block_hashes=(3,), tier=Tier.HOST))
    store(101)
    store(102)
    assert index.overlap(hashes[:2]).depth.tolist() == [2, 0]
    store(200)
    store(201)
    store(202)
    assert index.overlap(hashes).depth.tolist()[0] == 7
    assert sorted(index.engine_hashes_of(A).tolist()) == [*chain[:7], 200, 201, 202]
