"""vLLM's client asks: what is chosen, counted and left to vLLM."""

import asyncio
from types import SimpleNamespace as Bag

import pytest

from kvplug.dp_balancing import vllm
from kvplug.dp_balancing.vllm import FrontEnd, make_ask, request_of, streams_of
from kvplug.errors import ConfigError
from kvplug.events import Namespace
from tests.dp_balancing.ranks import until_held
from tests.dp_balancing.vllm_objects import Client, outputs, request, source

DOCUMENT = list(range(100, 180))


@pytest.fixture
def client(ranks, chooser):
    """One that asks a chooser which is ready, without the compilation."""
    kind = type("Kind", (Client,), {})
    client = kind(dict(enumerate(map(source, ranks.streams))))
    front_end = FrontEnd(client)
    front_end.balancer._chooser = chooser
    setattr(client, vllm._FRONT_END, front_end)
    make_ask(kind)
    return client


def send(client, name, tokens, **fields):
    """The number of the rank."""
    chosen = client.get_core_engine_for_request(request(name, tokens, **fields))
    return client.core_engines.index(chosen)


def receive(client, **what):
    asyncio.run(type(client).process_engine_outputs(client, outputs(**what)))


def load_of(client):
    return len(getattr(client, vllm._FRONT_END).balancer._chooser.router.load)


def left_by(client):
    return getattr(client, vllm._FRONT_END).balancer.num_left


def test_a_prompt_goes_where_its_prefix_is(client, ranks, chooser):
    ranks.store(1, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    assert send(client, "r", [*DOCUMENT, 1, 2]) == 1
    assert client.reqs_in_flight == {"r": client.core_engines[1]}  # vLLM's own bookkeeping


def test_load_ends_with_the_request_also_if_it_is_aborted(client):
    send(client, "served", DOCUMENT)
    send(client, "aborted", DOCUMENT)
    assert load_of(client) == 2
    receive(client, tokens_of={"served": [5], "unknown": [6]})
    receive(client, tokens_of={"served": [5, 6]}, finished=["served", "unknown"])
    assert load_of(client) == 1
    receive(client, finished=["aborted"])
    assert load_of(client) == 0
    assert client.reqs_in_flight == {}


def test_a_rank_that_the_client_names_is_taken_and_counted(client, ranks, chooser):
    ranks.store(0, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    assert send(client, "r", DOCUMENT, data_parallel_rank=1) == 1
    assert load_of(client) == 1


def test_a_rank_that_is_none_is_vllms_to_refuse(client, log):
    with pytest.raises(IndexError):
        send(client, "r", DOCUMENT, data_parallel_rank=7)
    assert left_by(client) == {"NoWorkerError": 1}


def test_late_interaction_stays_with_vllm_and_is_counted(client, ranks, chooser):
    ranks.store(1, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    pooling = Bag(late_interaction_params=object())
    assert send(client, "r", DOCUMENT, pooling_params=pooling) == 0
    assert load_of(client) == 1


def test_a_session_goes_on_where_it_is(client):
    where = send(client, "r", DOCUMENT)
    assert send(client, "r", [*DOCUMENT, 1]) == where
    assert load_of(client) == 1


def test_embeddings_go_by_load(client, ranks, chooser):
    ranks.store(0, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    busy = send(client, "busy", DOCUMENT)
    embeddings = [[0.5]] * 30
    assert send(client, "r", None, prompt_embeds=embeddings) == 1 - busy


def test_a_damaged_request_is_left_to_vllm_and_named_once(client, log):
    for number in range(3):
        assert send(client, str(number), [-1]) == 0
    assert left_by(client) == {"HashingError": 3}
    lines = [each for each in log.messages if "balances its data-parallel ranks itself" in each]
    assert len(lines) == 1
    assert "HashingError" in lines[0]


def test_other_front_ends_load_comes_from_vllms_counts(client):
    client.client_count = 2
    send(client, "first", DOCUMENT)
    receive(client, finished=["first"])
    client.lb_engines = [[9, 8, 0.5], [0, 0, 0.0]]
    assert send(client, "a", DOCUMENT[::-1]) == 1
    client.lb_engines = [[0, 0, 0.0], [9, 8, 0.5]]
    assert send(client, "b", DOCUMENT[::-1][:40]) == 0


def test_a_lost_event_thread_leaves_the_choice_to_vllm(client, chooser, log):
    chooser._thread.stop()
    assert [send(client, str(number), DOCUMENT) for number in range(3)] == [0, 0, 0]
    assert left_by(client) == {"no_events": 3}
    assert sum("no rank's event stream is connected" in each for each in log.messages) == 1


def test_another_number_of_ranks_leaves_the_choice_to_vllm(client):
    client.core_engines.append(b"\2\0")
    assert send(client, "r", DOCUMENT) == 0
    assert left_by(client) == {"ranks_changed": 1}


def test_wrapping_twice_is_as_wrapping_once():
    kind = type("Kind", (Client,), {})
    make_ask(kind)
    methods = dict(vars(kind))
    make_ask(kind)
    assert dict(vars(kind)) == methods


def test_a_class_without_the_methods_stays_as_it_is():
    kind = type("Kind", (), {"get_core_engine_for_request": lambda self, request: b""})
    methods = dict(vars(kind))
    with pytest.raises(AttributeError):
        make_ask(kind)
    assert dict(vars(kind)) == methods


def test_a_client_whose_ranks_cannot_be_followed_chooses_as_before(log):
    kind = type("Kind", (Client,), {})
    make_ask(kind)
    client = kind({0: source(Bag(events="ipc:///x", replay=None, topic="")), 9: None})
    assert send(client, "r", DOCUMENT) == 0
    assert any("rank 1 has none" in each for each in log.messages)


def test_what_is_asked():
    lora = Bag(lora_name="adapter")
    image = Bag(identifier="i", mm_position=Bag(offset=3, length=2))
    asked = request_of(
        request("r", DOCUMENT, lora_request=lora, cache_salt="s", mm_features=[image])
    )
    assert asked.namespace == Namespace("adapter", "s")
    assert (asked.num_tokens, asked.max_tokens) == (80, 8)
    assert asked.items == [("i", 3, 2)]
    mixed = request_of(request("r", DOCUMENT, prompt_is_token_ids=[True]))
    assert mixed.tokens is None


def far(endpoint):
    return Bag(publisher="zmq", endpoint=endpoint, replay_endpoint=None, topic="t")


def test_streams_of_ranks_here_and_elsewhere():
    sources = {0: far("tcp://*:5557"), 1: far("tcp://10.0.0.2:5558")}
    here, there = streams_of(Client(sources, num_local=1), sources)
    assert (here.events, here.engine_rank, here.topic) == ("tcp://127.0.0.1:5557", 0, "t")
    assert there.events == "tcp://10.0.0.2:5558"


@pytest.mark.parametrize("endpoint", ["tcp://*:5558", "tcp://127.0.0.1:5558", "ipc:///tmp/x"])
def test_a_rank_elsewhere_must_name_its_address(endpoint):
    sources = {0: far("tcp://*:5557"), 1: far(endpoint)}
    with pytest.raises(ConfigError, match="of rank 1 that is reached from here"):
        streams_of(Client(sources, num_local=1), sources)


def test_ranks_of_a_hybrid_node_do_not_begin_at_0():
    sources = {4: far("tcp://*:5561"), 5: far("tcp://*:5562")}
    streams = streams_of(Client(sources, first_rank=4), sources)
    assert [stream.engine_rank for stream in streams] == [4, 5]
