"""What engines say they serve, and what a fleet serves by name."""

import pytest

from kvplug.server.workers.model_cards import (
    ModelTable,
    Served,
    model_of,
    root_of_sglang,
    served_by,
    with_root,
)
from kvplug.tokenization import prompt_kind
from tests.server.engine import Engine
from tests.server.test_service import COMPLETION, routing

VLLM = b"""{"data": [
    {"id": "m", "root": "/models/m", "parent": null, "owned_by": "vllm"},
    {"id": "alias", "root": "/models/m", "parent": null, "owned_by": "vllm"},
    {"id": "l", "root": "/adapters/l", "parent": "m", "owned_by": "vllm"}]}"""


def test_an_adapter_has_the_tokenizer_of_its_model():
    served = served_by(VLLM)
    assert served == {
        "m": Served("m", "", "/models/m"),
        "alias": Served("alias", "", "/models/m"),
        "l": Served("m", "l", "/models/m", "/adapters/l"),
    }
    assert (model_of(served), model_of({})) == ("m", "")


def test_an_adapter_of_sglang_has_the_name_that_sglang_understands():
    served = served_by(VLLM.replace(b'"vllm"', b'"sglang"'))
    engines = frozenset([prompt_kind.Engine.SGLANG])
    assert served["m:l"] == Served("m", "l", "/models/m", "/adapters/l", engines)
    assert "l" not in served


def test_a_list_that_is_none_is_a_value_error():
    for answer in (b"", b"{}", b'{"data": [{"root": "x"}]}'):
        with pytest.raises(ValueError, match=r".+"):
            served_by(answer)


def test_all_engines_of_a_model_count():
    known = {engine: Served("m", engines=frozenset([engine])) for engine in prompt_kind.Engine}
    table = ModelTable({"a": {"m": known["vllm"]}}, {"b": {"m": known["sglang"]}})
    assert table.known["m"].engines == {"vllm", "sglang"}


M, N, OLD = Served("m", root="/m"), Served("n"), Served("m", root="/old")


def test_workers_that_are_up_go_before_those_that_are_down():
    table = ModelTable({"a": {"m": M}, "b": {"m": OLD, "n": N}}, {"c": {"m": OLD, "gone": N}})
    assert table.served == {"m": M, "n": N}
    assert list(table.served) == ["m", "n"]
    assert table.known == {"m": M, "n": N, "gone": N}
    assert table.workers("m") == {"a", "b"}
    assert table.workers("n") == {"b"}
    assert table.workers("gone") == {"c"}
    assert table.workers("never") == frozenset()


def test_a_fleet_that_nobody_was_seen_of_serves_nothing():
    table = ModelTable({}, {"a": {}})
    assert (table.served, table.known, table.workers("m")) == ({}, {}, frozenset())


async def test_the_table_is_made_anew_only_when_the_fleet_changes():
    async with routing(Engine()) as (service, client):
        fleet, [url] = service.fleet, service.fleet.workers
        models, candidates = fleet.models, fleet.candidates("m")
        for _ in range(3):
            async with client.post("/v1/completions", json=COMPLETION) as response:
                assert response.status == 200
        assert fleet.models is models
        assert fleet.candidates("m") is candidates
        fleet.mark_down(url, "a test says so")
        assert fleet.models == {}
        assert fleet.candidates("m") == {url}  # it may be back before it is looked at


def test_sglang_says_elsewhere_where_its_tokenizer_is():
    card = '{"data": [{"id": "tiny", "root": "tiny", "owned_by": "sglang"}]}'
    served = served_by(card.encode())
    info = b'{"model_path": "/models/tiny", "tokenizer_path": null, "page_size": 1}'
    assert with_root(served, root_of_sglang(info))["tiny"].root == "/models/tiny"
    own = b'{"model_path": "/models/tiny", "tokenizer_path": "/tokenizers/tiny"}'
    assert with_root(served, root_of_sglang(own))["tiny"].root == "/tokenizers/tiny"
    assert with_root(served, root_of_sglang(b"{}")) == served
    vllm = served_by(VLLM)
    assert with_root(vllm, "/models/other") == vllm
