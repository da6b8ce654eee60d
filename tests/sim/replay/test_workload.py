"""Made-up requests: what they share, and what one endless cache finds of it."""

from itertools import pairwise

import numpy as np
import pytest

from kvplug.sim.replay.study import ideal_hit_tokens
from kvplug.sim.replay.workload import (
    BlockSource,
    Conversations,
    Documents,
    Unshared,
    Workload,
    request_of,
)

RECIPES = [
    Documents(num_requests=60, num_documents=4, document=(100, 300), own=(5, 40), answer=(1, 30)),
    Conversations(num_requests=60, num_live=3, num_turns=4, turn=50, answer=30, system=64),
    Unshared(num_requests=60, prompt=(1, 200), answer=7),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_seed_makes_the_same_requests_and_another_seed_others(recipe):
    first, again, other = recipe.make(1), recipe.make(1), recipe.make(2)
    for one, two in zip(first.requests, again.requests, strict=True):
        assert one.num_tokens == two.num_tokens
        np.testing.assert_array_equal(one.blocks, two.blocks)
    blocks = {block for request in first.requests for block in request.blocks.tolist()}
    assert blocks.isdisjoint(other.requests[0].blocks.tolist())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_blocks_are_the_full_ones_of_prompt_and_answer(recipe):
    for request in recipe.make(3).requests:
        assert len(request.blocks) == request.num_tokens // 16
        num_tokens = request.num_tokens + request.num_answer_tokens
        assert len(request.blocks) + len(request.answer_blocks) == num_tokens // 16


def test_a_turn_begins_with_the_turn_before_and_its_answer():
    turns = Conversations(num_requests=4, num_live=1, num_turns=4, turn=50, answer=30)
    requests = turns.make(0).requests
    for before, after in pairwise(requests):
        assert after.num_tokens == before.num_tokens + 30 + 50
        held = [*before.blocks.tolist(), *before.answer_blocks.tolist()]
        assert after.blocks.tolist()[: len(held)] == held


def test_the_hot_document_has_its_share():
    recipe = Documents(
        num_requests=2000, num_documents=5, document=160, own=16, answer=1, hot_share=0.6
    )
    firsts = [int(request.blocks[0]) for request in recipe.make(0).requests]
    assert max(map(firsts.count, set(firsts))) / 2000 == pytest.approx(0.6, abs=0.04)


def test_an_endless_cache_finds_what_was_there_before():
    document = Documents(num_requests=3, num_documents=1, document=160, own=20, answer=1)
    assert ideal_hit_tokens(document.make(0)).tolist() == [0, 160, 160]
    chat = Conversations(num_requests=3, num_live=1, num_turns=3, turn=16, answer=16)
    assert ideal_hit_tokens(chat.make(0)).tolist() == [0, 32, 64]
    assert ideal_hit_tokens(RECIPES[2].make(0)).sum() == 0


def test_the_last_token_of_a_prompt_is_never_found():
    source = BlockSource(0)
    request = request_of(source, source.take(0), 32, 1, 16)
    workload = Workload(name="twice", block_size=16, requests=[request, request])
    assert ideal_hit_tokens(workload).tolist() == [0, 16]
