"""Usage out of answers and streams."""

import json

import pytest

from kvplug.audit.router import Usage
from kvplug.server.usage import StreamTail, unauditable, usage_of

WITH = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}


def body(usage):
    return json.dumps({"id": "x", "choices": [{"text": "hi"}], "usage": usage}).encode()


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        (body(WITH), Usage(40, 32)),
        (body({"prompt_tokens": 40, "prompt_tokens_details": None}), Usage(40, None)),
        (
            body({"prompt_tokens": 40, "prompt_tokens_details": {"image_tokens": 1}}),
            Usage(40, None),
        ),
        (body({"prompt_tokens": 40}), Usage(40, None)),
        (body(None), None),
        (b'{"choices": []}', None),
        (b"[1]", None),
        (b"\xff", None),
        (b"", None),
        (b"[" * 100_000, None),
        (body({"prompt_tokens": "many"}), None),
    ],
)
def test_usage_is_read_or_not_there(answer, usage):
    assert usage_of(answer) == usage


def event(usage):
    return b"data: " + body(usage) + b"\n\n"


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_the_last_chunk_of_a_stream_counts(size):
    # vLLM's continuous_usage_stats: each chunk has a usage, only the last one with its details.
    stream = event({"prompt_tokens": 40}) * 200 + event(WITH) + b"data: [DONE]\n\n"
    tail = StreamTail()
    for at in range(0, len(stream), size):
        tail.add(stream[at : at + size])
    assert tail.usage() == Usage(40, 32)


def test_a_stream_without_usage_has_none():
    tail = StreamTail()
    assert tail.usage() is None
    for part in (event(None), b'data: {"usage": nonsense}\n\n', b"data: [DONE]\n\n"):
        tail.add(part)
    assert tail.usage() is None


def test_only_the_end_of_a_stream_is_kept():
    tail = StreamTail()
    tail.add(event(WITH))
    for _ in range(1000):
        tail.add(b"data: " + b"x" * 100 + b"\n\n")
    assert tail.usage() is None
    assert sum(map(len, tail._parts)) < 10_000


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
