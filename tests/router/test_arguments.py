"""Slips of a caller: each gets one sentence, and changes nothing."""

import numpy as np
import pytest

from kvplug import Namespace, Rank, Router, RouterConfig
from kvplug.errors import ConfigError, HashingError, UnknownRankError

PROMPT = list(range(64))
A = Rank("a")
HUGE = (2**63, 2**80, 2**2000)


@pytest.fixture
def router():
    router = Router(RouterConfig(block_size=4))
    router.add_worker("a")
    return router


@pytest.mark.parametrize("call", ["finish", "first_token", "renew", "add_output_block"])
@pytest.mark.parametrize("request_id", [None, 5, "", [], "decision"])
def test_a_request_is_named_by_a_text(router, call, request_id):
    decision = router.route(PROMPT)
    given = decision if request_id == "decision" else request_id
    with pytest.raises(ConfigError, match="expected a request id to be a str that is not empty"):
        getattr(router, call)(given)
    assert len(router.load) == 1


@pytest.mark.parametrize("request_id", [5, "", []])
def test_an_id_of_the_caller_is_a_text(router, request_id):
    with pytest.raises(ConfigError, match="expected a request id"):
        router.route(PROMPT, request_id=request_id)
    assert len(router.load) == 0


@pytest.mark.parametrize("name", [5, "", None, A])
def test_a_worker_has_a_name(router, name):
    for call in (router.add_worker, router.remove_worker):
        with pytest.raises(ConfigError, match="expected the name of a worker"):
            call(name)
    assert router.ranks == [A]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dp_size": "2"}, "dp_size must be a whole number in [1, 1024], got '2'"),
        ({"dp_size": 5000}, "dp_size must be a whole number in [1, 1024], got 5000"),
        ({"model": 5}, "model must be a name, got 5"),
        ({"taints": 5}, "taints must be a collection of names, got 5"),
    ],
)
def test_a_worker_that_cannot_be_is_not_added(router, settings, sentence):
    with pytest.raises(ConfigError) as rejected:
        router.add_worker("b", **settings)
    assert str(rejected.value).endswith(sentence)
    assert router.ranks == [A]


@pytest.mark.parametrize(("rank", "batch"), [("a", None), (Rank(5), None), (A, []), (A, None)])
def test_events_are_of_a_rank_and_in_a_batch(router, rank, batch):
    with pytest.raises(ConfigError, match=r"expected (a rank|events) to be an? "):
        router.apply(rank, batch)


@pytest.mark.parametrize("namespace", ["lora", 5, None, Namespace(5), Namespace("", 5)])
def test_a_namespace_is_of_texts(router, namespace):
    with pytest.raises(HashingError, match=r"expected a Namespace|a name or a salt"):
        router.route(PROMPT, namespace=namespace)


@pytest.mark.parametrize("tokens", [{1, 2, 3, 4}, {1: 2}, np.array([True] * 8)])
def test_tokens_have_an_order_and_are_numbers(router, tokens):
    with pytest.raises(HashingError, match="expected integers"):
        router.route(tokens)


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("name", ["num_running", "num_waiting", "waiting_tokens", "active_blocks"])
def test_no_engine_reports_so_much(router, name, number):
    with pytest.raises(ConfigError, match=f"expected {name} to be a whole number in"):
        router.set_reported_load(A, **{name: number})
    assert router.route(PROMPT).rank == A


@pytest.mark.parametrize("capacity", [*HUGE, -5, 0, float("nan"), "x"])
def test_an_impossible_capacity_is_ignored(router, capacity):
    router.set_cache_capacity(A, capacity)
    assert router.cache_size(A).capacity == 0
    for _ in range(3):
        assert router.route(PROMPT).rank == A


@pytest.mark.parametrize("workers", [5, [5]])
def test_workers_are_a_collection_of_names(router, workers):
    with pytest.raises(ConfigError, match="workers must be a collection of names"):
        router.route(PROMPT, workers=workers)


def test_an_option_that_there_is_not_is_named_with_those_that_there_are(router):
    with pytest.raises(TypeError, match="no option 'only_worker'; options are dp_rank, max_"):
        router.peek(PROMPT, only_worker="a")


def test_an_index_is_saved_and_loaded_under_a_name(router, tmp_path):
    router.save_index(str(tmp_path / "index"))
    router.load_index(str(tmp_path / "index"))


def test_objects_of_another_kind_are_refused_before_anything_changes(router):
    for call, what in [
        (lambda: Router(16), "the configuration to be a RouterConfig, got 16"),
        (lambda: Router({"mode": "kv"}), "the configuration to be a RouterConfig"),
        (lambda: router.set_observer(5), "an observer to be a RouterObserver, got 5"),
        (lambda: router.set_engine_model(A, {}), "the model of an engine to be an EngineModel"),
        (lambda: router.clear("a"), "a rank to be a Rank, got 'a'"),
    ]:
        with pytest.raises(ConfigError, match=f"expected {what}"):
            call()
    assert router.finish(router.route(PROMPT).request_id)


def test_a_name_is_no_rank(router):
    with pytest.raises(UnknownRankError, match="expected a Rank, got 'a'"):
        router.cache_size("a")
