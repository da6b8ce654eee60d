"""Bodies of requests, large ones too."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.api_errors import ApiError
from kvplug.events import Namespace
from kvplug.server.api import bodies
from kvplug.server.api.bodies import (
    has_extra_key,
    has_unread_fields,
    lora_path_of,
    max_tokens_of,
    namespace_of,
    read_body,
    unauditable,
)
from kvplug.tokenization.prompt_kind import PromptKind
from tests.server.engine import Engine
from tests.server.test_service import routing

_TEXTS = st.text(max_size=5)
_IDS = st.lists(st.integers(0, 99), max_size=4)
_PROMPTS = _TEXTS | _IDS | st.lists(_TEXTS, min_size=1) | st.lists(_IDS, min_size=1)
_PADDING = "x" * bodies._QUICK_BYTES


def expected_of(prompt):
    is_batch = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return [prompt[0]] * min(2, len(prompt)) if is_batch else prompt


async def read_large(indent=None, ascii_only=True, **fields):
    body = {**fields, "padding": _PADDING}
    read = await read_body(json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode())
    assert read.pop("padding") == _PADDING
    return read


@given(prompt=_PROMPTS, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
async def test_of_a_batch_the_first_prompt_is_read(prompt, indent, ascii_only):
    assert await read_large(indent, ascii_only, prompt=prompt) == {"prompt": expected_of(prompt)}


@pytest.mark.parametrize("prompt", [None, 1, {"a": []}, [[[1]], [2]], [["a]"]], [None]])
async def test_what_is_no_prompt_is_read_and_refused_where_prompts_are(prompt):
    read = (await read_large(prompt=prompt))["prompt"]
    assert read in (prompt, expected_of(prompt))


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4], [[1, 2, 3, 4], [1]], 9 * "x", [9 * "x"]])
async def test_a_prompt_that_is_longer_than_any_context_is_not_read(monkeypatch, prompt):
    monkeypatch.setattr(bodies, "_MAX_TOKEN_IDS", 3)
    monkeypatch.setattr(bodies, "_MAX_TEXT_BYTES", 10)
    assert await read_large(prompt=prompt, n=1) == {"prompt": bodies.UNREAD, "n": 1}
    assert await read_large(prompt=[1, 2, 3]) == {"prompt": [1, 2, 3]}
    assert await read_large(prompt="xx") == {"prompt": "xx"}


async def test_a_field_of_very_many_values_is_not_read():
    messages = [{"role": "user", "content": "a"}] * 20_000
    read = await read_large(messages=messages, model="m")
    assert read == {"messages": bodies.UNREAD, "model": "m"}
    assert has_unread_fields(read)
    assert not has_unread_fields(await read_large(messages=messages[:9000]))


async def test_a_large_body_has_the_fields_of_a_small_one():
    body = {"model": "m", "prompt": [[1, 2], [3]], "n": 2, "x": {"y": [1.5, None, "{"]}}
    assert await read_large(**body) == {**body, "prompt": [[1, 2], [1, 2]]}


@pytest.mark.parametrize("damage", [b"[%s]", b'{"a": 1', b"%s", b'{"a"}', b'{"a": x, "b": "%s"}'])
async def test_a_large_body_that_is_no_object_is_refused(damage):
    raw = damage.replace(b"%s", b'"' + _PADDING.encode() + b'"')
    with pytest.raises(ApiError, match="the body must be a JSON object"):
        await read_body(raw.ljust(bodies._QUICK_BYTES))


@pytest.mark.parametrize(("sign", "is_quick"), [("x", True), (",", False), (":", False)])
async def test_a_long_text_is_read_at_once(sign, is_quick):
    raw = json.dumps({"messages": [{"role": "user", "content": sign * 400_000}]}).encode()
    assert bodies._is_quick(raw) == is_quick
    assert (await read_body(raw))["messages"][0]["content"] == sign * 400_000


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


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        ({}, PromptKind.COMPLETION, 16),
        ({"max_tokens": 5}, PromptKind.COMPLETION, 5),
        ({"max_tokens": None}, PromptKind.COMPLETION, 16),
        ({}, PromptKind.CHAT, None),
        ({"max_tokens": 5}, PromptKind.CHAT, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, PromptKind.CHAT, 7),
        ({"max_tokens": "many"}, PromptKind.CHAT, None),
        ({"max_tokens": 0}, PromptKind.COMPLETION, None),
        ({"max_output_tokens": 5, "max_tokens": 7}, PromptKind.RESPONSES, 5),
        ({"max_tokens": 7}, PromptKind.MESSAGES, 7),
        ({}, PromptKind.MESSAGES, None),
        ({"max_tokens": True}, PromptKind.CHAT, None),
        ({"max_tokens": 5.5}, PromptKind.CHAT, None),
        ({"max_tokens": 10**400}, PromptKind.CHAT, 10_000_000),
    ],
)
def test_how_long_an_answer_may_get(body, kind, expected):
    assert max_tokens_of(body, kind) == expected


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": ["one"]}, None),
        ({"prompt": ["one", "two"]}, "several_prompts"),
        ({"prompt": [[1], [2]]}, "several_prompts"),
        ({"n": 1}, None),
        ({"n": 2}, "several_answers"),
        ({"best_of": 2}, "several_answers"),
        ({"echo": False}, None),
        ({"echo": True}, "computes_otherwise"),
        ({"prompt_logprobs": 0}, "computes_otherwise"),
        ({"truncate_prompt_tokens": -1}, "computes_otherwise"),
    ],
)
def test_some_requests_say_nothing_about_their_prefix(more, reason):
    assert unauditable({"model": "m", **more}) == reason
