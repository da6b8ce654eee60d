"""The short form of `make differential`, and the rules that it goes by."""

import pytest

from kvplug.events import BlockRemoved, BlockStored, Tier
from tests.differential.active import ActiveBlocks
from tests.differential.fleet import Disagreement, Fleet, run
from tests.differential.profiles import PROFILES
from tests.differential.reference import Blocks, Lengths
from tests.differential.sides import Dynamo

CHAIN = {1: None, 2: 1, 3: 2, 4: 3}


def stored(names, tier=Tier.DEVICE):
    """Blocks of which nobody needs the tokens."""
    return BlockStored(
        block_hashes=names, token_ids=(), block_size=1, parent=CHAIN[names[0]], tier=tier
    )


@pytest.mark.engine
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_dynamo_and_kvplug_differ_only_where_their_rules_do(profile):
    counts = run(profile, num_states=30)
    assert counts.states == 30
    assert counts.equal + sum(counts.reasons.values()) >= 30
    if not profile.has_tiers and not profile.has_answers:
        assert counts.equal == 30


@pytest.mark.engine
def test_a_weight_that_dynamo_does_not_have_is_found():
    other = next(profile for profile in PROFILES if profile.name == "weight_4")
    dynamo = Dynamo({})
    try:
        with pytest.raises(Disagreement, match=r"costs|choice"):
            Fleet(other, dynamo, seed=0).run(30)
    finally:
        dynamo.close()


class TestBlocks:
    def test_dynamo_forgets_what_is_behind_a_gap(self):
        for forgets, length in ((False, 4), (True, 3)):
            blocks = Blocks(forgets, CHAIN)
            blocks.apply(stored((1, 2, 3, 4)))
            blocks.apply(BlockRemoved(block_hashes=(3,)))
            assert blocks.lengths((1, 2, 3, 4)) == Lengths(2, 2, 2)
            blocks.apply(stored((3,)))
            assert blocks.lengths((1, 2, 3, 4)).device == length

    def test_dynamo_does_not_come_back_from_disk(self):
        for forgets, credit in ((False, 1.25), (True, 0.25)):
            blocks = Blocks(forgets, CHAIN)
            blocks.apply(stored((1,), Tier.DISK))
            blocks.apply(stored((1, 2), Tier.DEVICE))
            blocks.apply(BlockRemoved(block_hashes=(1,)))
            if forgets:
                assert blocks.lengths((1, 2)) == Lengths(0, 0, 1)
            assert blocks.credit((1, 2), 0.75, 0.25) == credit


class TestActiveBlocks:
    def test_both_count_what_the_last_requests_have_alone_by_what_is_left(self):
        for keeps in (False, True):
            active = ActiveBlocks(keeps)
            active.start("a", tuple(range(8)))
            active.start("b", (*range(6), 10, 11))
            active.add_output("a", None)
            assert active.count() == 11
            active.add_output("a", 0.5)
            assert active.count() == 10
            active.end("b")
            assert active.count() == 8
            active.add_output("a", 0.25)
            assert active.count() == 3

    def test_what_is_left_when_another_request_has_the_blocks(self):
        for keeps, number in ((False, 4), (True, 2)):
            active = ActiveBlocks(keeps)
            active.start("a", (1, 2, 3, 4))
            active.add_output("a", 0.5)
            active.start("b", (1, 2, 3, 4))
            active.end("a")
            assert active.count() == number
            assert active.count_with((1, 5)) == number + 1
