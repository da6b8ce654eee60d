"""Bodies of requests, large ones too."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.events import Namespace
from kvplug.server import bodies
from kvplug.server.bodies import (
    first_prompts,
    has_extra_key,
    lora_path_of,
    namespace_of,
    read_body,
)
from tests.server.engine import Engine
from tests.server.test_service import routing

_TEXTS = st.text(max_size=5)
_IDS = st.lists(st.integers(0, 99), max_size=4)
_PROMPTS = _TEXTS | _IDS | st.lists(_TEXTS, min_size=1) | st.lists(_IDS, min_size=1)


def expected_of(prompt):
    is_batch = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return [prompt[0]] * min(2, len(prompt)) if is_batch else prompt


@given(prompt=_PROMPTS, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_of_a_batch_the_first_prompt_is_read(prompt, indent, ascii_only):
    raw = json.dumps(prompt, indent=indent, ensure_ascii=ascii_only).encode()
    assert first_prompts(raw) == expected_of(prompt)


@pytest.mark.parametrize("prompt", [None, 1, {"a": []}, [[[1]], [2]], [["a]"]]])
def test_what_is_no_prompt_is_none_that_is_routed_by(prompt):
    got = first_prompts(json.dumps(prompt).encode())
    assert got == prompt or got in ([None], [None, None])


def test_too_many_token_ids_are_not_read(monkeypatch):
    monkeypatch.setattr(bodies, "_MAX_TOKEN_IDS", 3)
    assert first_prompts(b"[1,2,3]") == [1, 2, 3]
    assert first_prompts(b"[1,2,3,4]") is None
    assert first_prompts(b"[[1,2,3,4], [1]]") == [None, None]


async def test_a_large_body_has_the_fields_of_a_small_one():
    body = {"model": "m", "prompt": [[1, 2], [3]], "user": "x" * bodies._LARGE_BYTES, "n": 2}
    assert await read_body(json.dumps(body).encode()) == {**body, "prompt": [[1, 2], [1, 2]]}


async def test_a_large_body_is_routed_and_passed_on_as_it_is():
    engine = Engine()
    raw = b'{"model": "m", "max_tokens": 1, "prompt": [' + b"[1]," * 500_000 + b"[2]]}"
    async with (
        routing(engine) as (service, client),
        client.post("/v1/completions", data=io.BytesIO(raw)) as response,
    ):
        assert response.status == 200
        [counts] = service.proxy.counts.values()
        assert counts.num_prompt_tokens == 1
    assert engine.last_body == raw


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
