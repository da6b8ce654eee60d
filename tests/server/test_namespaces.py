import pytest

from kvplug.events import Namespace
from kvplug.server.model_cards import Served, model_of, served_by
from kvplug.server.namespaces import has_extra_key, lora_path_of, namespace_of


@pytest.mark.parametrize(
    ("body", "namespace"),
    [
        ({}, Namespace()),
        ({"cache_salt": "s"}, Namespace(salt="s")),
        ({"cache_salt": ["s", "t"]}, Namespace(salt="s")),  # SGLang: one for each prompt
        ({"cache_salt": None, "extra_key": ""}, Namespace()),
        ({"cache_salt": 7, "extra_key": []}, Namespace()),
    ],
)
def test_the_salt_is_read_from_the_body(body, namespace):
    assert namespace_of(body) == namespace
    assert namespace_of(body, "l") == Namespace("l", namespace.salt)
    assert not has_extra_key(body)


def test_an_extra_key_keeps_requests_apart_from_all_that_events_say():
    bodies = [
        {"extra_key": "a"},
        {"extra_key": "b"},
        {"extra_key": "a", "cache_salt": "b"},
        {"cache_salt": "a"},
        {},
    ]
    assert len({namespace_of(body) for body in bodies}) == len(bodies)
    assert namespace_of({"extra_key": ["a"]}) == namespace_of({"extra_key": "a"})
    assert [has_extra_key(body) for body in bodies] == [True, True, True, False, False]


def test_the_adapter_beside_the_model_is_read():
    bodies = [{"lora_path": "l"}, {"lora_path": ["l", None]}, {"lora_path": [None]}, {}]
    assert [lora_path_of(body) for body in bodies] == ["l", "l", "", ""]


VLLM = b"""{"data": [
    {"id": "m", "root": "/models/m", "parent": null, "owned_by": "vllm"},
    {"id": "alias", "root": "/models/m", "parent": null, "owned_by": "vllm"},
    {"id": "l", "root": "/adapters/l", "parent": "m", "owned_by": "vllm"}]}"""


def test_an_adapter_has_the_tokenizer_of_its_model():
    served = served_by(VLLM)
    assert served == {
        "m": Served("m", "", "/models/m"),
        "alias": Served("alias", "", "/models/m"),
        "l": Served("m", "l", "/models/m"),
    }
    assert (model_of(served), model_of({})) == ("m", "")


def test_an_adapter_of_sglang_has_the_name_that_sglang_understands():
    served = served_by(VLLM.replace(b'"vllm"', b'"sglang"'))
    assert served["m:l"] == Served("m", "l", "/models/m")
    assert "l" not in served


def test_a_list_that_is_none_is_a_value_error():
    for answer in (b"", b"{}", b'{"data": [{"root": "x"}]}'):
        with pytest.raises(ValueError, match=r".+"):
            served_by(answer)
