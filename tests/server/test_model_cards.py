"""What an engine says it serves."""

import pytest

from kvplug.server.model_cards import Served, model_of, served_by

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
