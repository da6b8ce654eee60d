"""Usage out of answers and streams."""

import json

import pytest

from kvplug.audit.audit import Usage
from kvplug.server.proxy.answers import Stream, WholeEvents
from kvplug.server.proxy.usage import usage_of

WITH = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}


def body(usage):
    return json.dumps({"id": "x", "choices": [{"text": "hi"}], "usage": usage}).encode()


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        (body(WITH), Usage(40, 32, 2)),
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
        (body({"prompt_tokens": -1}), None),
        (body({"prompt_tokens": 40, "completion_tokens": -1}), None),
        (body({"prompt_tokens": 40, "completion_tokens": 10**30}), None),
        (body({"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": -1}}), None),
    ],
)
def test_usage_is_read_or_not_there(answer, usage):
    assert usage_of(answer) == usage


def event(usage):
    return b"data: " + body(usage) + b"\n\n"


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_the_last_chunk_of_a_stream_counts(size):
    # vLLM's continuous_usage_stats: each chunk has a usage, only the last one with its details.
    answer = event({"prompt_tokens": 40}) * 200 + event(WITH) + b"data: [DONE]\n\n"
    stream = Stream()
    for at in range(0, len(answer), size):
        stream.add(answer[at : at + size])
    assert stream.usage() == Usage(40, 32, 2)
    assert stream.num_tokens == 2


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_without_usage_the_events_of_a_stream_are_its_tokens(size):
    answer = event(None) * 30 + b"data: [DONE]\n\n"
    stream = Stream()
    for at in range(0, len(answer), size):
        stream.add(answer[at : at + size])
    assert stream.num_tokens == 30


def test_a_stream_without_usage_has_none():
    stream = Stream()
    assert stream.usage() is None
    for part in (event(None), b'data: {"usage": nonsense}\n\n', b"data: [DONE]\n\n"):
        stream.add(part)
    assert stream.usage() is None


def named(name, **body):
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json.dumps({"type": name, **body}).encode())


def test_a_whole_answer_of_each_api_says_its_usage():
    response = {
        "input_tokens": 40,
        "output_tokens": 2,
        "input_tokens_details": {"cached_tokens": 8},
    }
    message = {"input_tokens": 32, "output_tokens": 2, "cache_read_input_tokens": 8}
    assert usage_of(body(response)) == usage_of(body(message)) == Usage(40, 8, 2)
    assert usage_of(body({"input_tokens": 40, "output_tokens": 2})) == Usage(40, None, 2)
    assert usage_of(body({"total_tokens": 40})) is None


@pytest.mark.parametrize("size", [1, 100, 10**6])
def test_a_stream_of_messages_says_its_prompt_first(size):
    # SGLang 0.5.23; vLLM 0.32 says all of it at the end, too.
    start = {"input_tokens": 32, "output_tokens": 0, "cache_read_input_tokens": 8}
    answer = named("message_start", message={"usage": start})
    answer += named("content_block_delta", delta={"text": '"usage": {}'}) * 500
    answer += named("message_delta", usage={"output_tokens": 500}) + named("message_stop")
    stream = Stream()
    for at in range(0, len(answer), size):
        stream.add(answer[at : at + size])
    assert stream.usage() == Usage(40, 8, 500)


def test_a_response_is_announced_before_its_first_token():
    usage = {"input_tokens": 40, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 8}}
    parts = [
        named("response.created", response={"usage": None}),
        named("response.in_progress", response={}),
        named("response.output_text.delta", delta="a"),
        named("response.output_text.delta", delta="b"),
        # Longer than what is kept: the usage stands behind the text.
        named("response.completed", response={"output": "x" * 50_000, "usage": usage}),
    ]
    stream = Stream()
    assert [stream.add(part) for part in parts] == [False, False, True, False, False]
    assert stream.usage() == Usage(40, 8, 1)


def test_only_the_end_of_a_stream_is_kept():
    stream = Stream()
    stream.add(event(WITH))
    for _ in range(1000):
        stream.add(b"data: " + b"x" * 100 + b"\n\n")
    assert stream.usage() is None
    assert sum(map(len, stream._parts)) < 20_000


def test_a_comment_is_no_first_token():
    stream = Stream()
    parts = [b": keep-alive\n\n", b'data: {"choices"', b": []}\n\n", b"data: [DONE]\n\n"]
    assert [stream.add(part) for part in parts] == [False, True, False, False]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_whole_events_are_passed_on_wherever_the_parts_begin(end):
    sent = end.join((b"data: 1", b": comment", b"data: 2", b"data: [DONE]", b""))
    for size in range(1, len(sent)):
        events = WholeEvents()
        passed = [events.add(sent[at : at + size]) for at in range(0, len(sent), size)]
        assert b"".join(passed) == sent
        assert all(not some or some.endswith(end[-1:]) for some in passed)
        assert events.take_begun() == b""


def test_an_event_that_does_not_end_is_passed_on_as_it_comes():
    events = WholeEvents()
    parts = [b"x" * 2**19, b"y" * 2**20, b"z"]
    assert [len(events.add(part)) for part in parts] == [0, 2**19 + 2**20, 0]
    assert events.take_begun() == b"z"
