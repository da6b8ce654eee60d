"""The client against a server that speaks as an engine does, or breaks off."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.demo.client import CHAT_PATH, Completed, Failed, send_all

DELTA = {"choices": [{"delta": {"content": "a"}}]}
USAGE = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 32}}


def event(chunk):
    return f"data: {json.dumps(chunk)}\n\n"


WHOLE = (
    event(DELTA) + ": a comment\n\n" + event({"choices": [], "usage": USAGE}) + "data: [DONE]\n\n"
)


class Engine:
    """Answers each request with the next text; counts how many it has at once."""

    def __init__(self, texts, status=200):
        self.texts, self.status = list(texts), status
        self.received, self.at_once, self.most_at_once = [], 0, 0

    async def chat(self, request):
        self.received.append(await request.json())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return web.Response(
            text=self.texts.pop(0), status=self.status, content_type="text/event-stream"
        )


async def outcomes_of(engine, num_requests=1, concurrency=1):
    application = web.Application()
    application.add_routes([web.post(CHAT_PATH, engine.chat)])
    told = []
    async with TestServer(application) as server:
        outcomes = await send_all(
            [{"number": number} for number in range(num_requests)],
            url=str(server.make_url("/")),
            concurrency=concurrency,
            on_outcome=lambda: told.append(True),
        )
    assert len(told) == num_requests
    return outcomes


async def test_an_answer_gives_its_times_and_tokens():
    (outcome,) = await outcomes_of(Engine([WHOLE]))
    assert isinstance(outcome, Completed)
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (64, 32)
    assert 0 < outcome.ttft_s <= outcome.total_s


async def test_no_details_mean_nothing_cached():
    bare = event(DELTA) + event({"choices": [], "usage": {"prompt_tokens": 5}})
    null = event(DELTA) + event({"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}})
    outcomes = await outcomes_of(Engine([bare, null]), num_requests=2)
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the stream ended early"),
        (event(DELTA), "the stream ended early"),
        (event({"error": {"message": "gone"}}), "the stream broke off: {'message': 'gone'}"),
        ("data: {no json\n\n", "JSONDecodeError"),
    ],
)
async def test_half_an_answer_is_a_failure(text, reason):
    (outcome,) = await outcomes_of(Engine([text]))
    assert isinstance(outcome, Failed)
    assert outcome.reason.startswith(reason)


async def test_a_reason_is_a_failure():
    (outcome,) = await outcomes_of(Engine(["no worker"], status=503))
    assert outcome == Failed("status 503: no worker")


async def test_nobody_there_is_a_failure(unused_tcp_port):
    outcomes = await send_all(
        [{}], url=f"http://127.0.0.1:{unused_tcp_port}", concurrency=1, on_outcome=lambda: None
    )
    assert isinstance(outcomes[0], Failed)


async def test_requests_are_sent_in_order_and_not_too_many_at_once():
    engine = Engine([WHOLE] * 20)
    await outcomes_of(engine, num_requests=20, concurrency=3)
    assert engine.most_at_once <= 3
    one_by_one = Engine([WHOLE] * 20)
    await outcomes_of(one_by_one, num_requests=20)
    assert one_by_one.received == [{"number": number} for number in range(20)]
