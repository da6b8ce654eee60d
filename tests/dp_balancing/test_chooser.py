"""Which rank a request goes to, with real publishers behind it."""

import pytest

from kvplug.curve_keys import ServerKeys
from kvplug.dp_balancing.balancer import Request
from kvplug.dp_balancing.chooser import Chooser
from kvplug.dp_balancing.multimodal import Item, block_keys
from kvplug.events import Namespace
from kvplug.kernels import costing
from tests.dp_balancing.ranks import Ranks, until_held
from tests.plugins.stock_client import wait_until

DOCUMENT = list(range(100, 180))


def of(tokens, name="r", **more):
    return Request(name, len(tokens), tokens, **more)


def place_of(chooser, request):
    """Where it goes; it is over then."""
    decision = chooser.choose(request)
    chooser.router.finish(request.request_id)
    return decision.rank.dp_rank, decision.overlap_blocks


@pytest.mark.parametrize("rank", [0, 1])
def test_a_prompt_goes_where_its_prefix_is(chooser, ranks, rank):
    ranks.store(rank, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    assert place_of(chooser, of([*DOCUMENT, 1, 2, 3])) == (rank, 20)


def test_salts_and_adapters_keep_prompts_apart(chooser, ranks):
    spaces = [Namespace(), Namespace(salt="s"), Namespace(lora_name="a")]
    for rank, space in enumerate(spaces[1:]):
        ranks.store(rank, DOCUMENT, cache_salt=space.salt, lora_name=space.lora_name)
        until_held(chooser, DOCUMENT, 20, namespace=space)
    found = [place_of(chooser, of(DOCUMENT, namespace=space)) for space in spaces]
    assert found[1:] == [(0, 20), (1, 20)]
    assert found[0][1] == 0


def test_an_image_counts_where_it_is(chooser, ranks):
    items = [Item("ab" * 32, 6, 4), Item("picture", 20, 4)]
    keys = [*block_keys(items, 4), *[[]] * 14]
    ranks.store(1, DOCUMENT, extra_keys=keys)
    wait_until(lambda: len(chooser.router.index) > 0, "the blocks are known")
    assert place_of(chooser, of(DOCUMENT, items=items)) == (1, 20)
    assert place_of(chooser, of(DOCUMENT, rank=1))[1] == 1  # up to the first image
    assert place_of(chooser, of(DOCUMENT, items=items[:1], rank=1))[1] == 5


def test_keys_are_in_every_block_with_a_token_of_the_item():
    [key] = block_keys([Item("x", 0, 1)], 4)[0]
    keys = block_keys([Item("x", 3, 2), Item("x", 4, 1), Item("x", 11, 1)], 4)
    assert keys == [[key], [key, key], [key]]


def test_the_client_may_name_the_rank(chooser, ranks):
    ranks.store(0, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    assert place_of(chooser, of(DOCUMENT, rank=1))[0] == 1


def test_without_tokens_it_goes_to_the_less_busy_rank(chooser):
    busy = chooser.choose(of(DOCUMENT, "busy")).rank.dp_rank
    assert place_of(chooser, Request("r", 50)) == (1 - busy, 0)


def test_what_the_engine_chose_itself_is_load(chooser):
    for number in range(3):
        chooser.adopt(f"own-{number}", 1, 400)
    assert place_of(chooser, of(DOCUMENT))[0] == 0


def test_what_other_front_ends_have_sent_is_load(chooser):
    place_of(chooser, of(DOCUMENT, "so that requests have a usual length"))
    chooser.report([(8, 9), (0, 0)])
    assert place_of(chooser, of(DOCUMENT[::-1]))[0] == 1
    chooser.report([(0, 0), (8, 9)])
    assert place_of(chooser, of(DOCUMENT[::-1]))[0] == 0


def test_ranks_that_do_not_begin_at_0(tmp_path):
    ranks = Ranks(tmp_path, first_rank=4)
    chooser = Chooser(ranks.streams)
    chooser.start()
    ranks.store(1, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    assert place_of(chooser, of(DOCUMENT)) == (1, 20)
    chooser.stop()
    ranks.stop()


def test_encrypted_streams_are_read_with_the_engines_own_key(tmp_path, key_files):
    allowed = key_files / "allowed"
    (allowed / "server.key").write_text((key_files / "server.key").read_text())
    keys = ServerKeys.from_files(key_files / "server.key_secret", allowed)
    ranks = Ranks(tmp_path, keys=keys)
    chooser = Chooser(ranks.streams, keys.as_client())
    chooser.start()
    ranks.store(1, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    chooser.stop()
    ranks.stop()


def test_a_rank_that_is_gone_has_nothing(chooser, ranks):
    ranks.store(1, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    ranks.publishers[1].shutdown()
    wait_until(lambda: chooser.num_connected == 1, "the stream is lost")
    until_held(chooser, DOCUMENT, 0)


def test_nobody_is_connected_once_the_event_thread_has_ended(chooser):
    chooser._thread.stop()
    assert chooser.num_connected == 0


def test_all_load_goes_with_its_requests(chooser):
    names = [chooser.choose(of(DOCUMENT, str(number))).request_id for number in range(5)]
    chooser.adopt("own", 0, 10)
    for name in (*names, "own"):
        chooser.router.first_token(name)
        chooser.router.finish(name, 3)
    assert len(chooser.router.load) == 0
    assert not chooser.router.load.ranks[:, costing.NUM_RUNNING].any()
