"""The publisher for engines of one's own: what it sends, and what it refuses."""

import threading
import uuid
from contextlib import contextmanager

import numpy as np
import pytest

from kvplug import KvEventPublisher, codec
from kvplug.curve_keys import ServerKeys
from kvplug.errors import ConfigError, TransportError
from kvplug.events import BlockRemoved, CxlMetadata, CxlState, MoeLabel, Tier
from kvplug.hashing import BlockHasher
from kvplug.index.cxl import CxlBlocks
from tests.plugins.stock_client import StockClient, wait_until
from tests.plugins.stream_client import RANK, StreamClient

ANYWHERE = "tcp://127.0.0.1:0"
TOKENS = list(range(12))
SIZES = [4, 4, 4]


@contextmanager
def publishing(**more):
    with KvEventPublisher(ANYWHERE, **{"kv_block_size": 4} | more) as publisher:
        yield publisher


@pytest.fixture
def client():
    client = StreamClient()
    yield client
    client.close()


def told(client, publisher):
    """What a follower knows when all is sent."""
    stream = publisher._publisher
    wait_until(lambda: stream.num_applied == stream.num_published, "all is applied")
    client.catch_up(publisher.answers_at)
    return client.names()


def test_the_calls_of_a_custom_engine(client):
    with publishing(model="m", capacity_blocks=9) as publisher:
        publisher.publish_stored(
            event_id=1, token_ids=TOKENS, num_block_tokens=SIZES, block_hashes=[1, 2, 3],
            lora_id=0, parent_hash=None,
        )  # fmt: skip
        publisher.publish_stored(2, [90, 91, 92, 93], [4], [4], parent_hash=3)
        publisher.publish_removed(event_id=3, block_hashes=[1])
        assert told(client, publisher) == {2, 3, 4}
        publisher.publish_all_cleared()
        assert told(client, publisher) == set()
    assert (client.about.model, client.about.block_size) == ("m", 4)
    assert client.about.capacity_blocks == 9


def test_signed_ids_are_those_that_others_count_unsigned(client):
    with publishing() as publisher:
        publisher.publish_stored(
            token_ids=TOKENS[:8], num_block_tokens=[4, 4], block_hashes=[-1, 5]
        )
        publisher.publish_removed(block_hashes=[2**64 - 1])
        assert told(client, publisher) == {5}


def test_a_block_goes_into_a_pool(client):
    with publishing() as publisher:
        publisher.publish_stored(
            token_ids=TOKENS[:4], num_block_tokens=[4], block_hashes=[1], moe=MoeLabel(1, 2),
            cxl_metadata={"state": "local_gpu", "pool_id": None, "accessible_workers": []},
        )  # fmt: skip
        publisher.publish_cxl_state_transition(
            event_id=publisher.next_event_id(), block_hashes=[1], new_state="in_transit",
            pool_id=3, accessible_workers=[7, "b"],
        )  # fmt: skip
        publisher.publish_cxl_state_transition(block_hashes=[1], new_state=CxlState.CXL_POOLED)
        told(client, publisher)
    [hash_] = BlockHasher(4).sequence_hashes(TOKENS[:4]).tolist()
    known = client.index.annotation(CxlBlocks).metadata(RANK, hash_)
    assert known == CxlMetadata(CxlState.CXL_POOLED, 3, ("7", "b"))


def test_on_the_stock_wire_a_pool_is_a_medium(client):
    stock = StockClient()
    with publishing(wire="vllm", answers_at=ANYWHERE) as publisher:
        publisher.publish_stored(
            token_ids=TOKENS[:4], num_block_tokens=[4], block_hashes=[1],
            cxl_metadata=CxlMetadata(CxlState.CXL_POOLED, 3),
        )  # fmt: skip
        publisher.publish_cxl_state_transition(block_hashes=[1], new_state="evicted")
        wait_until(lambda: publisher._publisher.num_sent == 2, "both are sent")
        batches = [codec.decode(each[2]) for each in stock.replay(publisher.answers_at, 0)]
    stock.close()
    assert batches[0].pooled_media == ("CXL",)
    assert batches[0].events[0].tier is Tier.HOST
    assert batches[1].events == (BlockRemoved(block_hashes=(1,), tier=Tier.HOST),)


def test_ids_rise_whoever_asks_for_them(client):
    with publishing() as publisher:
        ids, lock = [], threading.Lock()

        def publish(first):
            for i in range(100):
                name = first + i
                event_id = publisher.publish_stored(
                    token_ids=[name] * 4, num_block_tokens=[4], block_hashes=[name]
                )
                with lock:
                    ids.append(event_id)

        threads = [threading.Thread(target=publish, args=(1000 * i,)) for i in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ids) == list(range(400))
        assert len(told(client, publisher)) == 400


