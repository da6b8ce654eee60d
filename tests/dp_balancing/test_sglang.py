"""SGLang's controller asks: what is chosen, and what is left to SGLang."""

import json
import sys
from array import array
from types import ModuleType
from types import SimpleNamespace as Bag

import pytest

from kvplug.dp_balancing import sglang
from kvplug.dp_balancing.sglang import request_of, streams_of
from kvplug.errors import ConfigError
from tests.dp_balancing.ranks import until_held

DOCUMENT = list(range(100, 180))


@pytest.fixture(autouse=True)
def utils(monkeypatch):
    """The one function of SGLang that is called."""
    names = ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.utils")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].is_health_check_generate_req = lambda request: request.is_health_check


def arguments(**fields):
    config = {"publisher": "kvplug", "endpoint": "ipc:///tmp/x", "replay_endpoint": "ipc:///tmp/y"}
    given = {"kv_events_config": json.dumps(config), "nnodes": 1, "dp_size": 2}
    return Bag(**{**given, **fields})


@pytest.fixture
def controller(chooser):
    controller = Bag(
        server_args=arguments(),
        workers=[0, 1],
        _active_workers=[0, 1],
        load_snapshot_reader=Bag(read_all=list),
    )
    dispatcher = sglang.Dispatcher(controller)
    dispatcher.balancer._chooser = chooser
    setattr(controller, sglang._MARK, dispatcher)
    return controller


def request(tokens, **fields):
    given = {"input_ids": array("i", tokens), "routed_dp_rank": None, "is_health_check": False}
    return Bag(**{**given, "sampling_params": Bag(max_new_tokens=8), **fields})


def rank_of(controller, asked):
    """What SGLang finds in the request, None if the choice is its own."""
    assert sglang.before_dispatch(controller, asked, refresh_load_budget=False) is None
    return asked.routed_dp_rank


def num_booked(controller):
    return len(getattr(controller, sglang._MARK).balancer._chooser.router.load)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_prompt_goes_where_its_prefix_is(controller, ranks, chooser, rank):
    ranks.store(rank, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    assert rank_of(controller, request([*DOCUMENT, 1, 2])) == rank
    assert num_booked(controller) == 1


def test_a_rank_that_the_client_names_stays(controller, ranks, chooser):
    ranks.store(0, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    assert rank_of(controller, request(DOCUMENT, routed_dp_rank=1)) == 1
    assert num_booked(controller) == 1


@pytest.mark.parametrize(
    "fields", [{"bootstrap_room": 3}, {"session_id": "s"}, {"is_health_check": True}]
)
def test_what_belongs_somewhere_is_left_to_sglang(controller, fields):
    assert rank_of(controller, request(DOCUMENT, **fields)) is None
    assert num_booked(controller) == 0


@pytest.mark.parametrize("name", ["extra_key", "lora_id", "mm_inputs"])
def test_what_cannot_be_matched_goes_by_load(controller, ranks, chooser, name):
    ranks.store(1, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    busy = rank_of(controller, request(DOCUMENT))
    assert busy == 1
    assert rank_of(controller, request(DOCUMENT, **{name: "x"})) == 0


def test_a_rank_that_is_not_active_is_not_named(controller, ranks, chooser):
    ranks.store(1, DOCUMENT)
    until_held(chooser, DOCUMENT, 20)
    controller._active_workers = [0, 5]
    assert rank_of(controller, request(DOCUMENT)) is None
    assert num_booked(controller) == 0


def test_nothing_raises_into_sglang(controller, log):
    assert rank_of(controller, request([-1])) is None
    assert any("HashingError" in each for each in log.messages)


def test_a_controller_that_cannot_be_followed_chooses_as_before(log):
    controller = Bag(server_args=arguments(kv_events_config=None))
    sglang.after_start(None, controller)
    assert not hasattr(controller, sglang._MARK)
    assert any("expected KV events" in each for each in log.messages)


def test_the_salt_is_the_namespace():
    asked = request_of(request(DOCUMENT, cache_salt="s"), "id")
    assert asked.namespace.salt == "s"
    assert (asked.num_tokens, asked.max_tokens, asked.reports_first_token) == (80, 8, False)


def test_events_are_switched_on_before_arguments_are_resolved():
    given = arguments(kv_events_config=None)
    sglang.before_resolution(given)
    config = json.loads(given.kv_events_config)
    assert (config["publisher"], config["format"]) == ("kvplug", "dynamo")
    events = [stream.events for stream in streams_of(given)]
    assert events == [config["endpoint"], config["endpoint"] + "_dp1"]


@pytest.mark.parametrize("fields", [{"dp_size": 1}, {"nnodes": 2}, {"_resolution_finished": True}])
def test_events_are_not_switched_on(fields):
    given = arguments(kv_events_config=None, **fields)
    sglang.before_resolution(given)
    assert given.kv_events_config is None


def test_a_config_that_is_given_stays():
    given = arguments()
    sglang.before_resolution(given)
    assert given.kv_events_config == arguments().kv_events_config


def test_streams_of_a_stock_publisher():
    config = {"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "t"}
    streams = streams_of(arguments(kv_events_config=json.dumps(config)))
    assert [each.events for each in streams] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
    assert {each.topic for each in streams} == {"t"}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"publisher": "null"}, "expected KV events"),
        ({"publisher": "zmq", "endpoint": "tcp://10.0.0.1:5557"}, "a publisher that binds"),
        ({"publisher": "kvplug", "endpoint": "tcp://127.0.0.1:0"}, "reached from here"),
    ],
)
def test_streams_that_cannot_be_followed(config, text):
    with pytest.raises(ConfigError, match=text):
        streams_of(arguments(kv_events_config=json.dumps(config)))


def test_ranks_on_several_nodes_are_left_to_sglang():
    with pytest.raises(ConfigError, match="2 nodes"):
        streams_of(arguments(nnodes=2))