def test_an_id_that_does_not_rise_is_refused_unless_it_was_reserved():
    with publishing() as publisher:
        reserved = publisher.next_event_id()
        assert publisher.publish_all_cleared(10) == 10
        assert publisher.publish_all_cleared(reserved) == reserved
        for used in (reserved, 10):
            with pytest.raises(ConfigError, match=f"got {used}, expected 11 or more"):
                publisher.publish_all_cleared(used)
        assert publisher.publish_all_cleared() == 11


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((None, TOKENS, [4, 4, 5], [1, 2, 3]), r"blocks of \[4, 4, 5\] tokens: expected .* 4"),
        ((None, TOKENS[:-1], SIZES, [1, 2, 3]), "3 blocks with 3 sizes and 11 tokens"),
        ((None, TOKENS, SIZES, [1, 2]), "2 blocks with 3 sizes"),
        ((None, [], [], []), "an event of no blocks"),
        ((None, [1, 2, 3, 2**32], [4], [1]), "token ids must be in"),
        ((None, [1, 2, 3, -4], [4], [1]), "token ids must be in"),
        ((None, TOKENS[:4], [4], [2**64]), "64-bit integer"),
        ((None, TOKENS[:4], [4], [-(2**63) - 1]), "64-bit integer"),
        ((None, TOKENS[:4], [4], [1], 0, 77), "behind parent_hash 77"),
        ((None, [1, 2, 3, 4.0], [4], [1]), "token ids must be in"),
        ((None, "abcd", [4], [1]), "token ids must be in"),
        ((None, 5, [4], [1]), "token ids must be in"),
        ((None, TOKENS[:4], [4.0], [1]), "a size of num_block_tokens must be a whole number"),
        ((None, TOKENS[:4], 4, [1]), "num_block_tokens must be a sequence, got int"),
        ((None, TOKENS[:4], [4], [1.9]), "64-bit integer"),
        ((None, TOKENS[:4], [4], ["a"]), "64-bit integer"),
        ((None, TOKENS[:4], [4], 7), "block_hashes must be a sequence, got int"),
        ((None, TOKENS[:4], [4], [1], "a"), "lora_id must be a whole number"),
        ((2**63, TOKENS[:4], [4], [1]), "event_id must be a whole number in"),
        ((-1, TOKENS[:4], [4], [1]), "event_id must be a whole number in"),
        ((range(4), [4], [1]), "event_id must be a whole number, got range: .* name the others"),
        ((TOKENS[:4], [4], [1]), "event_id must be a whole number, got list"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_sent(call, message):
    with publishing() as publisher:
        with pytest.raises(ConfigError, match=message):
            publisher.publish_stored(*call)
        assert publisher._publisher.num_published == 0
        assert publisher.publish_all_cleared() == 0


def test_a_parent_that_was_removed_is_missing():
    with publishing() as publisher:
        publisher.publish_stored(token_ids=TOKENS[:4], num_block_tokens=[4], block_hashes=[1])
        publisher.publish_removed(block_hashes=[1])
        with pytest.raises(ConfigError, match="behind parent_hash 1"):
            publisher.publish_stored(None, TOKENS[:4], [4], [2], parent_hash=1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_block_size": 0}, "kv_block_size must be in"),
        ({"kv_block_size": "16"}, "kv_block_size must be in"),
        ({"wire": "nats"}, "wire must be"),
        ({"capacity_blocks": "many"}, "cannot tell followers"),
        ({"worker_id": 3}, "by these names: worker_id"),
        ({"defects": {}}, "by these names: defects"),
        ({"cxl_pools": [2**63]}, "a pool of cxl_pools must be"),
        ({"dp_rank": "first"}, "dp_rank must be"),
        ({"topic": 5}, "cannot publish"),
        ({"keys": "secret"}, "keys must be a ServerKeys, got str"),
    ],
)
def test_settings_that_cannot_be_are_refused(more, message):
    with pytest.raises(ConfigError, match=message), publishing(**more):
        pass


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ({"tier": "tape"}, "tier must be one of"),
        ({"tier": 1}, "tier must be one of"),
        ({"cxl_metadata": {"state": "lost"}}, "state of cxl_metadata must be one of"),
        ({"cxl_metadata": {"pool": 1}}, "cannot use cxl_metadata: expected state, pool_id"),
        ({"cxl_metadata": CxlMetadata(CxlState.CXL_POOLED, 2**70, ())}, "pool_id must be"),
        ({"cxl_metadata": CxlMetadata("cxl_pooled", 1, (b"w",))}, "a worker of"),
        ({"cxl_metadata": CxlMetadata("cxl_pooled", 1, "w")}, "accessible_workers must be"),
        ({"cache_salt": uuid.UUID(int=5)}, "cache_salt must be a str"),
        ({"cache_salt": "\ud800"}, "cache_salt must be Unicode"),
        ({"lora_name": 5}, "lora_name must be a str, got 5"),
        ({"moe": object()}, "moe must be a MoeLabel"),
        ({"moe": MoeLabel(1, 2**63)}, "moe expert must be a whole number"),
        ({"extra_keys": [[1], [2]]}, "extra_keys of 2 blocks for 1"),
        ({"extra_keys": [["a"]]}, "a key of extra_keys must be"),
        ({"lorra_name": "a"}, "have no lorra_name: expected"),
    ],
)
def test_details_that_cannot_be_are_refused(details, message):
    with publishing() as publisher:
        with pytest.raises(ConfigError, match=message):
            publisher.publish_stored(None, TOKENS[:4], [4], [1], **details)
        assert publisher._publisher.num_published == 0


def test_a_state_that_is_none_is_refused():
    with publishing() as publisher, pytest.raises(ConfigError, match="new_state must be one of"):
        publisher.publish_cxl_state_transition(None, [1], "gone")


def test_an_address_that_is_taken_is_an_error():
    with publishing() as publisher, pytest.raises(TransportError):
        KvEventPublisher(publisher.endpoint, kv_block_size=4)


def test_numbers_of_numpy_are_numbers(client):
    with publishing() as publisher:
        publisher.publish_stored(
            np.int64(3), np.arange(8, dtype=np.uint32), None, np.array([1, 2]), np.int64(4),
            moe=MoeLabel(np.int64(1), 2), cxl_metadata={"pool_id": np.int32(7)},
        )  # fmt: skip
        assert told(client, publisher) == {1, 2}
        assert not publisher._publisher.failures


def test_token_ids_are_in_no_error():
    for tokens in ([7777777, -8888888], [7777777, 8888888.5], {7777777, 8888888}):
        with publishing() as publisher, pytest.raises(ConfigError) as raised:
            publisher.publish_stored(token_ids=tokens, block_hashes=[1])
        assert "7777" not in str(raised.value)
        assert "8888" not in str(raised.value)


def test_after_shutdown_nothing_can_be_published():
    with publishing() as publisher:
        pass
    with pytest.raises(ConfigError, match="was shut down"):
        publisher.publish_all_cleared()
    publisher.shutdown()


def test_the_last_id_is_the_last():
    with publishing() as publisher:
        publisher.publish_all_cleared(2**63 - 1)
        with pytest.raises(ConfigError, match="event_id must be"):
            publisher.publish_all_cleared()


@pytest.mark.parametrize("wire", ["kvplug", "vllm"])
def test_any_address_is_loopback_without_keys(wire):
    with KvEventPublisher("tcp://*:0", kv_block_size=4, wire=wire) as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")


def test_variables_say_what_the_caller_does_not(client, monkeypatch):
    monkeypatch.setenv("KVPLUG_WORKER_URL", "http://a:1")
    monkeypatch.setenv("KVPLUG_CXL_POOLS", "3,4")
    monkeypatch.setenv("KVPLUG_TOPOLOGY", "zone=z")
    with publishing(url="http://b:2") as publisher:
        about = client.join(publisher.endpoint).about
    assert (about.url, about.cxl_pools, about.topology) == ("http://b:2", (3, 4), {"zone": "z"})


@pytest.mark.parametrize("wire", ["kvplug", "vllm"])
def test_keys_of_the_environment_protect(wire, key_files, monkeypatch):
    monkeypatch.setenv("KVPLUG_CURVE_KEY_FILE", str(key_files / "server.key_secret"))
    monkeypatch.setenv("KVPLUG_CURVE_CLIENTS", str(key_files / "allowed"))
    with publishing(wire=wire) as publisher:
        assert publisher._publisher._authenticator is not None


def test_a_key_that_cannot_be_used_publishes_nothing(key_files, monkeypatch):
    monkeypatch.setenv("KVPLUG_CURVE_KEY_FILE", "/nowhere/key")
    with pytest.raises(ConfigError, match="/nowhere/key"), publishing():
        pass
    keys = ServerKeys.from_files(key_files / "server.key_secret")
    with publishing(keys=keys) as publisher:  # the caller's come first
        assert publisher.publish_all_cleared() == 0
